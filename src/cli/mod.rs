//! The program: arguments in, an exit status out. One file a verb.
//!
//! The only module that prints, and the only one that knows all the others.

mod args;
mod cell;
mod compare;
mod doctor;
mod environment;
mod gpu;
mod interrupt;
mod peers;
mod pitfalls;
mod printer;
mod progress;
mod request;
mod row;
mod run_folder;
mod train;
#[cfg_attr(not(feature = "engines"), path = "worker_disabled.rs")]
mod worker;

use crate::{Result, report};
use args::{Args, DoctorArgs, ReportArgs, Verb};
use clap::Parser;
use printer::Printer;
use std::ffi::OsString;

/// How the program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    /// Done.
    Success = 0,
    /// Judged, and failed.
    Failure = 1,
    /// Could not run, or could not judge.
    Error = 2,
}

impl From<ExitStatus> for std::process::ExitCode {
    fn from(status: ExitStatus) -> Self {
        Self::from(status as u8)
    }
}

/// Runs the program with these arguments, its own name first.
pub fn run(argv: impl IntoIterator<Item = OsString>) -> ExitStatus {
    let argv: Vec<OsString> = argv.into_iter().collect();
    let printer = Printer::new();
    let args = match Args::try_parse_from(&argv) {
        Ok(args) => args,
        Err(error) => return printer.usage(&error),
    };
    let argv: Vec<String> = argv.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let result = match args.verb {
        Verb::Compare(args) => compare::run(&args, argv, &printer),
        Verb::Train(args) => train::run(&args, &printer),
        Verb::Report(args) => rebuild(&args, &printer),
        Verb::Doctor(args) => doctor(&args, &printer),
        Verb::Pitfalls(args) => pitfalls::run(&args, &printer),
        Verb::Worker(args) => return worker::run(&args),
    };
    result.unwrap_or_else(|error| {
        printer.error(&error);
        ExitStatus::Error
    })
}

fn rebuild(args: &ReportArgs, printer: &Printer) -> Result<ExitStatus> {
    let written = report::write(&args.run_dir)?;
    for note in &written.notes {
        printer.status(&format!("note: {note}"));
    }
    printer.data(&written.page.display().to_string())?;
    Ok(ExitStatus::Success)
}

fn doctor(args: &DoctorArgs, printer: &Printer) -> Result<ExitStatus> {
    let diagnosis = doctor::diagnose();
    printer.data(&diagnosis.render(args.json)?)?;
    Ok(if diagnosis.can_compare { ExitStatus::Success } else { ExitStatus::Error })
}
