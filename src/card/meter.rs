//! Shared counters of the cards of one run: written by the threads that work for a card, read by the
//! sampler in the parent, never stopping anybody.
//!
//! Memory of a memfd: it has no name, so nothing is left behind when a process is killed.

#![allow(unsafe_code)]

use super::SharedMemory;
use crate::error::Kind;
use crate::{Error, Result};
use std::mem::size_of;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

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

impl CardMeter {
    /// Counts a block in, and raises the peak.
    pub fn allocated(&self, bytes: u64) {
        let live = self.live_bytes.fetch_add(bytes, Relaxed) + bytes;
        self.peak_bytes.fetch_max(live, Relaxed);
    }

    /// Counts a block out.
    pub fn freed(&self, bytes: u64) {
        self.live_bytes.fetch_sub(bytes, Relaxed);
    }
}

/// The counters of all cards, mapped: one [`CardMeter`] after another, nothing else.
#[derive(Debug)]
pub struct Meter {
    memory: SharedMemory,
}

impl Meter {
    /// Makes counters for this many cards, all zero.
    pub fn create(cards: usize) -> Result<Self> {
        Ok(Self { memory: SharedMemory::create("dp-vs-ddp meter", cards * size_of::<CardMeter>())? })
    }

    /// Maps counters that another process made: a path as in `/proc/PID/fd/N`.
    pub fn open(path: &std::path::Path) -> Result<Self> {
        let memory = SharedMemory::open(path)?;
        if !memory.len().is_multiple_of(size_of::<CardMeter>()) {
            let what = format!(
                "`{}` holds {} bytes, which is no whole number of card counters ({} bytes each)",
                path.display(),
                memory.len(),
                size_of::<CardMeter>()
            );
            return Err(Error::new(Kind::Corrupt, what)
                .hint("parent and worker must be the same build: run them from one binary"));
        }
        Ok(Self { memory })
    }

    /// Where another process of this user finds it, while this process lives.
    pub fn path(&self) -> std::path::PathBuf {
        self.memory.path()
    }

    /// The descriptor behind it.
    pub fn fd(&self) -> &OwnedFd {
        self.memory.fd()
    }

    /// Number of cards.
    pub fn len(&self) -> usize {
        self.memory.len() / size_of::<CardMeter>()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All counters, by card.
    pub fn cards(&self) -> &[CardMeter] {
        // SAFETY: the mapping is page-aligned, holds `len` counters, lives as long as `self`, and is only
        // ever reached through atomics, for which zeroed memory is valid.
        unsafe { std::slice::from_raw_parts(self.memory.start().as_ptr().cast(), self.len()) }
    }

    /// One card's counters. Panics on a card that is not there, as slices do.
    pub fn card(&self, index: usize) -> &CardMeter {
        &self.cards()[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_start_at_zero_and_are_shared() {
        let parent = Meter::create(3).unwrap();
        let worker = Meter::open(&parent.path()).unwrap();
        assert_eq!((parent.len(), worker.len()), (3, 3));
        worker.card(2).live_bytes.fetch_add(4096, Relaxed);
        assert_eq!(parent.card(2).live_bytes.load(Relaxed), 4096);
        assert_eq!(parent.card(1).live_bytes.load(Relaxed), 0);
    }

    #[test]
    fn cards_do_not_share_a_cache_line() {
        let meter = Meter::create(2).unwrap();
        let distance = std::ptr::from_ref(meter.card(1)).addr() - std::ptr::from_ref(meter.card(0)).addr();
        assert!(distance >= 128, "{distance}");
    }

    #[test]
    fn a_wrong_size_is_refused() {
        let other = SharedMemory::create("test", 100).unwrap();
        let error = Meter::open(&other.path()).unwrap_err();
        assert!(error.to_string().contains("100 bytes"), "{error}");
    }
}
