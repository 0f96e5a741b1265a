//! The same answers as PyTorch: first loss and gradients, and the losses of 20 steps.

use crate::support::*;

/// What fp32 rounding in another order of summation explains.
pub(crate) const ROUNDING: f64 = 1e-5;

/// One model on one, two and four ranks. `calm`: rounding does not grow, so 20 steps stay together on any
/// number of ranks; under BatchNorm and attention that holds for up to two, which sum in one order only.
fn same_answers(model: &[&str], calm: bool) {
    if python().is_none() {
        return;
    }
    for cards in [1, 2, 4] {
        // PyTorch takes seconds to start, and one card is one card however many there are.
        let engines = if cards == 1 { "single,dp,ddp" } else { "dp,ddp" };
        let number = cards.to_string();
        let how = ["--cards", &number, "--batch-per-card", "8", "--steps", "20", "--peers", "torch"];
        let run = Run::compare(&[model, &how, &["--engines", engines]].concat());
        let allowed = if calm || cards < 4 {
            ROUNDING
        } else {
            // Beyond that: no further than three times what two runs of PyTorch itself are apart.
            ROUNDING.max(3.0 * between_two_of_pytorch(&run))
        };
        for (ours, theirs) in [("single", "torch_single"), ("ddp", "torch_ddp"), ("dp", "torch_ddp")] {
            if ours == "single" && cards > 1 {
                continue;
            }
            let what = format!("{model:?}, {cards} cards, {ours} against {theirs}");
            let (a, b) = (run.losses(ours), run.losses(theirs));
            assert_eq!(a.len(), 20);
            let (first, all) = (apart(&a[..1], &b[..1]), apart(&a, &b));
            let (ours, theirs) = (run.gradients(ours), run.gradients(theirs));
            let gradients = distance(&ours, &theirs);
            eprintln!("{what}: first loss {first:.1e}, gradients {gradients:.1e}, 20 losses {all:.1e}");
            assert!(first <= ROUNDING, "{what}: first loss {first:.1e} apart");
            assert!(
                gradients <= ROUNDING,
                "{what}: gradients {gradients:.1e} apart, most in {}",
                worst(&ours, &theirs)
            );
            assert!(all <= allowed, "{what}: losses {all:.1e} apart, {allowed:.1e} allowed");
        }
        // Under SGD the weights follow.
        let weights = distance(&run.weights("ddp"), &run.weights("torch_ddp"));
        assert!(!calm || weights <= 10.0 * ROUNDING, "{model:?}, {cards} cards: weights {weights:.1e}");
    }
}

/// How far two runs of PyTorch's DDP are apart that differ only in the order in which they sum.
fn between_two_of_pytorch(run: &Run) -> f64 {
    let out = tempfile::tempdir().unwrap();
    let losses = reference(run, out.path(), &["--permute-rows"]);
    let apart = apart(&losses, &run.losses("torch_ddp"));
    assert!(apart > 0.0, "the order of summation was the same");
    eprintln!("two runs of PyTorch: {apart:.1e} apart");
    apart
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
    let small = ["--set", "data.shape=3,8,8", "--set", "data.samples=640"];
    same_answers(&[&["--model", "resnet18", "--data", "synthetic"][..], &small].concat(), false);
}

#[test]
fn gpt() {
    let small = ["--set", "model.layers=2", "--set", "model.context=32", "--set", "data.samples=640"];
    same_answers(&[&["--model", "gpt"][..], &small].concat(), false);
}
