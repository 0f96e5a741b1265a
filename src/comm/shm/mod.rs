//! Collectives over shared memory, one host.
//!
//! Rank 0 makes a memfd and publishes where it is; peers map it. Nothing has a name in a file system,
//! so nothing is left behind whoever is killed.
//!
//! Note [Meetings]
//! Ranks order their accesses by meetings and by nothing else. At a meeting each rank shows what it is
//! about to do and counts itself in; the last to arrive compares what all showed, and opens the gate.
//! Everything a rank wrote before a meeting is seen by every rank after it. A reduction is two meetings:
//! all data is there, all sums are there. Between them rank r alone touches share r, in all copies.

#![allow(unsafe_code)]

mod control;
mod issue;
mod region;
mod tag;

pub(super) use region::Region;

use super::wait::{self, Ended, Waiter};
use super::{Abort, Board, Buffer, Collective, Rendezvous};
use crate::card::{Meter, SharedMemory};
use crate::error::Kind as ErrorKind;
use crate::units::Nanos;
use crate::{Error, Result};
use control::{Control, MESSAGE};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::Duration;
use tag::{Operation, Tag};
use tch::Kind;

/// Where rank 0 publishes its memory.
const KEY: &str = "dp-vs-ddp/shm";

/// How often a waiting rank looks whether those it waits for still live.
const LIVENESS: Duration = Duration::from_millis(50);

/// Who a rank is, and how long it is patient.
#[derive(Debug, Clone)]
pub struct Member {
    /// From 0.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// The longest any wait may take.
    pub deadline: Duration,
    /// Card that is charged for this rank's buffers and waits.
    pub meter: Option<(Arc<Meter>, usize)>,
}

/// Ranks of one host over a memfd.
#[derive(Debug)]
pub struct Shm {
    member: Member,
    control: Arc<Control>,
    peers: Vec<Peer>,
    /// Collectives called so far.
    calls: u64,
    /// Meetings arrived at so far.
    meetings: u64,
    /// Rounds of exchanges so far: which outbox is in use.
    rounds: u64,
    /// Collectives that this rank asked its card for so far.
    issued: u64,
    allocations: usize,
}

/// What this rank knows about another's process.
#[derive(Debug)]
enum Peer {
    /// Not asked yet.
    Unknown,
    /// Readable once the process has ended, also while nobody has collected its status.
    Watched(OwnedFd),
    /// A thread of this process, or a kernel that cannot tell: its slot and the deadline must do.
    Unwatched,
}

impl Shm {
    /// Joins the group, and returns once all ranks have: the rendezvous may go then. Rank 0 makes the
    /// group; the others wait for rank 0 as long as the rendezvous does.
    pub fn connect(member: Member, rendezvous: &dyn Rendezvous) -> Result<Self> {
        let mut shm = Self::enter(member, rendezvous)?;
        shm.meet(Tag::plain(Operation::Join))?;
        Ok(shm)
    }

    fn enter(member: Member, rendezvous: &dyn Rendezvous) -> Result<Self> {
        if member.rank >= member.world_size {
            let what = format!("rank {} does not exist in a group of {}", member.rank, member.world_size);
            return Err(Error::usage(what).hint("RANK goes from 0 to WORLD_SIZE - 1"));
        }
        let control = if member.rank == 0 {
            let control = Control::create(member.world_size)?;
            rendezvous.publish(KEY, control.path().to_string_lossy().as_bytes())?;
            control
        } else {
            let path = rendezvous.fetch(KEY)?;
            Control::open(Path::new(&*String::from_utf8_lossy(&path)), member.world_size)?
        };
        Self::join(member, control)
    }

    /// A group whose ranks are threads of this process, by rank.
    pub fn threads(world_size: usize, deadline: Duration) -> Result<Vec<Self>> {
        let board = Board::new(deadline);
        (0..world_size)
            .map(|rank| Self::enter(Member { rank, world_size, deadline, meter: None }, &board))
            .collect()
    }

    fn join(member: Member, control: Control) -> Result<Self> {
        let pid = rustix::process::getpid().as_raw_nonzero().get() as u32;
        let slot = &control.slots()[member.rank];
        if let Err(other) = slot.pid.compare_exchange(0, pid, AcqRel, Acquire) {
            return Err(Error::usage(format!("rank {} is taken by process {other}", member.rank))
                .hint("give every process its own RANK"));
        }
        let peers = (0..member.world_size).map(|_| Peer::Unknown).collect();
        Ok(Self {
            member,
            control: Arc::new(control),
            peers,
            calls: 0,
            meetings: 0,
            rounds: 0,
            issued: 0,
            allocations: 0,
        })
    }

    /// Starts the next collective: its number, and an error if the group is stopped.
    fn call(&mut self, tag: Tag) -> Result<Tag> {
        match self.control.reason(self.member.rank) {
            Some(reason) => Err(reason),
            None => {
                self.calls += 1;
                Ok(Tag { number: self.calls, ..tag })
            }
        }
    }

    /// Returns when all ranks are here with the same tag. See Note [Meetings].
    fn meet(&mut self, tag: Tag) -> Result<()> {
        self.meetings += 1;
        let meeting = self.meetings;
        let slot = &self.control.slots()[self.member.rank];
        slot.set_tag(tag);
        slot.arrived.store(meeting, Release);
        let gate = self.control.gate();
        if gate.arrived.fetch_add(1, AcqRel) + 1 < self.member.world_size as u32 {
            return if gate.met.load(Acquire) == meeting as u32 { Ok(()) } else { self.wait(meeting, tag) };
        }
        let tags: Vec<Tag> = self.control.slots().iter().map(control::Slot::tag).collect();
        if let Some(disagreement) = tag::disagreement(&tags) {
            return Err(self.stop(None, ErrorKind::Worker, &disagreement));
        }
        // Nobody can arrive at the next meeting before the gate opens, so the count is ours to reset.
        gate.arrived.store(0, Relaxed);
        wait::signal(&gate.met, |met| met.store(meeting as u32, Relaxed));
        Ok(())
    }

    #[cold]
    fn wait(&mut self, meeting: u64, tag: Tag) -> Result<()> {
        let start = Nanos::now();
        loop {
            let waited = Duration::from_nanos(Nanos::now().since(start).0);
            let waiter = Waiter {
                meter: self.member.meter.as_ref().map(|(meter, card)| meter.card(*card)),
                abort: Some(self.control.abort_flag()),
                deadline: LIVENESS.min(self.member.deadline.saturating_sub(waited)),
            };
            // Equality, not order: the gate cannot open again before this rank has gone through.
            match waiter.wait(&self.control.gate().met, |met| met == meeting as u32) {
                Ok(()) => return Ok(()),
                Err(Ended::Aborted) => {
                    let unsaid = || Error::new(ErrorKind::Worker, "the group was stopped");
                    return Err(self.control.reason(self.member.rank).unwrap_or_else(unsaid));
                }
                Err(Ended::Deadline) => self.check_peers(meeting, tag, start)?,
            }
        }
    }

    /// An error, which stops the group, if a rank that this one waits for is gone or late.
    fn check_peers(&mut self, meeting: u64, tag: Tag, start: Nanos) -> Result<()> {
        let control = Arc::clone(&self.control);
        let late = |rank: &usize| control.slots()[*rank].arrived.load(Acquire) < meeting;
        let waited_for: Vec<usize> = (0..self.member.world_size).filter(late).collect();
        for rank in &waited_for {
            let slot = &control.slots()[*rank];
            let pid = slot.pid.load(Acquire);
            let gone = if slot.left.load(Acquire) != 0 {
                "has left"
            } else if pid != 0 && self.peers[*rank].is_gone(pid) {
                "died"
            } else {
                continue;
            };
            // It may have arrived, finished and left since: then the gate is open.
            if control.gate().met.load(Acquire) == meeting as u32 {
                return Ok(());
            }
            let what = format!("rank {rank} (process {pid}) {gone} before collective {}: {tag}", tag.number);
            return Err(self.stop(None, ErrorKind::Worker, &what));
        }
        let waited = Duration::from_nanos(Nanos::now().since(start).0);
        if waited < self.member.deadline || waited_for.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = waited_for
            .iter()
            .map(|rank| {
                let slot = &control.slots()[*rank];
                match (slot.pid.load(Acquire), slot.tag().number) {
                    (0, _) => format!("rank {rank} (never joined)"),
                    (pid, 0) => format!("rank {rank} (process {pid}, no collective yet)"),
                    (pid, number) => format!("rank {rank} (process {pid}, last seen at collective {number})"),
                }
            })
            .collect();
        let what = format!(
            "{} had not arrived at collective {} ({tag}) after {:.1} s",
            names.join(", "),
            tag.number,
            waited.as_secs_f64()
        );
        Err(self.stop(None, ErrorKind::Timeout, &what))
    }

    /// Stops the group, and gives the error that stands: the first one.
    fn stop(&self, rank: Option<usize>, kind: ErrorKind, reason: &str) -> Error {
        self.control.abort(rank, kind, reason);
        self.control.reason(self.member.rank).unwrap_or_else(|| Error::new(kind, reason))
    }

    fn region<'a>(&self, buffer: &'a Buffer) -> Result<&'a Region> {
        let region = buffer.region.as_deref().filter(|region| region.belongs_to(&self.control));
        region.ok_or_else(|| {
            Error::usage(format!("rank {}: buffer {} is not of this group", self.member.rank, buffer.id))
                .hint("allocate buffers with the collective that reduces them")
        })
    }

    /// One exchange under a tag. Messages longer than an outbox travel in rounds.
    fn swap(&mut self, tag: Tag, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut messages = vec![Vec::new(); self.member.world_size];
        for piece in 0.. {
            self.rounds += 1;
            let from = (piece * MESSAGE).min(bytes.len());
            let to = (from + MESSAGE).min(bytes.len());
            self.control.slots()[self.member.rank].put(self.rounds, bytes.len(), &bytes[from..to]);
            self.meet(tag)?;
            // No second meeting: the next round uses the other outbox, and the one after that cannot start
            // before this rank has been at the next.
            let mut more = false;
            for (slot, message) in self.control.slots().iter().zip(&mut messages) {
                let total = slot.take(self.rounds, message);
                more |= message.len() < total;
            }
            if !more {
                break;
            }
        }
        Ok(messages)
    }
}

impl Peer {
    /// Whether the process is known to have ended.
    fn is_gone(&mut self, pid: u32) -> bool {
        if matches!(self, Self::Unknown) {
            let Some(process) = rustix::process::Pid::from_raw(pid as i32) else { return false };
            *self = if process == rustix::process::getpid() {
                Self::Unwatched
            } else {
                match rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty()) {
                    Ok(fd) => Self::Watched(fd),
                    Err(rustix::io::Errno::SRCH) => return true,
                    Err(_) => Self::Unwatched,
                }
            };
        }
        let Self::Watched(fd) = self else { return false };
        let mut poll = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ended| ended > 0)
    }
}

impl Collective for Shm {
    fn rank(&self) -> usize {
        self.member.rank
    }

    fn world_size(&self) -> usize {
        self.member.world_size
    }

    fn name(&self) -> &'static str {
        "shm"
    }

    fn allocate(&mut self, len: usize, kind: Kind) -> Result<Buffer> {
        if !tag::travels(kind) {
            return Err(Error::usage(format!("rank {}: cannot share {kind:?}", self.member.rank))
                .hint("use a float, integer or bool type"));
        }
        let tag = self.call(Tag { len: len as u64, kind, ..Tag::plain(Operation::Allocate) })?;
        let world_size = self.member.world_size;
        // Rank 0 may run out of memory: its peers must hear of it, not wait.
        let made = if self.member.rank == 0 { Some(Region::create(len, kind, world_size)) } else { None };
        let answer = match &made {
            Some(Ok(memory)) => memory.path().to_string_lossy().into_owned().into_bytes(),
            _ => Vec::new(),
        };
        let answers = self.swap(tag, &answer)?;
        let memory = match made {
            Some(made) => made.map_err(|error| self.fail(error))?,
            None => {
                let path = PathBuf::from(String::from_utf8_lossy(&answers[0]).into_owned());
                if path.as_os_str().is_empty() {
                    // Rank 0 stops the group with what it ran into; this rank learns it here.
                    return Err(self
                        .meet(Tag { meeting: 1, ..tag })
                        .err()
                        .unwrap_or_else(|| Error::new(ErrorKind::Worker, "rank 0 could not allocate")));
                }
                SharedMemory::open(&path).map_err(|error| self.fail(error))?
            }
        };
        // Until all have opened it, rank 0 must not drop it.
        self.meet(Tag { meeting: 1, ..tag })?;
        let region = Region::over(memory, len, kind, &self.control, self.member.meter.clone())?;
        let tensor = region.tensor(self.member.rank)?;
        let id = self.allocations;
        self.allocations += 1;
        Ok(Buffer { tensor, id, len, kind, region: Some(Arc::new(region)) })
    }

    fn all_reduce(&mut self, buffer: &Buffer) -> Result<()> {
        let region = self.region(buffer)?;
        region.can_sum()?;
        let tag = Tag {
            len: region.len as u64,
            kind: region.kind,
            buffer: buffer.id as u32,
            ..Tag::plain(Operation::AllReduce)
        };
        let tag = self.call(tag)?;
        self.meet(tag)?;
        // SAFETY: Note [Meetings]: every rank is inside this very call for this very region.
        unsafe { region.sum(self.member.rank) };
        self.meet(Tag { meeting: 1, ..tag })
    }

    fn broadcast(&mut self, buffer: &Buffer, root: usize) -> Result<()> {
        let region = self.region(buffer)?;
        if root >= self.member.world_size {
            return Err(Error::usage(format!(
                "there is no rank {root} in a group of {}",
                self.member.world_size
            )));
        }
        let tag = Tag {
            len: region.len as u64,
            kind: region.kind,
            buffer: buffer.id as u32,
            root: root as u32,
            ..Tag::plain(Operation::Broadcast)
        };
        let tag = self.call(tag)?;
        self.meet(tag)?;
        // SAFETY: Note [Meetings]: every rank is inside this call, the root's copy is only read, and this
        // rank's own is written by nobody else.
        unsafe { region.copy_over(root, self.member.rank) };
        self.meet(Tag { meeting: 1, ..tag })
    }

    fn exchange(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let tag = self.call(Tag::plain(Operation::Exchange))?;
        self.swap(tag, bytes)
    }

    fn barrier(&mut self) -> Result<()> {
        let tag = self.call(Tag::plain(Operation::Barrier))?;
        self.meet(tag)
    }

    fn abort_handle(&self) -> Abort {
        let control = Arc::clone(&self.control);
        let rank = self.member.rank;
        Abort(Arc::new(move |reason| control.abort(Some(rank), ErrorKind::Worker, reason)))
    }

    fn deadline(&self) -> Duration {
        self.member.deadline
    }
}

impl Shm {
    /// Stops the group because of an error of this rank alone, which it still reports itself.
    fn fail(&self, error: Error) -> Error {
        self.control.abort(Some(self.member.rank), ErrorKind::Worker, &error.to_string());
        error
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.control.slots()[self.member.rank].left.store(1, Release);
    }
}

#[cfg(test)]
mod tests;
