//! Rows that try options, and PyTorch's engines beside ours.

use crate::support::*;
use serde_json::Value;

#[test]
fn an_option_that_is_tried_is_a_row_beside_its_engine() {
    let runs = Runs::new();
    let tried =
        ["--engines", "dp,ddp", "--ab", "ddp.overlap=false", "--ab", "data.workers=1", "--save-weights"];
    let output = runs.compare("ab", &SHORT).args(tried).output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let results = runs.results("ab");
    let names: Vec<_> = results["engines"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(names, ["ddp", "ddp[data.workers=1]", "ddp[overlap=false]", "dp", "dp[data.workers=1]"]);
    let row = &results["engines"]["ddp[overlap=false]"];
    assert_eq!(row["tried"]["base"], "ddp");
    assert_eq!(row["tried"]["options"], serde_json::json!(["ddp.overlap=false"]));
    assert_eq!(row["rounds"].as_array().unwrap().len(), 2);
    // Without overlap nothing is hidden but what slips in between two clock reads, of which a busy machine can
    // make one long.
    let hidden = row["rounds"].as_array().unwrap().iter().map(|round| round["overlap"].as_f64().unwrap());
    assert!(hidden.reduce(f64::min).unwrap() < 0.5, "{row}");
    let result = &results["comparison"]["ab"]["ddp[overlap=false]"];
    assert!(result["throughput"]["ratio"].as_f64().unwrap() > 0.0);
    assert_eq!((&result["loss_difference"], &result["tolerance"]), (&Value::from(0.0), &Value::from(1e-4)));
    let text = stdout(&output);
    assert!(text.contains("overlap=false") && text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let page = std::fs::read_to_string(runs.path("ab").join("report.html")).unwrap();
    assert!(page.contains("What options cost") && page.contains("DDP [overlap=false]"));
    assert!(runs.path("ab").join("weights/ddp+overlap=false.gradients.safetensors").is_file());
    let steps = std::fs::read_to_string(runs.path("ab").join("steps.csv")).unwrap();
    assert!(steps.contains("\nddp[overlap=false],"));
}

#[test]
fn dp_s_own_options_move_the_work_and_not_the_answer() {
    let runs = Runs::new();
    let tried = ["--engines", "dp,ddp", "--ab", "dp.output_card=1", "--ab", "dp.chunk_weights=1,3"];
    let output = runs.compare("dp", &SHORT).args(tried).output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let results = runs.results("dp");
    let options = results["comparison"]["ab"].as_object().unwrap();
    assert_eq!(options["dp[output_card=1]"]["loss_difference"], Value::from(0.0));
    assert!(options["dp[chunk_weights=1,3]"]["loss_difference"].as_f64().unwrap() < 1e-4);
    let steps = std::fs::read_to_string(runs.path("dp").join("steps.csv")).unwrap();
    // By row: the cards that gathered, and what each card got of a batch.
    let rows = |row: &str, phase: &str| {
        let mut lines = csv::Reader::from_reader(steps.as_bytes());
        let found = lines.records().map(Result::unwrap).filter(|line| &line[0] == row && &line[5] == phase);
        found.map(|line| (line[3].to_owned(), line[8].to_owned())).collect::<std::collections::BTreeSet<_>>()
    };
    let cards = |row: &str| rows(row, "gather").into_iter().map(|(card, _)| card).collect::<Vec<_>>();
    assert_eq!((cards("dp"), cards("dp[output_card=1]")), (vec!["0".to_owned()], vec!["1".to_owned()]));
    let batch = results["plan"]["batch"]["global"].as_u64().unwrap();
    let shares =
        |zero: u64| [("0".to_owned(), zero.to_string()), ("1".to_owned(), (batch - zero).to_string())];
    assert_eq!(rows("dp[output_card=1]", "step"), shares(batch / 2).into());
    assert_eq!(rows("dp[chunk_weights=1,3]", "step"), shares(batch / 4).into());
    // The heavier card is the one that keeps the weights, the sum and the outputs.
    let memory = |row: &str, card: usize| {
        results["engines"][row]["rounds"][0]["cards"][card]["memory_peak_bytes"].as_u64().unwrap()
    };
    assert!(memory("dp", 0) > memory("dp", 1));
    assert!(memory("dp[output_card=1]", 1) > memory("dp[output_card=1]", 0));
}

#[test]
fn an_option_that_cannot_be_tried_is_refused_before_anything_is_written() {
    let runs = Runs::new();
    for (option, expected) in [
        ("run.seed=3", "`run.seed` cannot be tried"),
        ("ddp.bucket_cap_mb=-1", "`ddp.bucket_cap_mb` is -1"),
        ("ddp.bucket_cap=1", "unknown key `ddp.bucket_cap`"),
        ("dp.output_card=1", "means nothing to any engine"),
        ("overlap", "`run.ab` is"),
    ] {
        let output = runs.compare("bad", &SHORT).args(["--engines", "ddp", "--ab", option]).output().unwrap();
        assert_eq!(exit(&output), 2, "{option}");
        assert!(
            stderr(&output).contains(expected) && stderr(&output).contains("hint: "),
            "{}",
            stderr(&output)
        );
        assert!(runs.entries().is_empty());
    }
}

#[test]
fn pytorch_s_data_parallel_is_refused_where_there_is_no_cuda_card() {
    let runs = Runs::new();
    let output =
        runs.compare("t", &SHORT).args(["--device", "cpu", "--engines", "torch_dp"]).output().unwrap();
    assert_eq!(exit(&output), 2);
    assert!(stderr(&output).contains("needs CUDA cards"), "{}", stderr(&output));
    let output = runs.compare("t", &SHORT).args(["--peers", "tensorflow"]).output().unwrap();
    assert_eq!(exit(&output), 2);
    assert!(stderr(&output).contains("one of none, torch"), "{}", stderr(&output));
}
