//! The processes of one engine in one round, from spawning to reaping.
//!
//! Each worker leads a process group of its own, so that what it starts is stopped with it and a Ctrl-C
//! at the terminal reaches the parent alone. Threads carry what workers say and how they end into one
//! bounded channel; one loop decides.

use super::failure::{Cause, Failure, first_cause};
use super::protocol::{Job, Message};
use crate::error::{Error, Kind, Result};
use crate::metrics::record::CardKind;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often the loop looks up from the messages: at a request to stop, and at who has fallen silent.
const LOOK_UP: Duration = Duration::from_millis(50);

/// How long a failure that may be a consequence waits for its cause to show.
const SETTLE: Duration = Duration::from_millis(500);

/// How long messages may trail behind the exit of the process that sent them.
const TRAIL: Duration = Duration::from_millis(500);

/// How long a killed process may take to go away: it may sit in an uninterruptible read.
const REAP: Duration = Duration::from_secs(5);

/// Bytes of standard error that are kept for a worker that fails.
const LAST_WORDS: usize = 4096;

/// Messages on their way; workers that are further ahead wait.
const IN_FLIGHT: usize = 256;

/// What a worker process runs.
#[derive(Debug, Clone)]
pub struct Program {
    /// File to execute.
    pub path: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Variables set for it.
    pub set: Vec<(OsString, OsString)>,
    /// Variables taken from it.
    pub unset: Vec<OsString>,
}

impl Program {
    /// This very program with these arguments, also when its file has been replaced since it started.
    pub fn this(args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        Self {
            path: "/proc/self/exe".into(),
            args: args.into_iter().map(Into::into).collect(),
            set: Vec::new(),
            unset: Vec::new(),
        }
    }
}

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From the polite signal to the one that cannot be ignored.
    pub grace: Duration,
    /// Longest time a rank may say nothing.
    pub silence: Duration,
}

/// The running workers of a job, by rank. Dropping it kills them.
#[derive(Debug)]
pub struct Group {
    workers: Vec<Worker>,
    events: Receiver<(usize, Event)>,
    limits: Limits,
}

#[derive(Debug)]
struct Worker {
    child: Child,
    pid: Pid,
    /// Open as long as this process lives: its end tells the worker that nobody listens any more.
    _stdin: Option<ChildStdin>,
    last_words: Arc<Mutex<VecDeque<u8>>>,
    heard: Instant,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Working,
    /// Said that all is said.
    Done,
    /// Said why it cannot go on, or was found to have failed.
    Failed,
    /// Not running any more.
    Gone,
}

#[derive(Debug)]
enum Event {
    Message(Message),
    Garbled(String),
    Exited(Exit),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exit {
    Status(i32),
    Signal(i32),
}

impl Group {
    /// Starts one worker a job, in rank order. If one cannot be started, those that were are stopped.
    pub fn spawn(program: &Program, jobs: &[Job], limits: Limits) -> Result<Self> {
        let (sender, events) = sync_channel(IN_FLIGHT);
        let mut group = Self { workers: Vec::with_capacity(jobs.len()), events, limits };
        for job in jobs {
            let worker = start(program, job, &sender)
                .map_err(|source| {
                    Error::new(Kind::Worker, format!("cannot start a worker process: {source}"))
                        .hint("check the limits on processes and memory (`ulimit -a`)")
                })
                .map_err(|error| error.context(format!("rank {}", job.rank)))?;
            group.workers.push(worker);
        }
        Ok(group)
    }

    /// Process numbers by rank.
    pub fn pids(&self) -> Vec<u32> {
        self.workers.iter().map(|worker| worker.child.id()).collect()
    }

    /// Listens until every worker has said all and ended. A failure of any, an error of `observe`, or a
    /// signal number in `stop` stops all of them first and is then returned.
    pub fn run(
        mut self,
        stop: &AtomicUsize,
        observe: &mut dyn FnMut(usize, Message) -> Result<()>,
    ) -> Result<()> {
        let result = self.listen(stop, observe);
        self.stop_all();
        result
    }

    fn listen(
        &mut self,
        stop: &AtomicUsize,
        observe: &mut dyn FnMut(usize, Message) -> Result<()>,
    ) -> Result<()> {
        let mut failures: Vec<Failure> = Vec::new();
        let mut decide_at: Option<Instant> = None;
        while self.workers.iter().any(|worker| worker.stage != Stage::Gone) {
            let signal = stop.load(Ordering::Relaxed);
            if signal != 0 {
                return Err(interrupted(signal));
            }
            let cause = match self.events.recv_timeout(LOOK_UP) {
                Ok((rank, Event::Message(message))) => self.hear(rank, message, observe)?,
                Ok((rank, event)) => self.lose(rank, event),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
            };
            let cause = cause.or_else(|| self.find_silent());
            if let Some((rank, cause)) = cause {
                failures.push(Failure { rank, cause, last_words: self.last_words(rank) });
                decide_at.get_or_insert_with(|| Instant::now() + SETTLE);
            }
            let certain = failures.iter().any(|failure| !failure.may_be_a_consequence());
            if certain || decide_at.is_some_and(|moment| Instant::now() >= moment) {
                break;
            }
        }
        let world_size = self.workers.len();
        match first_cause(failures) {
            Some(failure) => Err(failure.into_error(world_size)),
            None => Ok(()),
        }
    }

    fn hear(
        &mut self,
        rank: usize,
        message: Message,
        observe: &mut dyn FnMut(usize, Message) -> Result<()>,
    ) -> Result<Option<(usize, Cause)>> {
        let worker = &mut self.workers[rank];
        worker.heard = Instant::now();
        match message {
            Message::Failed { kind, error, hint } => {
                worker.stage = Stage::Failed;
                return Ok(Some((rank, Cause::Reported { kind, error, hint })));
            }
            Message::Done => worker.stage = Stage::Done,
            _ => {}
        }
        observe(rank, message)?;
        Ok(None)
    }

    fn lose(&mut self, rank: usize, event: Event) -> Option<(usize, Cause)> {
        let worker = &mut self.workers[rank];
        let cause = match event {
            Event::Message(_) => return None,
            Event::Garbled(line) => {
                worker.stage = Stage::Failed;
                return Some((rank, Cause::Garbled(line)));
            }
            Event::Exited(Exit::Signal(number)) => Some(Cause::Signal(number)),
            Event::Exited(Exit::Status(status)) => {
                (worker.stage != Stage::Done || status != 0).then_some(Cause::Exit(status))
            }
        };
        // One that failed has been heard already: how it ended adds nothing.
        let news = worker.stage != Stage::Failed;
        worker.stage = Stage::Gone;
        cause.filter(|_| news).map(|cause| (rank, cause))
    }

    fn find_silent(&mut self) -> Option<(usize, Cause)> {
        let silence = self.limits.silence;
        let (rank, worker) = self.workers.iter_mut().enumerate().find(|(_, worker)| {
            matches!(worker.stage, Stage::Working | Stage::Done) && worker.heard.elapsed() > silence
        })?;
        worker.stage = Stage::Failed;
        Some((rank, Cause::Silent(worker.heard.elapsed())))
    }

    fn last_words(&self, rank: usize) -> String {
        let bytes: Vec<u8> = lock(&self.workers[rank].last_words).iter().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Politely, then not; returns when all are reaped, and the rest of their groups is gone too.
    fn stop_all(&mut self) {
        let asked = Instant::now();
        if self.workers.iter().any(|worker| worker.stage != Stage::Gone) {
            self.signal_running(Signal::TERM);
            self.reap_until(asked + self.limits.grace);
            self.signal_running(Signal::KILL);
            self.reap_until(asked + self.limits.grace + REAP);
        }
        for worker in &mut self.workers {
            // The leader is not reaped yet, so that its group number cannot have been taken by another.
            let _ = kill_process_group(worker.pid, Signal::KILL);
            if worker.stage == Stage::Gone {
                let _ = worker.child.wait();
            }
        }
        self.workers.clear();
    }

    fn signal_running(&self, signal: Signal) {
        for worker in self.workers.iter().filter(|worker| worker.stage != Stage::Gone) {
            // A group that is gone needs no signal.
            let _ = kill_process_group(worker.pid, signal);
        }
    }

    fn reap_until(&mut self, deadline: Instant) {
        while self.workers.iter().any(|worker| worker.stage != Stage::Gone) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok((rank, Event::Exited(_))) => self.workers[rank].stage = Stage::Gone,
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.stop_all();
    }
}

fn interrupted(signal: usize) -> Error {
    let name = match i32::try_from(signal) {
        Ok(libc::SIGINT) => "SIGINT",
        Ok(libc::SIGTERM) => "SIGTERM",
        _ => "a signal",
    };
    Error::new(Kind::Interrupted, format!("interrupted by {name}"))
}

/// The CUDA cards of a job, by name, in its order; `None` where it has none. The worker sees no others, so
/// nothing in it can open one, and their order is the same however often it is read.
fn visible_devices(job: &Job) -> Option<OsString> {
    let mut uuids: Vec<&str> = Vec::new();
    for card in job.own_cards().iter().filter(|card| card.kind == CardKind::Cuda) {
        // One that is named twice is still one card.
        if !uuids.contains(&card.uuid.as_str()) {
            uuids.push(&card.uuid);
        }
    }
    (!uuids.is_empty()).then(|| uuids.join(",").into())
}

fn start(program: &Program, job: &Job, events: &SyncSender<(usize, Event)>) -> std::io::Result<Worker> {
    let mut command = Command::new(&program.path);
    command
        .args(&program.args)
        .envs(program.set.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    for name in &program.unset {
        command.env_remove(name);
    }
    if let Some(visible) = visible_devices(job) {
        command.env("CUDA_VISIBLE_DEVICES", visible);
    }
    let mut child = command.spawn()?;
    let mut stdin = child.stdin.take();
    if let Some(stdin) = &mut stdin {
        let mut line = serde_json::to_vec(job)?;
        line.push(b'\n');
        // A worker that died before it read its job is reported by its exit.
        let _ = stdin.write_all(&line);
    }
    let pid = Pid::from_child(&child);
    let last_words = Arc::new(Mutex::new(VecDeque::new()));
    let worker = Worker {
        pid,
        _stdin: stdin,
        last_words: last_words.clone(),
        heard: Instant::now(),
        stage: Stage::Working,
        child,
    };
    // From here on a failure to start a thread drops nothing silently: the caller's group kills `worker`.
    listen_to(worker, job.rank, last_words, events)
}

fn listen_to(
    mut worker: Worker,
    rank: usize,
    last_words: Arc<Mutex<VecDeque<u8>>>,
    events: &SyncSender<(usize, Event)>,
) -> std::io::Result<Worker> {
    let (stdout, stderr) = (worker.child.stdout.take(), worker.child.stderr.take());
    let (drained, trail) = sync_channel::<()>(0);
    let thread = |name: &str, body: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new().name(format!("{name}{rank}")).spawn(body).map(drop)
    };
    let started = (|| {
        let of_errors = drained.clone();
        thread(
            "errors",
            Box::new(move || {
                let _until_read = of_errors;
                if let Some(stderr) = stderr {
                    keep_last(stderr, &last_words);
                }
            }),
        )?;
        let sender = events.clone();
        thread(
            "messages",
            Box::new(move || {
                let _until_read = drained;
                if let Some(stdout) = stdout {
                    read_messages(stdout, rank, &sender);
                }
            }),
        )?;
        let (sender, pid) = (events.clone(), worker.pid);
        thread(
            "exit",
            Box::new(move || {
                let exit = wait_without_reaping(pid);
                // Ends when both readers have, or when somebody else holds the pipes open.
                let _ = trail.recv_timeout(TRAIL);
                // Nobody listens any more when the group is gone.
                let _ = sender.send((rank, Event::Exited(exit)));
            }),
        )
    })();
    if let Err(error) = started {
        let _ = worker.child.kill();
        let _ = worker.child.wait();
        return Err(error);
    }
    Ok(worker)
}

fn read_messages(stdout: impl Read, rank: usize, events: &SyncSender<(usize, Event)>) {
    for line in BufReader::new(stdout).lines() {
        let event = match line {
            Ok(line) => match serde_json::from_str(&line) {
                Ok(message) => Event::Message(message),
                Err(_) => Event::Garbled(line.chars().take(200).collect()),
            },
            Err(error) => Event::Garbled(error.to_string()),
        };
        if events.send((rank, event)).is_err() {
            return;
        }
    }
}

fn keep_last(mut stderr: impl Read, last_words: &Mutex<VecDeque<u8>>) {
    let mut buffer = [0; 1024];
    while let Ok(count @ 1..) = stderr.read(&mut buffer) {
        let mut kept = lock(last_words);
        kept.extend(&buffer[..count]);
        let surplus = kept.len().saturating_sub(LAST_WORDS);
        kept.drain(..surplus);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Bytes are whole whatever happened to the thread that appended them.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the end of a process and leaves its entry in place, so that its number and its group's stay
/// ours until we let go of them.
fn wait_without_reaping(pid: Pid) -> Exit {
    loop {
        match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(Some(status)) => {
                return match status.terminating_signal() {
                    Some(number) => Exit::Signal(number),
                    None => Exit::Status(status.exit_status().unwrap_or(-1)),
                };
            }
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            // Somebody else has reaped it: it is gone, and how is not to be known.
            Err(_) => return Exit::Status(-1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::testing::{job, shell};

    const LIMITS: Limits = Limits { grace: Duration::from_millis(300), silence: Duration::from_secs(10) };

    fn group(script: &str, ranks: usize, limits: Limits) -> Group {
        let jobs: Vec<_> = (0..ranks).map(|rank| job(rank, ranks)).collect();
        Group::spawn(&shell(script), &jobs, limits).unwrap()
    }

    fn run(script: &str, ranks: usize) -> (Result<()>, Vec<(usize, Message)>) {
        let mut heard = Vec::new();
        let result = group(script, ranks, LIMITS).run(&AtomicUsize::new(0), &mut |rank, message| {
            heard.push((rank, message));
            Ok(())
        });
        (result, heard)
    }

    fn alive(pid: u32) -> bool {
        std::path::Path::new(&format!("/proc/{pid}")).exists()
    }

    #[test]
    fn messages_of_all_ranks_arrive_in_their_order() {
        let (result, heard) = run(
            r#"read job; echo '{"message":"ready"}'; echo '{"message":"weights","digest":"d"}'; echo '{"message":"done"}'"#,
            2,
        );
        result.unwrap();
        for rank in 0..2 {
            let of_rank: Vec<_> =
                heard.iter().filter(|(from, _)| *from == rank).map(|(_, m)| m.clone()).collect();
            assert_eq!(
                of_rank,
                [
                    Message::Ready { link: None },
                    Message::Weights { digest: "d".into(), skipped_steps: 0 },
                    Message::Done
                ]
            );
        }
    }

    #[test]
    fn the_rank_that_dies_is_reported_and_the_other_stopped() {
        let script = r#"read job; case $job in *'"rank":1'*) kill -9 $$;; esac; exec sleep 60"#;
        let start = Instant::now();
        let group = group(script, 2, LIMITS);
        let pids = group.pids();
        let error = group.run(&AtomicUsize::new(0), &mut |_, _| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "rank 1 was killed by signal 9 (SIGKILL)");
        assert!(start.elapsed() < Duration::from_secs(3));
        assert!(!pids.into_iter().any(alive));
    }

    #[test]
    fn a_consequence_that_is_told_first_gives_way_to_its_cause() {
        let script = r#"read job; case $job in
            *'"rank":0'*) echo '{"message":"failed","kind":"worker","error":"rank 1 is gone","hint":null}'; exec sleep 60;;
            *) sleep 0.2; kill -9 $$;; esac"#;
        assert_eq!(run(script, 2).0.unwrap_err().to_string(), "rank 1 was killed by signal 9 (SIGKILL)");
    }

    #[test]
    fn a_worker_that_ignores_the_polite_signal_is_killed_after_the_grace_time() {
        let script = r#"read job; case $job in
            *'"rank":1'*) sleep 0.3; echo '{"message":"failed","kind":"out_of_memory","error":"no room","hint":"less"}'; exit 2;;
            *) trap '' TERM; while :; do sleep 0.05; done;; esac"#;
        let start = Instant::now();
        let group = group(script, 2, LIMITS);
        let pids = group.pids();
        let error = group.run(&AtomicUsize::new(0), &mut |_, _| Ok(())).unwrap_err();
        let took = start.elapsed();
        assert_eq!((error.kind(), error.advice()), (Kind::OutOfMemory, Some("less")));
        assert!(took >= Duration::from_millis(600) && took < Duration::from_secs(3), "{took:?}");
        assert!(!pids.into_iter().any(alive));
    }

    #[test]
    fn what_a_wrapper_started_is_stopped_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let note = folder.path().join("pid");
        let script = format!("read job; sleep 60 & echo $! > {0}.new; mv {0}.new {0}; wait", note.display());
        let group = group(&script, 1, LIMITS);
        let deadline = Instant::now() + Duration::from_secs(5);
        while !note.exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let inner: u32 = std::fs::read_to_string(&note).unwrap().trim().parse().unwrap();
        let error = group.run(&AtomicUsize::new(libc::SIGINT as usize), &mut |_, _| Ok(())).unwrap_err();
        assert_eq!((error.kind(), error.to_string().as_str()), (Kind::Interrupted, "interrupted by SIGINT"));
        // Killed; on a busy machine it may take a moment to die, and as a zombie it runs no more.
        let runs = || {
            std::fs::read_to_string(format!("/proc/{inner}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
        };
        while runs() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!runs());
    }

    #[test]
    fn a_wrapper_killed_before_its_child_leaves_nothing() {
        let script = r#"read job; sleep 60 & kill -9 $$"#;
        let start = Instant::now();
        let error = run(script, 1).0.unwrap_err();
        assert_eq!(error.to_string(), "the worker was killed by signal 9 (SIGKILL)");
        assert!(start.elapsed() < Duration::from_secs(3));
    }

    #[test]
    fn silence_has_a_deadline() {
        let limits = Limits { silence: Duration::from_millis(200), ..LIMITS };
        let error = group("read job; exec sleep 60", 1, limits)
            .run(&AtomicUsize::new(0), &mut |_, _| Ok(()))
            .unwrap_err();
        assert_eq!(error.kind(), Kind::Timeout);
        assert!(error.to_string().starts_with("the worker has said nothing for"), "{error}");
    }

    #[test]
    fn an_unexplained_exit_comes_with_its_last_words() {
        let error = run("read job; echo bad luck >&2; exit 3", 1).0.unwrap_err();
        assert_eq!(
            error.to_string(),
            "the worker ended with exit status 3 and without a word; its last words were:\nbad luck"
        );
        let error = run("read job; exit 0", 1).0.unwrap_err();
        assert!(error.to_string().contains("exit status 0"), "{error}");
        let error = run(r#"read job; echo '{"message":"done"}'; exit 4"#, 1).0.unwrap_err();
        assert!(error.to_string().contains("exit status 4"), "{error}");
    }

    #[test]
    fn a_line_that_is_no_message_ends_the_group() {
        let error = run("read job; echo hello; exec sleep 60", 1).0.unwrap_err();
        assert_eq!(error.to_string(), "the worker sent something that is no message: `hello`");
    }

    #[test]
    fn an_observer_that_fails_stops_the_workers() {
        let group = group(r#"read job; echo '{"message":"ready"}'; exec sleep 60"#, 2, LIMITS);
        let pids = group.pids();
        let error =
            group.run(&AtomicUsize::new(0), &mut |_, _| Err(Error::new(Kind::Io, "disk full"))).unwrap_err();
        assert_eq!(error.to_string(), "disk full");
        assert!(!pids.into_iter().any(alive));
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_of_its_rank() {
        let program = Program { path: "/nonexistent/program".into(), ..shell("") };
        let error = Group::spawn(&program, &[job(0, 1)], LIMITS).unwrap_err();
        assert!(error.to_string().starts_with("rank 0: cannot start a worker process"), "{error}");
    }

    #[test]
    fn dropping_a_group_kills_it() {
        let group = group("read job; exec sleep 60", 2, LIMITS);
        let pids = group.pids();
        drop(group);
        assert!(!pids.into_iter().any(alive));
    }
}
