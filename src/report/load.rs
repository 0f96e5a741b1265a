//! Reads a run folder. What is missing, cut off or from another version is refused by file and reason.

use crate::config::EngineKind;
use crate::error::Kind;
use crate::metrics::record::{Results, Round, RoundStatus, SCHEMA, SampleRow, Status, StepRow};
use crate::{Error, Result};
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::path::Path;

/// The raw records of a run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Run {
    pub(super) results: Results,
    pub(super) steps: Vec<StepRow>,
    pub(super) samples: Vec<SampleRow>,
    /// What was passed over, in plain words.
    pub(super) notes: Vec<String>,
}

/// Reads `results.json`, `steps.csv` and `samples.csv` of a run folder.
pub(super) fn load(run_dir: &Path) -> Result<Run> {
    let results = read_results(&run_dir.join("results.json"))?;
    // A run that was stopped may have been stopped in the middle of a line.
    let last_line =
        if results.status == Status::Complete { LastLine::MustBeWhole } else { LastLine::MayBeCut };
    let mut notes = Vec::new();
    let steps = read_csv(&run_dir.join("steps.csv"), last_line, &mut notes)?;
    let samples = read_csv(&run_dir.join("samples.csv"), last_line, &mut notes)?;
    consistent(&results, &steps).map_err(|what| corrupt(run_dir, &what))?;
    Ok(Run { results, steps, samples, notes })
}

/// What cannot be, in words: a report would show it as a measurement.
fn consistent(results: &Results, steps: &[StepRow]) -> Result<(), String> {
    let measured: BTreeSet<&str> = steps.iter().map(|row| row.engine.as_str()).collect();
    for (name, record) in &results.engines {
        let ok = |round: &&Round| round.status == RoundStatus::Ok;
        for (number, round) in record.rounds.iter().enumerate().filter(|(_, round)| ok(round)) {
            let place = |key: &str| format!("results.json: engines.{name}.rounds.{number}.{key}");
            if let Some(value) = round.samples_per_second.filter(|value| *value < 0.0) {
                return Err(format!("{} is {value}", place("samples_per_second")));
            }
            if let Some(spread) = &round.step_ms
                && !(0.0 <= spread.p5 && spread.p5 <= spread.median && spread.median <= spread.p95)
            {
                return Err(format!(
                    "{} has a median of {} outside its own range",
                    place("step_ms"),
                    spread.median
                ));
            }
        }
        // Names that this build does not know are only shown.
        let known = EngineKind::from_name(name).is_some() || record.tried.is_some();
        if known && record.rounds.iter().any(|round| ok(&round)) && !measured.contains(name.as_str()) {
            return Err(format!("steps.csv has no row of {name}, which results.json says was measured"));
        }
        let interval = record.summary.as_ref().and_then(|summary| summary.samples_per_second.ci95);
        if let Some([low, high]) = interval.filter(|[low, high]| low > high) {
            return Err(format!(
                "results.json: engines.{name}.summary.samples_per_second.ci95 runs from {low} to {high}"
            ));
        }
    }
    Ok(())
}

/// Reads one `results.json`.
pub(super) fn read_results(path: &Path) -> Result<Results> {
    let text = std::fs::read_to_string(path).map_err(|e| {
        let error = Error::io("cannot read", path, e);
        if path.exists() {
            error
        } else {
            error.hint("give the folder of one run, the one that holds results.json")
        }
    })?;
    let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| corrupt(path, &e))?;
    match value.get("schema").and_then(serde_json::Value::as_str) {
        Some(SCHEMA) => {}
        Some(other) => {
            return Err(Error::new(
                Kind::Corrupt,
                format!(
                    "cannot use `{}`: its schema is `{other}`, this program reads `{SCHEMA}`",
                    path.display()
                ),
            )
            .hint("use the version of dp-vs-ddp that measured the run, or measure it again"));
        }
        None => {
            return Err(Error::new(
                Kind::Corrupt,
                format!("cannot use `{}`: it has no `schema`, so it is no record of a run", path.display()),
            )
            .hint("give the folder of one run, the one that holds results.json"));
        }
    }
    serde_json::from_value(value).map_err(|e| corrupt(path, &e))
}

fn corrupt(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::new(Kind::Corrupt, format!("cannot read `{}`: {error}", path.display()))
        .hint("the file is cut off or was changed; measure the run again")
}

/// What to do with a last line that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LastLine {
    MustBeWhole,
    MayBeCut,
}

fn read_csv<T: DeserializeOwned>(
    path: &Path,
    last_line: LastLine,
    notes: &mut Vec<String>,
) -> Result<Vec<T>> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("cannot read", path, e))?;
    let mut rows = Vec::new();
    let mut bad: Option<csv::Error> = None;
    for row in csv::Reader::from_reader(text.as_bytes()).deserialize() {
        // A bad line is forgiven only as the last one, so it is judged when the next line has come.
        if let Some(error) = bad.take() {
            return Err(corrupt(path, &error));
        }
        match row {
            Ok(row) => rows.push(row),
            Err(error) => bad = Some(error),
        }
    }
    match bad {
        Some(error) if last_line == LastLine::MustBeWhole => Err(corrupt(path, &error)),
        Some(_) => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            notes.push(format!("the last line of {name} is cut off and was left out"));
            Ok(rows)
        }
        None => Ok(rows),
    }
}
