//! `pitfalls`: runs, explains itself on a terminal, and what its rows claim is so.

#![cfg(feature = "engines")]
#![allow(clippy::unwrap_used, reason = "a test may panic, in its helpers too")]

use serde_json::Value;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

fn pitfalls(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dp-vs-ddp")).arg("pitfalls").args(args).output().unwrap()
}

fn rows() -> Vec<Value> {
    let output = pitfalls(&["--json"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&text).unwrap()
}

/// The numbers in a cell, in order.
fn numbers(row: &Value, cell: &str) -> Vec<f64> {
    let text = row[cell].as_str().unwrap();
    text.split(|c: char| !c.is_ascii_digit() && c != '.')
        .map(|word| word.trim_matches('.'))
        .filter_map(|word| word.parse().ok())
        .collect()
}

const NAMES: [&str; 10] = [
    "no_set_epoch",
    "no_distributed_sampler",
    "batch_and_learning_rate",
    "blind_module_stripping",
    "unused_parameters",
    "two_ranks_on_one_card",
    "saving_from_every_rank",
    "no_weight_broadcast",
    "loss_times_world_size",
    "padding_in_evaluation",
];

/// Training images, testing images.
const DIGITS: (f64, f64) = (1618.0, 179.0);

#[test]
fn every_row_says_what_it_measured_and_that_is_so() {
    let rows = rows();
    assert_eq!(rows.iter().map(|row| row["name"].as_str().unwrap()).collect::<Vec<_>>(), NAMES);
    for row in &rows {
        assert_eq!(row["shown"], true, "{row}");
        assert_ne!(row["expected"], row["seen"]);
    }
    let row = |name: &str| &rows[NAMES.iter().position(|known| *known == name).unwrap()];
    let both = |name| (numbers(row(name), "expected"), numbers(row(name), "seen"));

    // 809 images a rank are 26 batches of 32, the last of them short; all 1618 are 51.
    assert_eq!(both("no_set_epoch"), (vec![0.0, 26.0, 2.0, 1.0], vec![26.0, 26.0, 2.0, 1.0]));
    assert_eq!(
        both("no_distributed_sampler"),
        (vec![DIGITS.0, 26.0, 0.0], vec![2.0 * DIGITS.0, 51.0, DIGITS.0, 1.0])
    );

    let (expected, seen) = both("batch_and_learning_rate");
    let (alone, fixed) = (expected[2], expected[5]);
    let (grown, scaled) = (seen[2], seen[3]);
    assert!((alone - fixed).abs() <= 0.002, "the same global batch trains the same: {expected:?}");
    assert!(grown > 1.25 * alone && scaled < grown, "{seen:?} against {alone}");

    let blind = row("blind_module_stripping");
    // What Python's str.replace makes of them.
    for key in ["module.encoder.module.weight", "module.submodule.bias"] {
        assert!(blind["seen"].as_str().unwrap().contains(&format!("`{}`", key.replace("module.", ""))));
        assert!(blind["expected"].as_str().unwrap().contains(&format!("`{}`", &key["module.".len()..])));
    }

    let unused = row("unused_parameters")["seen"].as_str().unwrap();
    assert!(unused.contains("`side.weight`, `side.bias`") && !unused.contains("`trunk`"), "{unused}");
    assert_eq!(numbers(row("unused_parameters"), "seen")[..2], [2.0, 2.0]);

    let (expected, seen) = both("two_ranks_on_one_card");
    assert!((seen[0] / expected[2] - seen[3]).abs() < 0.01, "{expected:?} {seen:?}");

    assert_eq!(numbers(row("saving_from_every_rank"), "seen")[..2], [4.0, 4.0]);
    assert_eq!(numbers(row("saving_from_every_rank"), "expected")[1], 0.0);
    assert_eq!(both("no_weight_broadcast"), (vec![1.0, 4.0, 5.0], vec![4.0, 4.0, 5.0]));
    assert_eq!(both("loss_times_world_size"), (vec![4.0, 1.0, 1.0], vec![4.0, 4.0]));

    // 179 images on 8 ranks are padded to 184.
    let (expected, seen) = both("padding_in_evaluation");
    assert_eq!((expected[1], seen[1], seen[3]), (DIGITS.1, 184.0, 5.0));
    for cell in [&expected, &seen] {
        assert!((100.0 * cell[0] / cell[1] - cell[2]).abs() < 0.005, "{cell:?}");
    }
}

#[test]
fn the_page_fits_a_terminal_and_takes_well_under_a_minute() {
    let start = Instant::now();
    let output = pitfalls(&[]);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    for (number, name) in NAMES.iter().enumerate() {
        assert!(text.contains(&format!("{}. {}\n", number + 1, name.replace('_', " "))), "{text}");
    }
    assert!(text.trim_end().ends_with("10 of 10 shown as described"), "{text}");
}

#[test]
fn what_cannot_run_says_so_and_exits_with_2() {
    let output = Command::new(env!("CARGO_BIN_EXE_dp-vs-ddp"))
        .arg("pitfalls")
        .env("TMPDIR", "/no/such/folder")
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("temporary folder") && error.contains("TMPDIR"), "{error}");
}
