//! Reports: from the files of a run to a page, charts, a trace, a summary and a console table.
//!
//! Rebuilt from disk alone: knows the record, its statistics and the plan, and nothing of how a run is
//! made. Nothing here prints. [`view`] decides what is shown; the others only give it a form.

mod charts;
mod console;
mod html;
mod load;
mod markdown;
mod text;
mod trace;
mod verdict;
mod view;

pub use console::console;
pub(crate) use console::wrap;

use crate::error::Kind;
use crate::{Error, Result};
use charts::Outcome;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use view::View;

/// What a report put into the run folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The page to open.
    pub page: PathBuf,
    /// Everything written, the page included.
    pub files: Vec<PathBuf>,
    /// Charts that could not be drawn and lines that could not be used, in plain words. The page says
    /// the same.
    pub notes: Vec<String>,
}

/// Rebuilds `report.html`, `charts/`, `trace.json` and `summary.md` of a run folder from its
/// `results.json`, `steps.csv` and `samples.csv`. Each file appears whole or not at all.
pub fn write(run_dir: &Path) -> Result<Written> {
    let run = load::load(run_dir)?;
    let mut view = View::new(&run);
    let charts = charts::all(&view);
    let failed = charts.iter().filter_map(|chart| match &chart.outcome {
        Outcome::Failed(why) => Some(format!("the chart \"{}\" could not be drawn: {why}", chart.title)),
        Outcome::Drawn { .. } | Outcome::Empty => None,
    });
    view.notes.extend(failed);

    let folder = run_dir.join("charts");
    std::fs::create_dir_all(&folder).map_err(|e| Error::io("cannot make the folder", &folder, e))?;
    let mut files = Vec::new();
    for chart in &charts {
        let paths =
            [("svg", "svg"), ("png", "png")].map(|(_, end)| folder.join(format!("{}.{end}", chart.name)));
        if let Outcome::Drawn { svg, png } = &chart.outcome {
            for (path, bytes) in paths.into_iter().zip([svg.as_bytes(), png]) {
                files.push(put(path, bytes)?);
            }
        } else {
            // A picture of an earlier report must not stand for this one.
            for path in paths {
                remove_if_there(&path)?;
            }
        }
    }
    files.push(put(run_dir.join("trace.json"), &trace::trace(&run)?)?);
    files.push(put(run_dir.join("summary.md"), markdown::markdown(&view).as_bytes())?);
    let page = put(run_dir.join("report.html"), html::html(&view, &charts)?.as_bytes())?;
    files.push(page.clone());
    Ok(Written { page, files, notes: view.notes })
}

/// Writes a file under another name beside it, then renames it: readers see the old one or the new one.
fn put(path: PathBuf, bytes: &[u8]) -> Result<PathBuf> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let failed = |e| Error::io("cannot write", &path, e);
    let mut file = tempfile::Builder::new()
        .prefix(".report-")
        .permissions(std::fs::Permissions::from_mode(0o644))
        .tempfile_in(folder)
        .map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    file.persist(&path).map_err(|e| failed(e.error))?;
    let length = std::fs::metadata(&path).map_err(failed)?.len();
    if length == 0 || length != bytes.len() as u64 {
        let what = format!("cannot write `{}`: {length} of {} bytes arrived", path.display(), bytes.len());
        return Err(Error::new(Kind::Io, what).hint("free some space"));
    }
    Ok(path)
}

fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io("cannot remove the old", path, e))
        }
        _ => Ok(()),
    }
}
