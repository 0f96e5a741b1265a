//! Processes that are killed, stopped or told to end in the middle of a run.

use crate::support::*;
use std::path::Path;
use std::time::{Duration, Instant};

/// A long run of which one round at least is finished, and which is in the middle of a `ddp` cell.
fn in_the_middle(runs: &Runs, further: &[&str]) -> (Background, u32) {
    let mut command = runs.compare("long", &ENDLESS);
    command.args(["--engines", "dp,ddp"]).args(further);
    let run = Background::start(command);
    wait_for("a finished round", Duration::from_secs(120), || {
        let text = std::fs::read_to_string(runs.path("long").join("results.json")).ok()?;
        (rounds(&serde_json::from_str(&text).ok()?) >= 2).then_some(())
    });
    let rank_1 = run.worker_of_card(1);
    (run, rank_1)
}

fn assert_nothing_left(run: &Background, workers: &[u32]) {
    assert!(run.workers().is_empty());
    assert!(!workers.iter().any(|&pid| runs_now(pid)), "{workers:?}");
}

fn runs_now(pid: u32) -> bool {
    crate::support::runs(pid)
}

fn shared_memory() -> Vec<String> {
    match Path::new("/dev/shm").is_dir() {
        true => {
            entries(Path::new("/dev/shm")).into_iter().filter(|name| name.contains("dp-vs-ddp")).collect()
        }
        false => Vec::new(),
    }
}

#[test]
fn a_killed_rank_stops_the_run_within_three_seconds_and_is_named() {
    let runs = Runs::new();
    let (run, rank_1) = in_the_middle(&runs, &[]);
    let workers = run.workers();
    let killed = Instant::now();
    signal(rank_1, "KILL");
    let pid = run.pid();
    let output = run.finish(Duration::from_secs(30));
    let took = killed.elapsed();
    let text = stderr(&output);
    assert_eq!(exit(&output), 2, "{text}");
    assert!(text.contains("rank 1 was killed by signal 9 (SIGKILL)"), "{text}");
    assert!(text.contains("hint: "), "{text}");
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert!(!workers.into_iter().chain([pid]).any(runs_now));
    assert_eq!(shared_memory(), Vec::<String>::new());
    let results = runs.results("long");
    assert_eq!(results["status"], "failed");
    assert!(rounds(&results) >= 2);
    assert_eq!(results["warnings"][0]["code"], "run_failed");
    // What was measured is worth a report, and nothing half-written lies beside it.
    assert!(runs.path("long").join("report.html").is_file());
    assert!(entries(&runs.path("long")).iter().all(|name| !name.starts_with('.')));
    assert_eq!(runs.entries(), ["latest", "long"]);
}

fn assert_stops(name: &str) {
    let runs = Runs::new();
    let (run, _) = in_the_middle(&runs, &[]);
    let workers = run.workers();
    signal(run.pid(), name);
    let output = run.finish(Duration::from_secs(30));
    assert_eq!(exit(&output), 2, "{}", stderr(&output));
    assert!(stderr(&output).contains(&format!("interrupted by SIG{name}")), "{}", stderr(&output));
    assert!(!workers.into_iter().any(runs_now));
    let results = runs.results("long");
    assert_eq!(results["status"], "interrupted");
    assert!(rounds(&results) >= 2);
    assert!(results["finished_at"].is_string());
}

#[test]
fn ctrl_c_stops_all_workers_and_keeps_what_was_measured() {
    assert_stops("INT");
}

#[test]
fn a_polite_kill_does_the_same() {
    assert_stops("TERM");
}

// Field case 178: nobody passes a signal on.
#[test]
fn workers_end_when_their_parent_is_killed() {
    let runs = Runs::new();
    let (mut run, _) = in_the_middle(&runs, &[]);
    let workers = run.workers();
    run.child.kill().unwrap();
    run.child.wait().unwrap();
    wait_for("the workers to end", Duration::from_secs(3), || {
        (!workers.iter().any(|&pid| runs_now(pid))).then_some(())
    });
    assert_nothing_left(&run, &workers);
    assert_eq!(shared_memory(), Vec::<String>::new());
    // The last whole record stands.
    assert_eq!(runs.results("long")["status"], "interrupted");
}

// Field case 062: a rank that stands still is found by its peers, who say which it is.
#[test]
fn a_rank_that_stands_still_is_named_after_the_deadline() {
    let runs = Runs::new();
    let (run, rank_1) = in_the_middle(&runs, &["--set", "run.deadline_s=2"]);
    let stopped = Instant::now();
    signal(rank_1, "STOP");
    let output = run.finish(Duration::from_secs(60));
    let text = stderr(&output);
    assert_eq!(exit(&output), 2, "{text}");
    assert!(stopped.elapsed() < Duration::from_secs(20));
    assert!(text.contains("rank 1"), "{text}");
    assert!(!runs_now(rank_1));
    assert_eq!(runs.results("long")["status"], "failed");
}

#[test]
fn results_that_cannot_be_handed_over_whole_are_an_error() {
    let runs = Runs::new();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let status = |mut command: std::process::Command| {
        let output = command.stdout(full()).output().unwrap();
        (exit(&output), stderr(&output))
    };
    let (code, text) = status({
        let mut command = runs.compare("full", &SHORT);
        command.args(["--json", "--engines", "single"]);
        command
    });
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("cannot write to standard output") && text.contains("hint: "), "{text}");
    assert!(runs.path("full").join("report.html").is_file(), "the files are there all the same");
    assert_eq!(status(program(&["doctor", "--json"])).0, 2);
    assert_eq!(status(program(&["report", runs.path("full").to_str().unwrap()])).0, 2);
}

#[test]
fn a_file_named_latest_is_left_alone() {
    let runs = Runs::new();
    std::fs::write(runs.path("latest"), "mine").unwrap();
    let output = runs.compare("a", &SHORT).args(["--engines", "single"]).output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    assert_eq!(std::fs::read_to_string(runs.path("latest")).unwrap(), "mine");
    assert!(stderr(&output).contains("latest"), "{}", stderr(&output));
}
