//! What the ranks of one host share beside the data: who is there, where each is, why it ended.
//!
//! Atomics over shared memory and nothing else, so that any rank may die at any instruction without
//! leaving a lock behind. Decides nothing.

#![allow(unsafe_code)]

use super::tag::Tag;
use crate::card::SharedMemory;
use crate::comm::wait;
use crate::error::Kind;
use crate::{Error, Result};
use std::mem::{align_of, size_of};
use std::path::Path;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

/// Changes with the layout below, so that two builds never share a block.
const MAGIC: u64 = u64::from_le_bytes(*b"ddp-shm2");

/// Bytes of a message that travel in one round of an exchange.
pub(super) const MESSAGE: usize = 8 << 10;

/// Longest reason that is kept.
const REASON: usize = 2 << 10;

/// Nobody in particular stopped the group: the reason says it all.
const NO_RANK: u32 = u32::MAX;

#[repr(C, align(128))]
#[derive(Debug)]
struct Header {
    magic: AtomicU64,
    world_size: AtomicU64,
    /// 0, or 1 while the first to abort writes the reason, or 2 once it stands.
    abort: AtomicU32,
    abort_rank: AtomicU32,
    abort_kind: AtomicU32,
    reason_len: AtomicU32,
    reason: [AtomicU8; REASON],
    gate: Gate,
}

/// Where ranks meet. On a cache line pair of its own: everybody writes it.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Gate {
    /// Ranks that have arrived at the next meeting.
    pub(super) arrived: AtomicU32,
    /// Number of the last meeting that all have arrived at (low bits): the word that ranks wait on.
    pub(super) met: AtomicU32,
}

/// One rank's part.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Slot {
    /// Process; 0 before the rank has joined.
    pub(super) pid: AtomicU32,
    /// Non-zero once the rank has left.
    pub(super) left: AtomicU32,
    /// Number of the last meeting it arrived at.
    pub(super) arrived: AtomicU64,
    tag: [AtomicU64; Tag::WORDS],
    /// Number of the last collective it asked its card for; 0 for none.
    issued: AtomicU64,
    asked: [[AtomicU64; Tag::WORDS]; ASKED],
    outbox: [Outbox; 2],
}

/// How many of a rank's last requests to its card others can look at.
const ASKED: usize = 32;

/// A message on its way. Two a rank: a rank that reads one round's is never overtaken by the next.
#[repr(C)]
#[derive(Debug)]
struct Outbox {
    total: AtomicU64,
    bytes: [AtomicU8; MESSAGE],
}

impl Slot {
    /// Shows what the rank is about to do; read by others once it has arrived.
    pub(super) fn set_tag(&self, tag: Tag) {
        for (word, value) in self.tag.iter().zip(tag.encode()) {
            word.store(value, Relaxed);
        }
    }

    /// What the rank was about to do when it last arrived.
    pub(super) fn tag(&self) -> Tag {
        Tag::decode(std::array::from_fn(|i| self.tag[i].load(Relaxed)))
    }

    /// Shows what the rank asks its card for.
    pub(super) fn issue(&self, tag: Tag) {
        let place = &self.asked[tag.number as usize % ASKED];
        for (word, value) in place.iter().zip(tag.encode()) {
            word.store(value, Relaxed);
        }
        self.issued.store(tag.number, Release);
    }

    /// Number of the last collective it asked its card for; 0 for none.
    pub(super) fn issued(&self) -> u64 {
        self.issued.load(Acquire)
    }

    /// What its request of this number was; `None` if that is too long ago, or still to come.
    pub(super) fn request(&self, number: u64) -> Option<Tag> {
        let place = &self.asked[number as usize % ASKED];
        let tag = Tag::decode(std::array::from_fn(|i| place[i].load(Relaxed)));
        // Half the ring: the rank may be about to write over what is older.
        let known = number <= self.issued() && self.issued() < number + ASKED as u64 / 2;
        (known && tag.number == number).then_some(tag)
    }

    /// Puts at most [`MESSAGE`] bytes of a message of `total` bytes out, for exchange round `round`.
    pub(super) fn put(&self, round: u64, total: usize, bytes: &[u8]) {
        let outbox = &self.outbox[(round % 2) as usize];
        outbox.total.store(total as u64, Relaxed);
        for (cell, byte) in outbox.bytes.iter().zip(bytes) {
            cell.store(*byte, Relaxed);
        }
    }

    /// The whole length of the message whose piece is out, and appends the piece that starts at `message`'s end.
    pub(super) fn take(&self, round: u64, message: &mut Vec<u8>) -> usize {
        let outbox = &self.outbox[(round % 2) as usize];
        let total = outbox.total.load(Relaxed) as usize;
        let piece = total.saturating_sub(message.len()).min(MESSAGE);
        message.extend(outbox.bytes[..piece].iter().map(|cell| cell.load(Relaxed)));
        total
    }
}

/// The block, mapped.
#[derive(Debug)]
pub(super) struct Control {
    memory: SharedMemory,
    world_size: usize,
}

impl Control {
    const fn bytes(world_size: usize) -> usize {
        size_of::<Header>() + world_size * size_of::<Slot>()
    }

    /// A fresh one: rank 0 makes it.
    pub(super) fn create(world_size: usize) -> Result<Self> {
        let memory = SharedMemory::create("dp-vs-ddp control", Self::bytes(world_size))?;
        let control = Self { memory, world_size };
        control.header().world_size.store(world_size as u64, Relaxed);
        control.header().magic.store(MAGIC, Release);
        Ok(control)
    }

    /// What rank 0 made.
    pub(super) fn open(path: &Path, world_size: usize) -> Result<Self> {
        let memory = SharedMemory::open(path)?;
        let wrong = |what: String| {
            Err(Error::new(Kind::Corrupt, format!("rank 0's memory at `{}` {what}", path.display()))
                .hint("start all ranks from one build, with one WORLD_SIZE"))
        };
        if memory.len() < size_of::<Header>() {
            return wrong(format!("holds {} bytes, too few for a control block", memory.len()));
        }
        let control = Self { memory, world_size: 0 };
        if control.header().magic.load(Acquire) != MAGIC {
            return wrong("was laid out by another build".to_owned());
        }
        let theirs = control.header().world_size.load(Relaxed);
        if theirs != world_size as u64 || control.memory.len() != Self::bytes(world_size) {
            return wrong(format!("is for {theirs} ranks, this rank was told {world_size}"));
        }
        Ok(Self { world_size, ..control })
    }

    pub(super) fn path(&self) -> std::path::PathBuf {
        self.memory.path()
    }

    fn header(&self) -> &Header {
        const { assert!(align_of::<Header>() <= 4096) };
        // SAFETY: the mapping is page-aligned, at least a header long (both makers see to it), lives as
        // long as `self`, and a header is atomics only, for which any bytes are valid.
        unsafe { self.memory.start().cast::<Header>().as_ref() }
    }

    pub(super) fn slots(&self) -> &[Slot] {
        const { assert!(size_of::<Header>().is_multiple_of(align_of::<Slot>())) };
        // SAFETY: the slots follow the header, aligned (asserted) and inside the mapping, whose length
        // both makers tie to `world_size`; slots are atomics only.
        unsafe {
            let first = self.memory.start().as_ptr().add(size_of::<Header>());
            std::slice::from_raw_parts(first.cast(), self.world_size)
        }
    }

    pub(super) fn gate(&self) -> &Gate {
        &self.header().gate
    }

    /// The word that ends waits.
    pub(super) fn abort_flag(&self) -> &AtomicU32 {
        &self.header().abort
    }

    /// Stops the group unless it is stopped already; `rank` is who does, or `None` when `reason` already
    /// says whose fault it is.
    pub(super) fn abort(&self, rank: Option<usize>, kind: Kind, reason: &str) {
        let header = self.header();
        if header.abort.compare_exchange(0, 1, AcqRel, Relaxed).is_ok() {
            // A character cut in two is read back as a replacement mark.
            let end = reason.len().min(REASON);
            for (cell, byte) in header.reason.iter().zip(&reason.as_bytes()[..end]) {
                cell.store(*byte, Relaxed);
            }
            header.reason_len.store(end as u32, Relaxed);
            header.abort_rank.store(rank.map_or(NO_RANK, |rank| rank as u32), Relaxed);
            header.abort_kind.store(if kind == Kind::Timeout { 1 } else { 0 }, Relaxed);
            header.abort.store(2, Release);
        }
        wait::wake(&self.gate().met);
    }

    /// Why the group was stopped, as `rank` reports it; `None` while it was not.
    pub(super) fn reason(&self, rank: usize) -> Option<Error> {
        let header = self.header();
        let state = header.abort.load(Acquire);
        if state == 0 {
            return None;
        }
        // Between the flag and the text lie nanoseconds, unless the writer was killed just there.
        for _ in 0..1_000 {
            if header.abort.load(Acquire) == 2 {
                let len = (header.reason_len.load(Relaxed) as usize).min(REASON);
                let bytes: Vec<u8> = header.reason[..len].iter().map(|cell| cell.load(Relaxed)).collect();
                let reason = String::from_utf8_lossy(&bytes).into_owned();
                let by = header.abort_rank.load(Relaxed);
                let what = if by == NO_RANK || by as usize == rank {
                    reason
                } else {
                    format!("stopped by rank {by}: {reason}")
                };
                return Some(match header.abort_kind.load(Relaxed) {
                    1 => Error::new(Kind::Timeout, what)
                        .hint("look at what that rank was doing, or raise `run.deadline_s`"),
                    _ => Error::new(Kind::Worker, what),
                });
            }
            std::thread::yield_now();
        }
        Some(Error::new(Kind::Worker, "a rank stopped the group and died before it could say why"))
    }
}
