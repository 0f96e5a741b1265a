//! Which of several failures is the one to report. Pure.
//!
//! When a rank dies, the others fail soon after because of it. What they say may arrive first, so a
//! failure that can only be a consequence gives way to one that can be a cause.

use crate::error::{Error, Kind};
use std::time::Duration;

/// How one rank failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    /// It ended by a signal that was not ours.
    Signal(i32),
    /// It ended with this status and without saying why.
    Exit(i32),
    /// It said why.
    Reported { kind: Kind, error: String, hint: Option<String> },
    /// It said something that is no message.
    Garbled(String),
    /// It has said nothing for this long.
    Silent(Duration),
}

/// A failure of one rank, with the end of what it wrote to standard error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) rank: usize,
    pub(crate) cause: Cause,
    pub(crate) last_words: String,
}

impl Failure {
    /// Whether another rank's failure may have brought it about.
    pub(crate) fn may_be_a_consequence(&self) -> bool {
        match &self.cause {
            Cause::Reported { kind, .. } => matches!(kind, Kind::Worker | Kind::Timeout),
            Cause::Silent(_) => true,
            Cause::Signal(_) | Cause::Exit(_) | Cause::Garbled(_) => false,
        }
    }

    /// For the user. Ranks are named where there are several.
    pub(crate) fn into_error(self, world_size: usize) -> Error {
        let who = if world_size > 1 { format!("rank {}", self.rank) } else { "the worker".to_owned() };
        let words = self.last_words.trim_end();
        let words = if words.is_empty() { String::new() } else { format!("; its last words were:\n{words}") };
        match self.cause {
            Cause::Signal(number) => {
                let name = signal_name(number);
                let error =
                    Error::new(Kind::Worker, format!("{who} was killed by signal {number} ({name}){words}"));
                match name {
                    "SIGKILL" => error.hint(
                        "if nobody killed it, the kernel's out-of-memory killer did: see `dmesg`, and try a smaller --batch",
                    ),
                    _ => error.hint("run it again; if it dies again, please report it with the text above"),
                }
            }
            Cause::Exit(status) => Error::new(
                Kind::Worker,
                format!("{who} ended with exit status {status} and without a word{words}"),
            )
            .hint("run it again; if it ends again, please report it with the text above"),
            Cause::Reported { kind, error, hint } => {
                let error = Error::new(kind, error);
                // Memory is a card's, which the worker has named.
                let named = world_size == 1 || kind == Kind::OutOfMemory;
                let error = if named { error } else { error.context(who) };
                match hint {
                    Some(hint) => error.hint(hint),
                    None => error,
                }
            }
            Cause::Garbled(line) => {
                Error::new(Kind::Worker, format!("{who} sent something that is no message: `{line}`"))
                    .hint("parent and worker must be the same build of the program")
            }
            Cause::Silent(time) => Error::new(
                Kind::Timeout,
                format!("{who} has said nothing for {:.0} s{words}", time.as_secs_f64()),
            )
            .hint("raise run.deadline_s if a step or the start may take that long"),
        }
    }
}

/// The failure to report: the first that is no mere consequence, else the first. `failures` are in the
/// order of their arrival.
pub(crate) fn first_cause(failures: Vec<Failure>) -> Option<Failure> {
    let position = failures.iter().position(|failure| !failure.may_be_a_consequence()).unwrap_or(0);
    failures.into_iter().nth(position)
}

/// The kernel's name of a signal.
fn signal_name(number: i32) -> &'static str {
    match number {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGSYS => "SIGSYS",
        _ => "unnamed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(rank: usize, cause: Cause) -> Failure {
        Failure { rank, cause, last_words: String::new() }
    }

    fn reported(kind: Kind, error: &str) -> Cause {
        Cause::Reported { kind, error: error.into(), hint: None }
    }

    #[test]
    fn a_death_beats_the_complaint_about_it_that_came_first() {
        let failures = vec![
            failure(0, reported(Kind::Worker, "rank 1 died")),
            failure(2, reported(Kind::Timeout, "rank 1 did not arrive")),
            failure(1, Cause::Signal(libc::SIGKILL)),
        ];
        let error = first_cause(failures).unwrap().into_error(3);
        assert_eq!(error.to_string(), "rank 1 was killed by signal 9 (SIGKILL)");
        assert!(error.advice().unwrap().contains("dmesg"));
    }

    #[test]
    fn of_several_causes_the_first_in_time_is_reported() {
        let failures = vec![
            failure(1, reported(Kind::OutOfMemory, "no room")),
            failure(0, Cause::Signal(libc::SIGSEGV)),
        ];
        let error = first_cause(failures).unwrap().into_error(2);
        assert_eq!((error.kind(), error.to_string()), (Kind::OutOfMemory, "no room".to_owned()));
    }

    #[test]
    fn of_consequences_alone_the_first_is_reported() {
        let failures = vec![
            failure(0, reported(Kind::Timeout, "rank 1 had not arrived at all_reduce 7")),
            failure(1, Cause::Silent(Duration::from_secs(65))),
        ];
        assert_eq!(
            first_cause(failures).unwrap().into_error(2).to_string(),
            "rank 0: rank 1 had not arrived at all_reduce 7"
        );
    }

    #[test]
    fn last_words_are_passed_on() {
        let failure = Failure { rank: 0, cause: Cause::Exit(127), last_words: "no such library\n".into() };
        assert_eq!(
            failure.into_error(1).to_string(),
            "the worker ended with exit status 127 and without a word; its last words were:\nno such library"
        );
    }
}
