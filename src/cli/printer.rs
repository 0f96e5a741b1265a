//! The one place that prints. Data goes to standard output, everything else to standard error; colour
//! only to a terminal, and no meaning by colour alone.

use super::ExitStatus;
use crate::error::{Error, Kind, Result};
use crate::metrics::record::Warning;
use std::io::{IsTerminal, Write};

/// Prints for people and programs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Printer {
    colour: bool,
}

impl Printer {
    pub(crate) fn new() -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self { colour: std::io::stderr().is_terminal() && !set("NO_COLOR") && !dumb }
    }

    /// What was asked for. An error if it cannot be handed over whole: who asked must not take part of it
    /// for all.
    pub(crate) fn data(&self, text: &str) -> Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()).map_err(|source| {
            // A reader that has seen enough (`| head`) knows why it left.
            let said = source.kind() != std::io::ErrorKind::BrokenPipe;
            let error = Error::new(Kind::Io, format!("cannot write to standard output: {source}"));
            if said { error.hint("give standard output somewhere to go") } else { error }
        })
    }

    /// How it goes.
    pub(crate) fn status(&self, text: &str) {
        self.write_aside(text);
    }

    pub(crate) fn warning(&self, warning: &Warning) {
        self.message("warning", "33", &warning.message, warning.hint.as_deref());
    }

    pub(crate) fn error(&self, error: &Error) {
        self.message("error", "31", &error.to_string(), error.advice());
    }

    /// A usage error, or the help or version that was asked for.
    pub(crate) fn usage(&self, error: &clap::Error) -> ExitStatus {
        // Nothing can be done about a terminal that is gone.
        let _ = error.print();
        if !error.use_stderr() {
            return ExitStatus::Success;
        }
        self.write_aside(&format!(
            "\n{}: `dp-vs-ddp help` lists the verbs, `dp-vs-ddp VERB --help` what they take",
            self.paint("36", "hint")
        ));
        ExitStatus::Error
    }

    fn message(&self, label: &str, colour: &str, text: &str, hint: Option<&str>) {
        let mut lines = format!("{}: {text}", self.paint(colour, label));
        if let Some(hint) = hint {
            lines.push_str(&format!("\n\n{}: {hint}", self.paint("36", "hint")));
        }
        self.write_aside(&lines);
    }

    fn paint(&self, colour: &str, label: &str) -> String {
        match self.colour {
            true => format!("\x1b[1;{colour}m{label}\x1b[0m"),
            false => label.to_owned(),
        }
    }

    fn write_aside(&self, text: &str) {
        let _ = writeln!(std::io::stderr().lock(), "{text}");
    }
}
