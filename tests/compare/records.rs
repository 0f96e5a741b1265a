//! What a run leaves behind.

use crate::support::*;
use serde_json::Value;

/// Every key path of `results.json` that readers were promised, with `*` for any engine.
const PROMISED: &[&str] = &[
    "schema argv started_at finished_at status environment plan engines comparison warnings",
    "environment: fingerprint cards software cpu cores os visible_devices",
    "environment/software: version libtorch nccl driver cuda",
    "plan: run model data batch optimizer dp ddp sample inject",
    "comparison: ddp_over_dp dp_over_single ddp_over_single losses",
    "comparison/losses: agree checked max_difference tolerance reason",
    "engines/*: cards global_batch batch_per_card rounds summary",
    "engines/*/rounds/0: status error samples_per_second step_ms phases_ms losses communication_ms",
    "engines/*/rounds/0: exposed_communication_ms overlap cards",
    "engines/*/rounds/0/step_ms: median p5 p95 mean",
    "engines/*/rounds/0/cards/0: index utilisation_percent_mean compute_ms communication_ms wait_ms",
    "engines/*/rounds/0/cards/0: memory_peak_bytes energy_joules",
    "engines/*/summary: samples_per_second step_ms scaling_efficiency imbalance cards",
    "engines/*/summary/samples_per_second: median ci95",
    "engines/*/summary/scaling_efficiency: weak strong",
    "engines/*/summary/imbalance: utilisation memory",
];

fn at<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split('/').filter(|key| !key.is_empty()).fold(value, |value, key| match key.parse::<usize>() {
        Ok(index) => &value[index],
        Err(_) => &value[key],
    })
}

fn assert_promised(results: &Value) {
    for line in PROMISED {
        let (path, keys) = line.split_once(": ").unwrap_or(("", line));
        for engine in results["engines"].as_object().unwrap().keys() {
            let path = path.replace('*', engine);
            let object = at(results, &path).as_object().unwrap_or_else(|| panic!("{path} is no object"));
            for key in keys.split(' ') {
                assert!(object.contains_key(key), "{path}/{key} is missing");
            }
        }
    }
}

#[test]
fn a_whole_comparison_leaves_every_promised_file_and_key() {
    let runs = Runs::new();
    // Long enough to measure utilisation, which a window of a few milliseconds is not.
    let long = ["--cards", "2", "--batch-per-card", "8", "--rounds", "2", "--warmup", "1", "--steps", "100"];
    let output = runs.compare("whole", &long).args(["--save-weights"]).output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let results = runs.results("whole");
    assert_promised(&results);
    assert_eq!(results["status"], "complete");
    assert_eq!(results["schema"], "dp-vs-ddp/results/1");
    assert_eq!(results["comparison"]["losses"]["agree"], true, "{}", results["comparison"]);
    let engines: Vec<_> = results["engines"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(engines, ["ddp", "dp", "single", "single_per_card"]);
    for (name, engine) in results["engines"].as_object().unwrap() {
        let cards = if name.starts_with("single") { 1 } else { 2 };
        assert_eq!(engine["cards"], cards);
        assert_eq!(engine["global_batch"], if name == "single_per_card" { 8 } else { 16 });
        for round in engine["rounds"].as_array().unwrap() {
            assert_eq!(round["losses"].as_array().unwrap().len(), 101);
            assert_eq!(round["cards"].as_array().unwrap().len(), cards);
            let digests = round["weights_digests"].as_array().unwrap();
            assert_eq!(digests.len(), if name == "ddp" { 2 } else { 1 });
            assert!(digests.iter().all(|digest| *digest == digests[0]), "ranks hold different weights");
            for card in round["cards"].as_array().unwrap() {
                assert!(card["memory_peak_bytes"].as_u64().unwrap() > 0);
                let busy = card["utilisation_percent_mean"].as_f64().unwrap();
                assert!(busy > 0.0 && busy <= 105.0, "{busy}");
            }
        }
    }
    let folder = runs.path("whole");
    let plan: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("plan.json")).unwrap()).unwrap();
    assert_eq!(plan, results["plan"]);
    assert!(folder.join("report.html").is_file());
    for name in ["init", "single", "dp", "ddp"] {
        assert!(folder.join(format!("weights/{name}.safetensors")).is_file(), "{name}");
    }
    assert_eq!(std::fs::read_link(runs.path("latest")).unwrap().to_str(), Some("whole"));
    // Nothing temporary stays.
    assert!(entries(&folder).iter().all(|name| !name.starts_with('.')), "{:?}", entries(&folder));
}

#[test]
fn raw_rows_parse_and_every_step_of_every_card_is_there() {
    let runs = Runs::new();
    let output = runs.compare("rows", &SHORT).args(["--set", "sample.period_ms=20"]).output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let mut steps = csv::Reader::from_path(runs.path("rows").join("steps.csv")).unwrap();
    let header: Vec<_> = steps.headers().unwrap().iter().map(str::to_owned).collect();
    assert_eq!(header.join(","), "engine,round,rank,card,step,phase,start_ns,duration_ns,samples,issue_ns");
    let rows: Vec<csv::StringRecord> = steps.records().collect::<Result<_, _>>().unwrap();
    let whole = |engine: &str| -> Vec<u64> {
        let steps = rows.iter().filter(|row| &row[0] == engine && &row[5] == "step");
        steps.map(|row| row[8].parse().unwrap()).collect()
    };
    // 2 rounds of 6 steps on each card.
    assert_eq!(whole("single"), [16; 12]);
    assert_eq!(whole("dp"), [8; 24]);
    assert_eq!(whole("ddp"), [8; 24]);
    for (engine, phase) in
        [("dp", "scatter"), ("dp", "reduce"), ("ddp", "all_reduce"), ("single", "backward")]
    {
        assert!(rows.iter().any(|row| &row[0] == engine && &row[5] == phase), "{engine} has no {phase}");
    }
    let mut samples = csv::Reader::from_path(runs.path("rows").join("samples.csv")).unwrap();
    assert_eq!(&samples.headers().unwrap()[5], "utilisation_percent");
    let mut utilised = 0;
    for row in samples.records() {
        let row = row.unwrap();
        row[2].parse::<u64>().unwrap();
        if !row[5].is_empty() {
            let percent: f64 = row[5].parse().unwrap();
            assert!((0.0..=105.0).contains(&percent), "{percent}");
            utilised += 1;
        }
    }
    assert!(utilised > 0, "no utilisation was sampled");
}

#[test]
fn json_on_standard_output_is_the_file() {
    let runs = Runs::new();
    let output = runs.compare("json", &SHORT).args(["--json", "--engines", "single,dp"]).output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let printed: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(printed, runs.results("json"));
}

#[test]
fn weights_to_start_from_give_the_run_they_came_from() {
    let runs = Runs::new();
    let first = runs.compare("first", &SHORT).args(["--engines", "ddp", "--save-weights"]).output().unwrap();
    assert_eq!(exit(&first), 0, "{}", stderr(&first));
    let init = runs.path("first/weights/init.safetensors");
    let again = runs
        .compare("again", &SHORT)
        .args(["--engines", "dp,ddp", "--init", init.to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(exit(&again), 0, "{}", stderr(&again));
    let losses = |name: &str| runs.results(name)["engines"]["ddp"]["rounds"][0]["losses"].clone();
    assert_eq!(losses("first"), losses("again"));
    // Other weights, other losses: the file is not ignored.
    let end = runs.path("first/weights/ddp.safetensors");
    let later =
        runs.compare("later", &SHORT).args(["--engines", "dp", "--init", end.to_str().unwrap()]).output();
    assert_eq!(exit(&later.unwrap()), 0);
    assert_ne!(runs.results("later")["engines"]["dp"]["rounds"][0]["losses"], losses("first"));
}

#[test]
fn more_cards_than_cores_run_and_the_warning_is_everywhere() {
    let runs = Runs::new();
    let cores = std::thread::available_parallelism().unwrap().get();
    let cards = (4 * cores).to_string();
    let output = runs
        .compare("crowd", &["--cards", &cards, "--batch-per-card", "4"])
        .args(["--rounds", "1", "--warmup", "1", "--steps", "3"])
        .output()
        .unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    assert!(stderr(&output).contains("warning: "), "{}", stderr(&output));
    assert!(stderr(&output).contains(&format!("{cards} virtual cards")), "{}", stderr(&output));
    let results = runs.results("crowd");
    assert_eq!(results["warnings"][0]["code"], "cards_share_cores");
    assert_eq!(results["comparison"]["losses"]["agree"], true);
    let page = std::fs::read_to_string(runs.path("crowd").join("report.html")).unwrap();
    assert!(page.contains(&format!("{cards} virtual cards")));
}

#[test]
fn one_card_takes_the_plain_path_and_is_labelled_so() {
    let runs = Runs::new();
    let output = runs
        .compare("one", &["--cards", "1", "--batch-per-card", "8"])
        .args(["--rounds", "1", "--warmup", "1", "--steps", "3"])
        .output()
        .unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let results = runs.results("one");
    // Nothing scales on one card, so weak scaling has no baseline.
    let engines: Vec<_> = results["engines"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(engines, ["ddp", "dp", "single"]);
    for engine in results["engines"].as_object().unwrap().values() {
        assert_eq!(engine["cards"], 1);
        assert_eq!(engine["rounds"][0]["communication_ms"], Value::Null);
    }
    assert_eq!(results["comparison"]["losses"]["agree"], true);
}

// Field case 133: no decimal comma, whatever the locale.
#[test]
fn a_locale_changes_no_number() {
    let runs = Runs::new();
    let output = runs
        .compare("comma", &SHORT)
        .env("LC_ALL", "de_DE.UTF-8")
        .env("LANG", "de_DE.UTF-8")
        .output()
        .unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    assert!(runs.results("comma")["engines"]["dp"]["rounds"][0]["samples_per_second"].is_f64());
    let mut samples = csv::Reader::from_path(runs.path("comma").join("samples.csv")).unwrap();
    for row in samples.records() {
        let row = row.unwrap();
        assert_eq!(row.len(), 24);
        assert!(row[5].is_empty() || row[5].parse::<f64>().is_ok(), "{row:?}");
    }
}
