//! Shared counters of the cards of one run: written by the threads that work for a card, read by the
//! sampler in the parent, never stopping anybody.
//!
//! Memory of a memfd: it has no name, so nothing is left behind when a process is killed.

use crate::Result;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;

/// One card's counters. All relaxed: they are statistics, nothing is ordered by them.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct CardMeter {
    /// Bytes alive in blocks tagged with this card.
    pub live_bytes: AtomicU64,
    /// Most bytes alive since the last reset.
    pub peak_bytes: AtomicU64,
    /// CPU time spent inside the wait primitive (spinning): on-CPU time that is not work.
    pub wait_cpu_ns: AtomicU64,
    /// Wall time spent inside the wait primitive.
    pub wait_wall_ns: AtomicU64,
    /// Steps finished.
    pub steps: AtomicU64,
}

/// The counters of all cards, mapped.
#[derive(Debug)]
pub struct Meter {
    // mapping + fd
    _todo: (),
}

impl Meter {
    /// Makes counters for this many cards, all zero.
    pub fn create(cards: usize) -> Result<Self> {
        let _ = cards;
        todo!()
    }

    /// Maps counters that another process made: a path as in `/proc/PID/fd/N`.
    pub fn open(path: &std::path::Path) -> Result<Self> {
        let _ = path;
        todo!()
    }

    /// Where another process of this user finds it, while this process lives.
    pub fn path(&self) -> std::path::PathBuf {
        todo!()
    }

    /// The descriptor behind it.
    pub fn fd(&self) -> &OwnedFd {
        todo!()
    }

    /// Number of cards.
    pub fn len(&self) -> usize {
        todo!()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One card's counters. Panics on a card that is not there, as slices do.
    pub fn card(&self, index: usize) -> &CardMeter {
        let _ = index;
        todo!()
    }
}
