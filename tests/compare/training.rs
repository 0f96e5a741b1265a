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
