//! CPU time of the threads that work for a card, from `/proc`.
//!
//! A thread says whom it works for by its kernel name: `card1` computes for card 1, `comm1` communicates
//! for it. OpenMP's threads inherit the name of the thread that made them. Works on any process of the
//! same user; a figure of a thread that is running may be one scheduler tick (some ms) old.

use crate::card::thread_cpu_clock;
use crate::units::Nanos;
use std::io;
use std::path::{Path, PathBuf};

/// One thread's account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadCpu {
    /// Thread.
    pub tid: u32,
    /// Card it works for.
    pub card: usize,
    /// CPU time since it was made.
    pub on_cpu: Nanos,
}

/// `/proc/PID`.
pub fn process(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

/// The threads of a process (`/proc/PID` or `/proc/self`) that work for a card. A thread that ends while
/// this reads is left out; a process that is gone is an error.
pub fn card_threads(process: &Path) -> io::Result<Vec<ThreadCpu>> {
    threads(process, |task| {
        let name = std::fs::read_to_string(task.join("comm")).ok()?;
        card_of(name.trim_end())
    })
}

/// All threads of a process that works for this card alone, whatever their names.
pub fn all_threads(process: &Path, card: usize) -> io::Result<Vec<ThreadCpu>> {
    threads(process, |_| Some(card))
}

fn threads(process: &Path, card_of_task: impl Fn(&Path) -> Option<usize>) -> io::Result<Vec<ThreadCpu>> {
    let mut threads = Vec::new();
    for entry in std::fs::read_dir(process.join("task"))? {
        let entry = entry?;
        let Some(tid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let path = entry.path();
        let Some(card) = card_of_task(&path) else { continue };
        let Ok(schedstat) = std::fs::read_to_string(path.join("schedstat")) else { continue };
        let Some(on_cpu) = parse_schedstat(&schedstat) else { continue };
        threads.push(ThreadCpu { tid, card, on_cpu });
    }
    Ok(threads)
}

/// The calling process's CPU time for one card, exact also for threads that are running.
pub fn own_card_cpu(card: usize) -> io::Result<Nanos> {
    let threads = card_threads(Path::new("/proc/self"))?;
    let mine = threads.iter().filter(|thread| thread.card == card);
    Ok(Nanos(mine.map(|thread| thread_cpu_clock(thread.tid).unwrap_or(thread.on_cpu).0).sum()))
}

/// The card in a thread name: `card<N>` or `comm<N>`.
fn card_of(name: &str) -> Option<usize> {
    let number = name.strip_prefix("card").or_else(|| name.strip_prefix("comm"))?;
    number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok())?
}

/// First field of `schedstat`: nanoseconds on a CPU.
fn parse_schedstat(text: &str) -> Option<Nanos> {
    text.split_ascii_whitespace().next()?.parse().ok().map(Nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_names_tell_the_card() {
        assert_eq!(card_of("card0"), Some(0));
        assert_eq!(card_of("comm12"), Some(12));
        assert_eq!(card_of("card"), None);
        assert_eq!(card_of("card+1"), None);
        assert_eq!(card_of("loader"), None);
        assert_eq!(card_of("dp-vs-ddp"), None);
    }

    #[test]
    fn schedstat_begins_with_time_on_a_cpu() {
        assert_eq!(parse_schedstat("15316013 120 7\n"), Some(Nanos(15_316_013)));
        assert_eq!(parse_schedstat(""), None);
    }

    #[test]
    fn a_spinning_thread_is_charged_to_its_card_alone() {
        let work = |millis: u64| {
            move || {
                let start = Nanos::thread_cpu();
                while Nanos::thread_cpu().since(start) < Nanos(millis * 1_000_000) {}
                own_card_cpu(701).unwrap()
            }
        };
        let spin = |name: &str, millis| {
            std::thread::Builder::new().name(name.into()).spawn(work(millis)).unwrap().join().unwrap()
        };
        let charged = spin("card701", 30);
        assert!(charged >= Nanos(30_000_000), "{charged:?}");
        assert!(charged < Nanos(60_000_000), "{charged:?}");
        assert_eq!(spin("loader701", 5), Nanos(0));
    }

    #[test]
    fn all_threads_of_a_process_that_is_not_ours_work_for_its_card() {
        let own = Path::new("/proc/self");
        let all = all_threads(own, 3).unwrap();
        assert!(!all.is_empty() && all.iter().all(|thread| thread.card == 3));
        assert!(all.len() > card_threads(own).unwrap().iter().filter(|thread| thread.card == 3).count());
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        assert!(card_threads(&process(u32::MAX)).is_err());
    }
}
