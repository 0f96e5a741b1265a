//! Reports from made-up runs: what is written, what is refused, and that nothing from outside can
//! break a page.

mod fixture;

use dp_vs_ddp::report;
use fixture::{Fixture, Size};
use std::path::PathBuf;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_whole_run_becomes_a_whole_report() {
    // `DPVSDDP_KEEP_REPORT=DIR` leaves it there, to be looked at.
    let temporary = folder();
    let kept = std::env::var_os("DPVSDDP_KEEP_REPORT").map(PathBuf::from);
    let run = kept.as_deref().unwrap_or(temporary.path());
    Fixture::new(Size::default()).write(run);
    let written = report::write(run).unwrap();
    assert_eq!(written.notes, Vec::<String>::new());
    assert_eq!(written.files.len(), 7 * 2 + 3);
}
