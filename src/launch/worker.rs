//! The worker's side: it reads its job, reports, and ends when its parent does.

use super::protocol::{Job, Message};
use crate::error::{Error, Kind, Result};
use rustix::process::{Signal, getpid, getppid, kill_process, set_parent_process_death_signal};
use std::fs::File;
use std::io::{BufRead, Read, Write};

/// Reads the job from standard input, and from then on ends this process when the parent ends: its end
/// of standard input closes then, whatever killed it.
pub fn end_with_parent() -> Result<Job> {
    // For a parent that dies while this process is stopped and cannot see the end of its input.
    // Where the kernel does not offer it, the watch below does the work alone.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid().is_none() {
        end_process();
    }
    let mut line = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut line)
        .map_err(|source| Error::new(Kind::Worker, format!("cannot read the job: {source}")))?;
    let job = serde_json::from_str(&line).map_err(|source| {
        Error::usage(format!("standard input holds no job: {source}"))
            .hint("this form of `worker` is started by `compare` and `train`, never by hand")
    })?;
    std::thread::Builder::new().name("parent-watch".into()).spawn(watch_parent).map_err(|source| {
        Error::new(Kind::Unavailable, format!("cannot start the thread that watches the parent: {source}"))
    })?;
    Ok(job)
}

fn watch_parent() {
    let mut sink = [0; 64];
    let mut stdin = std::io::stdin().lock();
    while matches!(stdin.read(&mut sink), Ok(1..)) {}
    end_process();
}

/// Ends this process at once: nobody is left to return to, and libtorch's destructors must not run
/// while its threads do.
fn end_process() {
    // Cannot fail: a process may always signal itself.
    let _ = kill_process(getpid(), Signal::KILL);
}

/// Sends messages to whoever started this worker.
#[derive(Debug)]
pub struct Reporter {
    out: File,
}

impl Reporter {
    /// Takes standard output for messages alone: what else the process prints there from now on goes to
    /// standard error, so that a library that prints cannot break the protocol.
    pub fn claim_stdout() -> Result<Self> {
        let claim = || -> std::io::Result<File> {
            let out = rustix::io::dup(rustix::stdio::stdout())?;
            rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
            Ok(File::from(out))
        };
        let out = claim().map_err(|source| {
            Error::new(Kind::Worker, format!("cannot take standard output for messages: {source}"))
        })?;
        Ok(Self { out })
    }

    /// Sends one message. An error means that nobody listens.
    pub fn send(&mut self, message: &Message) -> Result<()> {
        let mut line = serde_json::to_vec(message)
            .map_err(|source| Error::new(Kind::Worker, format!("cannot write a message: {source}")))?;
        line.push(b'\n');
        self.out.write_all(&line).map_err(|source| {
            Error::new(Kind::Worker, format!("nobody reads this worker's messages: {source}"))
        })
    }
}
