//! `worker` as torchrun or a person starts it.

use crate::support::*;
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

const TINY: [&str; 6] = ["--data", "digits", "--set", "model.hidden=16", "--batch-per-card", "8"];

fn worker(rank: usize, world_size: usize, store: &str) -> Command {
    let mut command = program(&["worker"]);
    command.args(TINY).args(["--set", "run.steps=3", "--set", "run.warmup=1"]);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
    command.env("DPVSDDP_STORE", format!("file:{store}"));
    command
}

fn messages(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn ranks_started_by_hand_meet_and_hold_the_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let ranks = [0, 1].map(|rank| Background::start(worker(rank, 2, store.to_str().unwrap())));
    let digests = ranks.map(|rank| {
        let output = rank.finish(Duration::from_secs(60));
        assert_eq!(exit(&output), 0, "{}", stderr(&output));
        let messages = messages(&stdout(&output));
        let named = |name: &str| messages.iter().filter(|message| message["message"] == name).count();
        assert_eq!((named("ready"), named("step"), named("done")), (1, 4, 1));
        messages.iter().find(|message| message["message"] == "weights").unwrap()["digest"].clone()
    });
    assert_eq!(digests[0], digests[1]);
}

// Field case 053: with seeds of their own ranks would see overlapping shards, and nothing would tell.
#[test]
fn ranks_started_with_different_seeds_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let ranks = [0, 1].map(|rank| {
        let mut command = worker(rank, 2, store.to_str().unwrap());
        command.args(["--seed", &(7 + rank).to_string()]);
        Background::start(command)
    });
    for (rank, started) in ranks.into_iter().enumerate() {
        let output = started.finish(Duration::from_secs(60));
        assert_eq!(exit(&output), 2, "{}", stderr(&output));
        let last = messages(&stdout(&output)).pop().unwrap();
        let error = last["error"].as_str().unwrap();
        assert!(error.starts_with(&format!("rank {rank}: ")), "{error}");
        assert!(error.contains("seed = 7 on rank 0, seed = 8 on rank 1"), "{error}");
    }
}

// Field case 037: one that is alone says where it looked.
#[test]
fn a_rank_that_stays_alone_gives_up_and_says_where_it_waited() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let start = Instant::now();
    let output = worker(1, 2, store.to_str().unwrap()).args(["--set", "run.deadline_s=1"]).output().unwrap();
    assert_eq!(exit(&output), 2, "{}", stderr(&output));
    assert!(start.elapsed() < Duration::from_secs(20));
    let last = messages(&stdout(&output)).pop().unwrap();
    assert_eq!(last["message"], "failed", "{last}");
    assert!(last["error"].as_str().unwrap().contains(store.to_str().unwrap()), "{last}");
}

#[test]
fn a_worker_that_does_not_know_its_place_says_what_is_missing() {
    let bare = || {
        let mut command = program(&["worker"]);
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DPVSDDP_STORE"] {
            command.env_remove(name);
        }
        command
    };
    let output = bare().output().unwrap();
    assert_eq!(exit(&output), 2);
    assert!(stderr(&output).contains("`RANK` is not set"), "{}", stderr(&output));
    let output = bare().env("RANK", "0").env("WORLD_SIZE", "2").args(["--local_rank=0"]).output().unwrap();
    assert!(stderr(&output).contains("`MASTER_PORT` is not set"), "{}", stderr(&output));
    // Field case 181: both spellings are known, others are not.
    let output = bare().arg("--local-rnk=0").output().unwrap();
    assert!(stderr(&output).contains("--local-rnk"), "{}", stderr(&output));
}

#[test]
fn a_job_that_is_none_is_refused() {
    let output = run(&["worker", "--job"]);
    assert_eq!(exit(&output), 2);
    assert!(stderr(&output).contains("standard input holds no job"), "{}", stderr(&output));
}
