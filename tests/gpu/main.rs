//! What only a GPU can show: our engines on real cards, real NCCL, real NVML, real event times.
//!
//! Needs one NVIDIA GPU and a libtorch with CUDA; says "skipped" and why where they are not. `scripts/gpu-check`
//! runs this program, built elsewhere, on a machine that has them: `DPVSDDP_PROGRAM` names the program under
//! test there, and `DPVSDDP_KEEP` the folder in which runs are left for docs/gpu-verification.md.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic, in its helpers too")]
#![allow(clippy::print_stdout, reason = "what was measured, and what was skipped, is for people to read")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Where runs go, and with what they are made.
struct Bench {
    program: PathBuf,
    runs: PathBuf,
    _folder: tempfile::TempDir,
    uuid: String,
}

impl Bench {
    /// `None`, said aloud, where there is no GPU to compute on.
    fn new(test: &str) -> Option<Self> {
        let program = std::env::var_os("DPVSDDP_PROGRAM")
            .map_or_else(|| env!("CARGO_BIN_EXE_dp-vs-ddp").into(), PathBuf::from);
        let skip = |why: &str| {
            println!("{test}: skipped: needs 1 GPU: {why}");
            None
        };
        let doctor = Command::new(&program).args(["doctor", "--json"]).output().expect("doctor starts");
        let json: Value = serde_json::from_slice(&doctor.stdout).expect("doctor gives JSON");
        let cuda = &json["facts"]["gpus"]["cuda"];
        if cuda["state"] != "present" || cuda["scripted"] == true {
            return skip(cuda["error"].as_str().unwrap_or("there is no CUDA driver here"));
        }
        if json["facts"]["libtorch"]["cuda"] != true {
            return skip("this libtorch is for CPUs only");
        }
        let uuid = cuda["cards"][0]["uuid"].as_str()?.to_owned();
        let folder = tempfile::tempdir().unwrap();
        let runs = std::env::var_os("DPVSDDP_KEEP").map_or_else(|| folder.path().to_owned(), PathBuf::from);
        Some(Self { program, runs, _folder: folder, uuid })
    }

    fn compare(&self, name: &str, more: &[&str]) -> Value {
        let output = self.try_compare(name, more);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{name}: {text}");
        let results = std::fs::read_to_string(self.folder(name).join("results.json")).unwrap();
        serde_json::from_str(&results).unwrap()
    }

    fn try_compare(&self, name: &str, more: &[&str]) -> Output {
        let mut command = Command::new(&self.program);
        command.args(["compare", "--device", "cuda", "--run-id", name, "--out"]).arg(&self.runs);
        command.args(more).output().expect("the program starts")
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.runs.join(name)
    }
}

fn median(results: &Value, engine: &str, figure: &str) -> f64 {
    results["engines"][engine]["summary"][figure]["median"]
        .as_f64()
        .unwrap_or_else(|| panic!("{engine}: {results}"))
}

/// Steps long enough for the card to be what limits.
const LARGE: [&str; 6] = ["--batch-per-card", "1024", "--steps", "200", "--warmup", "20"];

#[test]
fn ddp_of_one_rank_goes_over_nccl_and_dp_takes_one_card() {
    let Some(bench) = Bench::new("ddp_of_one_rank_goes_over_nccl_and_dp_takes_one_card") else { return };
    let results = bench.compare("world-1", &[&["--cards", "1"][..], &LARGE].concat());
    assert_eq!(results["comparison"]["losses"]["agree"], true, "{}", results["comparison"]);
    assert!(results["environment"]["software"]["nccl"].is_string());
    for (over, base) in [("ddp", "single"), ("dp", "single")] {
        let ratio =
            median(&results, over, "samples_per_second") / median(&results, base, "samples_per_second");
        println!("{over} over {base}, 1 card: {ratio:.3}x, of {:.3} ms", median(&results, base, "step_ms"));
    }
}

#[test]
fn dp_computes_right_on_a_card_that_is_named_twice() {
    let Some(bench) = Bench::new("dp_computes_right_on_a_card_that_is_named_twice") else { return };
    let twice = format!("{0},{0}", bench.uuid);
    let results = bench.compare("twice", &["--engines", "single,dp", "--devices", &twice, "--rounds", "2"]);
    assert_eq!(results["comparison"]["losses"]["agree"], true, "{}", results["comparison"]);
    println!(
        "dp on one card named twice: losses differ by {}",
        results["comparison"]["losses"]["max_difference"]
    );
}

#[test]
fn every_model_and_option_agrees_on_the_card() {
    let Some(bench) = Bench::new("every_model_and_option_agrees_on_the_card") else { return };
    for model in ["quick", "convnet", "resnet18", "gpt"] {
        let results = bench.compare(&format!("model-{model}"), &[model, "--cards", "1", "--rounds", "1"]);
        println!(
            "{model}: agree {}, {}",
            results["comparison"]["losses"]["agree"], results["comparison"]["losses"]["checked"]
        );
        assert_ne!(results["comparison"]["losses"]["agree"], false);
    }
    let options = [
        "ddp.comm_hook=bf16",
        "ddp.comm_hook=fp16",
        "ddp.comm_hook=powersgd",
        "ddp.gradient_as_bucket_view=true",
        "ddp.find_unused_parameters=true",
        "ddp.static_graph=true",
        "ddp.overlap=false",
        "ddp.accumulate=2",
        "run.precision=bf16",
        "run.precision=fp16",
        "run.tf32=true",
    ];
    let tried: Vec<&str> = options.iter().flat_map(|option| ["--ab", *option]).collect();
    let results = bench
        .compare("options", &[&["--cards", "1", "--engines", "ddp", "--rounds", "2"][..], &tried].concat());
    for (row, result) in results["comparison"]["ab"].as_object().unwrap() {
        println!(
            "{row}: {} of the throughput, losses differ by {}",
            result["throughput"]["ratio"], result["loss_difference"]
        );
    }
}

/// Events tell where a step goes: the phases fill it, and none is longer than it.
#[test]
fn event_times_fill_the_wall_time_of_a_step() {
    let Some(bench) = Bench::new("event_times_fill_the_wall_time_of_a_step") else { return };
    bench.compare(
        "timeline",
        &[&["--cards", "1", "--engines", "single", "--rounds", "1"][..], &LARGE].concat(),
    );
    let mut steps = csv::Reader::from_path(bench.folder("timeline").join("steps.csv")).unwrap();
    let (mut whole, mut phases) = (0.0, 0.0);
    for row in steps.records().map(Result::unwrap).filter(|row| row[4].parse::<u64>().unwrap() >= 20) {
        let duration: f64 = row[7].parse().unwrap();
        match &row[5] {
            "step" => whole += duration,
            _ => phases += duration,
        }
    }
    let share = phases / whole;
    println!("phases by events fill {:.1} % of the wall time of steps", 100.0 * share);
    assert!((0.6..=1.02).contains(&share), "{share}");
}

#[test]
fn memory_peaks_lie_below_what_nvml_sees_in_use() {
    let Some(bench) = Bench::new("memory_peaks_lie_below_what_nvml_sees_in_use") else { return };
    let results = bench
        .compare("memory", &[&["--cards", "1", "--engines", "single", "--rounds", "1"][..], &LARGE].concat());
    let card = &results["engines"]["single"]["summary"]["cards"][0];
    let (peak, used) = (card["memory_peak_bytes"].as_u64().unwrap(), card["memory_used_peak_bytes"].as_u64());
    println!("allocator peak {peak} bytes, NVML used {used:?} bytes");
    // The weights, their gradients and momentum of the mlp are 70 MB.
    assert!(peak > 70_000_000);
    assert!(used.is_none_or(|used| used > peak));
}

/// What `nvidia-smi` says of one field.
fn smi(uuid: &str, field: &str) -> Option<f64> {
    let output = Command::new("nvidia-smi")
        .args(["-i", uuid, &format!("--query-gpu={field}"), "--format=csv,noheader,nounits"])
        .output()
        .ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

#[test]
fn nvml_readings_are_those_of_nvidia_smi() {
    let Some(bench) = Bench::new("nvml_readings_are_those_of_nvidia_smi") else { return };
    if smi(&bench.uuid, "memory.total").is_none() {
        println!("nvml_readings_are_those_of_nvidia_smi: skipped: nvidia-smi is not here");
        return;
    }
    let long = [
        "--cards",
        "1",
        "--engines",
        "single",
        "--rounds",
        "1",
        "--batch-per-card",
        "4096",
        "--steps",
        "3000",
        "--warmup",
        "20",
    ];
    let mut told: Vec<(f64, f64, f64)> = Vec::new();
    let results = std::thread::scope(|scope| {
        let run = scope.spawn(|| bench.compare("nvml", &long));
        while !run.is_finished() {
            let reading =
                ["power.draw", "temperature.gpu", "memory.used"].map(|field| smi(&bench.uuid, field));
            if let [Some(power), Some(temperature), Some(memory)] = reading {
                told.push((power * 1e3, temperature, memory * f64::from(1 << 20)));
            }
        }
        run.join().unwrap()
    });
    let mut rows = csv::Reader::from_path(bench.folder("nvml").join("samples.csv")).unwrap();
    let header = rows.headers().unwrap().clone();
    let rows: Vec<csv::StringRecord> = rows.records().map(Result::unwrap).collect();
    let most = |name: &str| {
        let place = header.iter().position(|column| column == name).unwrap();
        rows.iter().filter_map(|row| row[place].parse::<f64>().ok()).reduce(f64::max)
    };
    let largest =
        |figure: fn(&(f64, f64, f64)) -> f64| told.iter().map(figure).reduce(f64::max).unwrap_or(0.0);
    for (name, ours, theirs) in [
        ("power, mW", most("power_mw"), largest(|t| t.0)),
        ("temperature, C", most("temperature_c"), largest(|t| t.1)),
        ("memory used, bytes", most("memory_used_bytes"), largest(|t| t.2)),
    ] {
        println!("largest {name}: ours {ours:?}, nvidia-smi {theirs}");
        if let Some(ours) = ours {
            assert!((ours / theirs - 1.0).abs() < 0.25, "{name}: {ours} and {theirs}");
        }
    }
    println!("energy: {} J a sample", results["engines"]["single"]["summary"]["joules_per_sample"]["median"]);
}

#[test]
fn our_ddp_is_measured_against_pytorchs_in_one_run() {
    let Some(bench) = Bench::new("our_ddp_is_measured_against_pytorchs_in_one_run") else { return };
    if !Path::new(".peers/bin/python").exists() {
        println!(
            "our_ddp_is_measured_against_pytorchs_in_one_run: skipped: `./setup --peers` was not run here"
        );
        return;
    }
    for model in ["quick", "resnet18", "gpt"] {
        let arguments = [&[model, "--cards", "1", "--peers", "torch"][..], &["--steps", "50"]].concat();
        let results = bench.compare(&format!("peers-{model}"), &arguments);
        for (engine, ratio) in results["comparison"]["over_torch"].as_object().unwrap() {
            println!("{model}: {engine} over PyTorch's: {}x {}", ratio["ratio"], ratio["ci95"]);
        }
        assert_ne!(results["comparison"]["losses"]["agree"], false, "{model}");
    }
}
