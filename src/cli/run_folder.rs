//! The folder of one run: made exclusively, never overwritten, every file whole or not at all.

use crate::config::Plan;
use crate::error::{Error, Result};
use crate::metrics::record::{Results, SampleRow, StepRow};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;

/// The link that names the newest run.
const LATEST: &str = "latest";

/// Longest name of a run.
const MOST_NAME: usize = 100;

/// A run's folder.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// Makes it and writes what is known before anything is measured. What cannot be written now is
    /// found out now, and nothing is left of it.
    pub(crate) fn create(out: &Path, name: &str, plan: &Plan, results: &Results) -> Result<Self> {
        std::fs::create_dir_all(out).map_err(|source| cannot("make", out, source))?;
        let path = out.join(name);
        std::fs::create_dir(&path).map_err(|source| match source.kind() {
            ErrorKind::AlreadyExists => {
                Error::usage(format!("run folder `{}` exists already", path.display()))
                    .hint("choose another name with --run-id; runs are never overwritten")
            }
            _ => cannot("make", &path, source),
        })?;
        let folder = Self { path };
        folder.fill(plan, results).inspect_err(|_| {
            // It was ours a moment ago and holds nothing; an error here would hide the real one.
            let _ = std::fs::remove_dir_all(&folder.path);
        })?;
        Ok(folder)
    }

    fn fill(&self, plan: &Plan, results: &Results) -> Result<()> {
        self.write_json("plan.json", plan)?;
        self.write_results(results)?;
        write_header(&self.steps(), &STEP_COLUMNS)?;
        write_header(&self.samples(), &SAMPLE_COLUMNS)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn steps(&self) -> PathBuf {
        self.path.join("steps.csv")
    }

    fn samples(&self) -> PathBuf {
        self.path.join("samples.csv")
    }

    /// Where an engine's weights go.
    pub(crate) fn weights(&self, name: &str) -> PathBuf {
        // `ddp[a=1 b=2]` as a name that shells leave alone.
        let name = name.replace(['[', ' '], "+").replace(']', "");
        self.path.join("weights").join(format!("{name}.safetensors"))
    }

    pub(crate) fn make_weights_folder(&self) -> Result<()> {
        let path = self.path.join("weights");
        std::fs::create_dir(&path).map_err(|source| cannot("make", &path, source))
    }

    /// Replaces `results.json`.
    pub(crate) fn write_results(&self, results: &Results) -> Result<()> {
        self.write_json("results.json", results)
    }

    fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let path = self.path.join(name);
        let mut text =
            serde_json::to_string_pretty(value).map_err(|source| cannot("write", &path, source.into()))?;
        text.push('\n');
        // In the same folder, so that the rename cannot cross a file system.
        let write = || -> std::io::Result<()> {
            let mut file = tempfile::Builder::new().prefix(".").suffix(".tmp").tempfile_in(&self.path)?;
            file.write_all(text.as_bytes())?;
            file.as_file().set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        };
        write().map_err(|source| cannot("write", &path, source))
    }

    /// Adds rows to `steps.csv`.
    pub(crate) fn append_steps(&self, rows: &[StepRow]) -> Result<()> {
        append(&self.steps(), rows)
    }

    /// Adds rows to `samples.csv` as they arrive, until nobody sends any more.
    pub(crate) fn append_samples(&self, rows: Receiver<SampleRow>) -> Result<()> {
        append(&self.samples(), rows)
    }

    /// Lets `latest` point here.
    pub(crate) fn link_latest(&self) -> Result<()> {
        let Some((out, name)) = self.path.parent().zip(self.path.file_name()) else { return Ok(()) };
        let link = out.join(LATEST);
        let new = out.join(format!(".{LATEST}-{}", name.to_string_lossy()));
        let replace = || {
            // Only what an earlier run made: a file or folder of that name is somebody's.
            if link.symlink_metadata().is_ok_and(|found| !found.is_symlink()) {
                return Err(std::io::ErrorKind::AlreadyExists.into());
            }
            std::os::unix::fs::symlink(name, &new)?;
            std::fs::rename(&new, &link).inspect_err(|_| {
                let _ = std::fs::remove_file(&new);
            })
        };
        replace().map_err(|source| cannot("link", &link, source))
    }
}

/// A name from the user, refused where it would leave the folder of runs or hide in it.
pub(crate) fn checked_name(name: &str) -> Result<String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let fine = !name.is_empty()
        && name.len() <= MOST_NAME
        && name.chars().all(allowed)
        && !name.starts_with(['.', '-'])
        && name != LATEST;
    if fine {
        return Ok(name.to_owned());
    }
    Err(Error::usage(format!("--run-id: `{name}` cannot be the name of a run")).hint(format!(
        "use up to {MOST_NAME} letters, digits, `-`, `_` and `.`, not `{LATEST}`, beginning with a letter, digit or `_`"
    )))
}

/// The time and a random ending, so that two runs of one second do not meet.
pub(crate) fn fresh_name() -> String {
    let now = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ");
    format!("{now}-{:04x}", rand::random::<u16>())
}

const STEP_COLUMNS: [&str; 10] =
    ["engine", "round", "rank", "card", "step", "phase", "start_ns", "duration_ns", "samples", "issue_ns"];

const SAMPLE_COLUMNS: [&str; 24] = [
    "engine",
    "round",
    "t_ns",
    "card",
    "uuid",
    "utilisation_percent",
    "memory_used_bytes",
    "power_mw",
    "memory_total_bytes",
    "memory_controller_percent",
    "energy_mj",
    "temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "throttle",
    "pcie_rx_kb_s",
    "pcie_tx_kb_s",
    "nvlink_rx_kb_s",
    "nvlink_tx_kb_s",
    "sm_activity_percent",
    "sm_occupancy_percent",
    "process_memory_bytes",
    "process_utilisation_percent",
    "foreign_memory_bytes",
];

/// The header stands even where no row ever follows.
fn write_header(path: &Path, columns: &[&str]) -> Result<()> {
    std::fs::write(path, format!("{}\n", columns.join(","))).map_err(|source| cannot("write", path, source))
}

fn append<Row: Serialize>(path: &Path, rows: impl IntoIterator<Item = Row>) -> Result<()> {
    let write = || -> csv::Result<()> {
        let file: File = OpenOptions::new().append(true).open(path)?;
        let mut writer = csv::WriterBuilder::new().has_headers(false).from_writer(file);
        for row in rows {
            writer.serialize(row)?;
        }
        Ok(writer.flush()?)
    };
    write().map_err(|source| match source.into_kind() {
        csv::ErrorKind::Io(source) => cannot("write", path, source),
        other => cannot("write", path, std::io::Error::other(format!("{other:?}"))),
    })
}

fn cannot(what: &str, path: &Path, source: std::io::Error) -> Error {
    Error::io(&format!("cannot {what}"), path, source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside_the_folder_of_runs() {
        for name in ["a", "2026-12-01_x.y", "_1"] {
            assert_eq!(checked_name(name).unwrap(), name);
        }
        for name in ["", ".", "..", "a/b", "latest", "-x", ".hidden", "a b", "ä", &"x".repeat(101)] {
            assert!(checked_name(name).is_err(), "{name:?}");
        }
        assert!(checked_name(&fresh_name()).is_ok());
    }

    #[test]
    fn headers_are_the_columns_of_the_rows() {
        let header = |row: &dyn Fn(&mut csv::Writer<Vec<u8>>)| {
            let mut writer = csv::Writer::from_writer(Vec::new());
            row(&mut writer);
            let text = String::from_utf8(writer.into_inner().unwrap()).unwrap();
            text.lines().next().unwrap().to_owned()
        };
        let step = StepRow {
            engine: "dp".into(),
            round: 0,
            rank: 0,
            card: 0,
            step: 0,
            phase: "step".into(),
            start_ns: 0,
            duration_ns: 0,
            samples: None,
            issue_ns: None,
        };
        let sample = SampleRow {
            engine: "dp".into(),
            round: 0,
            t_ns: 0,
            card: 0,
            uuid: String::new(),
            ..SampleRow::default()
        };
        assert_eq!(header(&|writer| writer.serialize(&step).unwrap()), STEP_COLUMNS.join(","));
        assert_eq!(header(&|writer| writer.serialize(&sample).unwrap()), SAMPLE_COLUMNS.join(","));
    }
}
