//! The same answers as PyTorch: first loss and gradients, and the losses of 20 steps.

use crate::support::*;

/// What fp32 rounding in another order of summation explains.
const ROUNDING: f64 = 1e-5;

/// One model on one to four ranks. `calm`: rounding does not grow, so 20 steps stay together on any
/// number of ranks; under BatchNorm and attention that holds for up to two.
fn same_answers(model: &[&str], calm: bool) {
    if python().is_none() {
        return;
    }
    for cards in ["1", "2", "4"] {
        let run = Run::compare(
            &[
                model,
                &["--cards", cards, "--batch-per-card", "8", "--steps", "20", "--peers", "torch"],
                &["--engines", "single,dp,ddp"],
            ]
            .concat(),
        );
        for (ours, theirs) in [("single", "torch_single"), ("ddp", "torch_ddp"), ("dp", "torch_ddp")] {
            let what = format!("{model:?}, {cards} cards, {ours} against {theirs}");
            let (a, b) = (run.losses(ours), run.losses(theirs));
            let first = apart(&a[..1], &b[..1]);
            let gradients = distance(&run.gradients(ours), &run.gradients(theirs));
            let all = apart(&a, &b);
            eprintln!("{what}: first loss {first:.1e}, gradients {gradients:.1e}, 20 losses {all:.1e}");
            assert!(first <= ROUNDING && gradients <= ROUNDING, "{what}");
            let allowed = if calm || cards != "4" || ours == "single" {
                ROUNDING
            } else {
                // Beyond that: no further than three times what two runs of PyTorch itself are apart.
                ROUNDING.max(3.0 * between_two_of_pytorch(&run))
            };
            assert!(all <= allowed, "{what}: losses {all:.1e} apart, {allowed:.1e} allowed");
        }
        // Under SGD the weights follow.
        let weights = distance(&run.weights("ddp"), &run.weights("torch_ddp"));
        assert!(!calm || weights <= 10.0 * ROUNDING, "{model:?}, {cards} cards: weights {weights:.1e}");
    }
}

/// How far two runs of PyTorch are apart that differ only in the order in which they sum.
fn between_two_of_pytorch(run: &Run) -> f64 {
    let losses = |further: &[&str]| {
        let out = tempfile::tempdir().unwrap();
        let mut python = python().unwrap();
        python.arg("peers/reference.py").arg(run.path("plan.json")).args(["--engine", "torch_ddp", "--init"]);
        python.arg(run.path("weights/init.safetensors")).arg("--out").arg(out.path()).args(further);
        printed(&python.output().unwrap());
        let text = std::fs::read_to_string(out.path().join("torch_ddp.json")).unwrap();
        floats(&serde_json::from_str::<serde_json::Value>(&text).unwrap()["losses"])
    };
    apart(&losses(&[]), &losses(&["--permute-rows"]))
}

#[test]
fn mlp() {
    same_answers(&["--model", "mlp", "--data", "digits", "--set", "model.hidden=256"], true);
}

#[test]
fn convnet() {
    same_answers(&["--model", "convnet", "--data", "digits"], true);
}

#[test]
fn convnet_with_batch_norm() {
    same_answers(&["--model", "convnet", "--data", "digits", "--set", "model.batch_norm=true"], false);
}

#[test]
fn resnet18() {
    let small = ["--set", "data.shape=3,16,16", "--set", "data.samples=640"];
    same_answers(&[&["--model", "resnet18", "--data", "synthetic"][..], &small].concat(), false);
}

#[test]
fn gpt() {
    let small = ["--set", "model.layers=2", "--set", "model.context=32", "--set", "data.samples=640"];
    same_answers(&[&["--model", "gpt"][..], &small].concat(), false);
}
