//! `train` on real data.

use crate::support::*;
use serde_json::Value;

fn train(args: &[&str]) -> Value {
    let mut command = program(&["train", "--json", "--data", "digits", "--set", "model.hidden=64"]);
    let output = command.args(["--set", "optimizer.lr=0.05"]).args(args).output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

fn last_accuracy(training: &Value) -> f64 {
    training["epochs"].as_array().unwrap().last().unwrap()["accuracy_percent"].as_f64().unwrap()
}

#[test]
fn all_engines_learn_the_digits_alike() {
    let accuracy = |engine| {
        let training = train(&["--engine", engine, "--epochs", "6", "--cards", "2", "--batch", "32"]);
        let epochs = training["epochs"].as_array().unwrap();
        assert_eq!(epochs.len(), 6);
        // Every tenth of the 1,797 images is for testing, and each is tested once.
        assert_eq!(epochs[0]["total"], 179);
        assert!(epochs[5]["loss"].as_f64() < epochs[0]["loss"].as_f64());
        last_accuracy(&training)
    };
    let by_engine = ["single", "dp", "ddp"].map(accuracy);
    for accuracy in by_engine {
        assert!(accuracy > 88.0, "{by_engine:?}");
        assert!((accuracy - by_engine[0]).abs() <= 1.0, "{by_engine:?}");
    }
}

#[test]
fn batches_that_cards_do_not_divide_train_too() {
    for (cards, batch) in [("2", "7"), ("4", "9"), ("4", "3"), ("2", "1")] {
        let losses = |engine| {
            let further = ["--set", "data.shuffle=false", "--set", "optimizer.lr=0.01"];
            let mut command = program(&["train", "--json", "--data", "digits", "--set", "model.hidden=16"]);
            command.args(["--engine", engine, "--epochs", "1", "--cards", cards, "--batch", batch]);
            let output = command.args(further).output().unwrap();
            assert_eq!(exit(&output), 0, "{}", stderr(&output));
            let training: Value = serde_json::from_str(&stdout(&output)).unwrap();
            training["epochs"][0]["loss"].as_f64().unwrap()
        };
        let single = losses("single");
        for engine in ["dp", "ddp"] {
            let loss = losses(engine);
            assert!(
                (loss - single).abs() < 1e-3 * single,
                "{engine}, {cards} cards, batch {batch}: {loss} {single}"
            );
        }
    }
}

#[test]
fn weights_are_saved_and_training_goes_on_from_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights.safetensors");
    let path = file.to_str().unwrap();
    let first = train(&["--engine", "single", "--epochs", "3", "--batch", "32", "--save", path]);
    assert_eq!(first["weights"].as_str(), Some(path));
    let on = train(&["--engine", "ddp", "--cards", "2", "--epochs", "1", "--batch", "32", "--load", path]);
    let (before, after) = (&first["epochs"][0]["loss"], &on["epochs"][0]["loss"]);
    assert!(after.as_f64().unwrap() < 0.5 * before.as_f64().unwrap(), "{before} {after}");
}

fn losses(training: &Value) -> Vec<f64> {
    training["epochs"].as_array().unwrap().iter().map(|epoch| epoch["loss"].as_f64().unwrap()).collect()
}

#[test]
fn a_resumed_training_has_the_losses_of_one_that_never_stopped() {
    for optimizer in [&["--set", "optimizer.momentum=0.9"][..], &["--set", "optimizer.name=adam"]] {
        for engine in ["single", "dp", "ddp"] {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("w");
            let path = file.to_str().unwrap();
            let run = |engine: &str, further: &[&str]| {
                let all = ["--engine", engine, "--cards", "2", "--batch", "50"];
                let mut command =
                    program(&["train", "--json", "--data", "digits", "--set", "model.hidden=32"]);
                let output = command.args(all).args(optimizer).args(further).output().unwrap();
                assert_eq!(exit(&output), 0, "{}", stderr(&output));
                (serde_json::from_str::<Value>(&stdout(&output)).unwrap(), stderr(&output))
            };
            let whole = losses(&run(engine, &["--epochs", "4"]).0);
            run(engine, &["--epochs", "2", "--save", path]);
            let (rest, told) = run(engine, &["--epochs", "2", "--load", path, "--save", path]);
            assert!(told.contains("resuming after epoch 2"), "{told}");
            assert_eq!((&rest["resumed_after"], &rest["epochs"][0]["epoch"]), (&2.into(), &3.into()));
            assert_eq!(losses(&rest), whole[2..], "{engine}: to the last bit");
            assert_eq!(entries(folder.path()), ["w", "w.resume"]);
            // Another engine goes on as well, within rounding; and from where the second part ended.
            let other = if engine == "single" { "ddp" } else { "single" };
            let on = run(other, &["--epochs", "1", "--load", path]).0;
            let five = losses(&run(engine, &["--epochs", "5"]).0)[4];
            assert!((losses(&on)[0] - five).abs() < 1e-4 * five, "{engine} then {other}");
        }
    }
}

#[test]
fn a_killed_training_goes_on_from_its_last_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("w");
    let path = file.to_str().unwrap();
    let digits = ["--data", "digits", "--set", "model.hidden=32", "--engine", "ddp", "--cards", "2"];
    let mut command = program(&["train", "--epochs", "1000", "--save", path]);
    command.args(digits);
    let mut background = Background::start(command);
    wait_for("two checkpoints", std::time::Duration::from_secs(60), || {
        let modified = std::fs::metadata(&file).ok()?.modified().ok()?;
        wait_for("another one", std::time::Duration::from_secs(60), || {
            (std::fs::metadata(&file).ok()?.modified().ok()? != modified).then_some(())
        });
        Some(())
    });
    background.child.kill().unwrap();
    background.child.wait().unwrap();
    let output =
        program(&["train", "--json", "--epochs", "1", "--load", path]).args(digits).output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let training: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert!(training["resumed_after"].as_u64().unwrap() >= 2, "{training}");
}

#[test]
fn a_checkpoint_of_other_samples_or_other_weights_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("w");
    let path = file.to_str().unwrap();
    train(&["--engine", "single", "--epochs", "1", "--batch", "32", "--save", path]);
    let refused = |args: &[&str], words: &str| {
        let mut command = program(&["train", "--engine", "single", "--epochs", "1", "--load", path]);
        let output =
            command.args(["--data", "digits", "--set", "model.hidden=64"]).args(args).output().unwrap();
        let text = stderr(&output);
        assert_eq!(exit(&output), 2, "{text}");
        assert!(text.contains(words) && text.contains("hint: "), "{text}");
    };
    refused(&["--batch", "32", "--seed", "1"], "other samples");
    refused(&["--batch", "64"], "other samples");
    std::fs::write(folder.path().join("w.resume"), "junk").unwrap();
    refused(&["--batch", "32"], "w.resume");
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("bad"), "no weights").unwrap();
    let digits = ["--data", "digits", "--set", "model.hidden=16"];
    for (args, words) in [
        (vec!["--engine", "single,dp", "--epochs", "1"], "--engine"),
        (vec!["--engine", "warp", "--epochs", "1"], "warp"),
        (vec!["--engine", "dp", "--epochs", "0"], "--epochs"),
        (vec!["--engine", "dp"], "--epochs"),
        (vec!["--engine", "dp", "--epochs", "1", "--load", "/no/such"], "--load"),
        (vec!["--engine", "dp", "--epochs", "1", "--load", &path("bad")], "bad"),
        (vec!["--engine", "dp", "--epochs", "1", "--save", "/no/such/file"], "--save"),
        (vec!["--engine", "dp", "--epochs", "1", "--save", &path("")], "--save"),
        (vec!["--engine", "single", "--epochs", "1", "--set", "optimizer.lr=1000000"], "optimizer.lr"),
    ] {
        let output = program(&["train"]).args(digits).args(&args).output().unwrap();
        let text = stderr(&output);
        assert_eq!(exit(&output), 2, "{args:?}: {text}");
        assert!(text.contains(words), "{args:?}: {text}");
    }
    assert_eq!(entries(folder.path()), ["bad"]);
}
