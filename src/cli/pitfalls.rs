//! `pitfalls`: the classic mistakes of data-parallel training, each made on purpose, small, and measured.
//!
//! A pitfall counts as shown only if the mistake did what is said of it in this very run, and doing it
//! right did not.

#[cfg_attr(not(feature = "engines"), path = "pitfalls/disabled.rs")]
mod cases;
#[cfg(feature = "engines")]
mod trial;

use super::args::PitfallsArgs;
use super::printer::Printer;
use super::{ExitStatus, worker};
use crate::error::{Error, Kind, Result};
use serde::Serialize;

/// One mistake, and what it did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Pitfall {
    /// The mistake, in snake_case.
    name: &'static str,
    /// What doing it right gave, or what is hoped for.
    expected: String,
    /// What the mistake gave.
    seen: String,
    /// Why, and what to do.
    explanation: &'static str,
    /// Whether both came out as described.
    shown: bool,
}

/// Runs the verb.
pub(crate) fn run(args: &PitfallsArgs, printer: &Printer) -> Result<ExitStatus> {
    worker::require()?;
    let mut pitfalls = Vec::new();
    for pitfall in cases::all()? {
        let pitfall = pitfall?;
        if !args.json {
            printer.data(&text(pitfalls.len() + 1, &pitfall))?;
            printer.data("")?;
        }
        pitfalls.push(pitfall);
    }
    let missed = pitfalls.iter().filter(|pitfall| !pitfall.shown).count();
    if args.json {
        let text = serde_json::to_string_pretty(&pitfalls)
            .map_err(|source| Error::new(Kind::Io, format!("cannot write the results as JSON: {source}")))?;
        printer.data(&text)?;
    } else {
        printer.data(&format!("{} of {} shown as described", pitfalls.len() - missed, pitfalls.len()))?;
    }
    Ok(if missed == 0 { ExitStatus::Success } else { ExitStatus::Failure })
}

fn text(number: usize, pitfall: &Pitfall) -> String {
    let Pitfall { name, expected, seen, explanation, shown } = pitfall;
    let title = name.replace('_', " ");
    let verdict = if *shown { "" } else { "  NOT SHOWN in this run" };
    format!("{number}. {title}{verdict}\n   expected  {expected}\n   seen      {seen}\n   {explanation}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pitfall_is_a_title_two_values_and_a_line() {
        let mut pitfall = Pitfall {
            name: "no_brakes",
            expected: "1 m".into(),
            seen: "9 m".into(),
            explanation: "Rolling does not stop by itself.",
            shown: true,
        };
        assert_eq!(
            text(2, &pitfall),
            "2. no brakes\n   expected  1 m\n   seen      9 m\n   Rolling does not stop by itself."
        );
        pitfall.shown = false;
        assert!(text(2, &pitfall).starts_with("2. no brakes  NOT SHOWN in this run\n"));
    }
}
