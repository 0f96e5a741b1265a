//! PyTorch's engines as rows of a comparison.

use crate::support::*;

#[test]
fn one_report_shows_our_engines_and_pytorch_s() {
    if python().is_none() {
        return;
    }
    let run = Run::compare(&[
        "digits",
        "--cards",
        "2",
        "--steps",
        "10",
        "--peers",
        "torch",
        "--engines",
        "single,ddp",
    ]);
    let engines: Vec<_> = run.results["engines"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(engines, ["ddp", "single", "single_per_card", "torch_ddp", "torch_single"]);
    let comparison = &run.results["comparison"];
    assert_eq!(comparison["losses"]["agree"], true, "{comparison}");
    assert!(comparison["losses"]["checked"].as_str().unwrap().contains("torch_ddp"));
    for ours in ["single", "ddp"] {
        assert!(comparison["over_torch"][ours]["ratio"].as_f64().unwrap() > 0.0, "{comparison}");
    }
    let peer = &run.results["engines"]["torch_ddp"]["rounds"][0];
    assert!(peer["communication_ms"].is_null(), "nobody timed it");
    assert!(peer["cards"][0]["memory_peak_bytes"].is_null(), "nobody counted it");
    assert!(peer["cards"][1]["utilisation_percent_mean"].as_f64().unwrap() > 0.0);
    let digests = peer["weights_digests"].as_array().unwrap();
    assert!(digests.len() == 2 && digests[0] == digests[1]);
    // The runner that needs no Rust does the very same.
    let out = tempfile::tempdir().unwrap();
    assert_eq!(reference(&run, out.path(), &[]), run.losses("torch_ddp"));
    let gradients = tensors(&out.path().join("torch_ddp.gradients.safetensors"));
    assert_eq!(gradients, run.gradients("torch_ddp"));
    assert_eq!(tensors(&out.path().join("torch_ddp.safetensors")), run.weights("torch_ddp"));
    let page = std::fs::read_to_string(run.path("report.html")).unwrap();
    assert!(page.contains("PyTorch DDP") && page.contains("PyTorch Single"));
    let samples = std::fs::read_to_string(run.path("samples.csv")).unwrap();
    assert!(samples.contains("\ntorch_ddp,"));
}

#[test]
fn a_peer_that_fails_is_named_and_the_run_says_why() {
    if python().is_none() {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_dp-vs-ddp"))
        .args(["compare", "digits", "--cards", "2", "--rounds", "1", "--engines", "torch_ddp", "--out"])
        .arg(out.path())
        .args(["--set", "ddp.sync_batch_norm=true"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("torch_ddp") && text.contains("ddp.sync_batch_norm"), "{text}");
}
