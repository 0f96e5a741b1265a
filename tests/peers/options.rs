//! PyTorch's engines as rows of a comparison, and DDP's options on both sides.

use crate::answers::ROUNDING;
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

/// DDP with each of these options against PyTorch's with the same ones, on two ranks: first loss and
/// gradients, and the losses of 20 steps. Small buckets, so that there are several.
fn options_answer_alike(model: &[&str], options: &[(&str, f64)]) -> Option<Run> {
    python()?;
    let mut arguments = vec!["--cards", "2", "--batch-per-card", "8", "--steps", "20", "--peers", "torch"];
    arguments.extend(["--engines", "ddp", "--set", "ddp.bucket_cap_mb=0.05", "--set"]);
    arguments.extend(["ddp.first_bucket_mb=0.01"].iter().chain(model));
    arguments.extend(options.iter().flat_map(|(option, _)| ["--ab", option]));
    let run = Run::compare(&arguments);
    for (option, tolerance) in options {
        let [ours, theirs] = ["ddp", "torch_ddp"].map(|engine| tried(engine, option));
        let losses = apart(&run.losses(&ours), &run.losses(&theirs));
        let gradients = distance(&run.gradients(&ours), &run.gradients(&theirs));
        eprintln!("{model:?}, {option}: gradients {gradients:.1e}, 20 losses {losses:.1e}");
        assert!(gradients <= *tolerance && losses <= *tolerance, "{option}: {gradients:.1e}, {losses:.1e}");
    }
    Some(run)
}

/// The row that tries an option.
fn tried(engine: &str, option: &str) -> String {
    format!("{engine}[{}]", option.replace("ddp.", ""))
}

#[test]
fn ddp_s_options_answer_as_pytorch_s() {
    // Both round to 16 bits before they sum, but not in the same place: float16's smallest numbers differ.
    const ROUNDED: f64 = 1e-4;
    const LOW_RANK: &str = "ddp.comm_hook=powersgd";
    let run = options_answer_alike(
        &["--model", "mlp", "--data", "digits", "--set", "model.hidden=64"],
        &[
            ("ddp.bucket_cap_mb=0.02", ROUNDING),
            ("ddp.overlap=false", ROUNDING),
            ("ddp.gradient_as_bucket_view=true", ROUNDING),
            ("ddp.find_unused_parameters=true", ROUNDING),
            ("ddp.static_graph=true", ROUNDING),
            ("ddp.init_sync=false", ROUNDING),
            ("ddp.accumulate=3", ROUNDING),
            ("optimizer.clip_norm=0.1", ROUNDING),
            ("run.precision=bf16 optimizer.clip_norm=0.1 ddp.accumulate=2", ROUNDING),
            ("run.precision=fp16", ROUNDING),
            ("ddp.comm_hook=bf16", ROUNDED),
            ("ddp.comm_hook=fp16", ROUNDED),
            (LOW_RANK, ROUNDING),
            ("ddp.comm_hook=powersgd ddp.powersgd_rank=4 ddp.powersgd_start_step=5", ROUNDING),
        ],
    );
    let Some(run) = run else { return };
    // What an option does is seen: the answers are not simply those without it.
    for option in ["ddp.comm_hook=bf16", LOW_RANK, "optimizer.clip_norm=0.1", "run.precision=fp16"] {
        assert!(apart(&run.losses("ddp"), &run.losses(&tried("ddp", option))) > ROUNDING, "{option}");
    }
}

#[test]
fn options_answer_alike_under_batch_norm() {
    options_answer_alike(
        &["--model", "convnet", "--data", "digits", "--set", "model.batch_norm=true"],
        &[("ddp.broadcast_buffers=false", ROUNDING), ("ddp.accumulate=2", ROUNDING)],
    );
}

#[test]
fn options_answer_alike_with_tied_weights() {
    let small = ["--set", "model.layers=1", "--set", "model.context=16", "--set", "data.samples=320"];
    options_answer_alike(
        &[&["--model", "gpt"][..], &small].concat(),
        &[
            ("ddp.find_unused_parameters=true", ROUNDING),
            ("ddp.static_graph=true ddp.gradient_as_bucket_view=true", ROUNDING),
            ("ddp.accumulate=2", ROUNDING),
        ],
    );
}
