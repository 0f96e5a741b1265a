//! The one wait primitive: spin a little, then sleep in a futex, never past a deadline.
//!
//! Both engines wait here and nowhere else, with the same spin budget, so that neither is charged
//! less for idling. Time spent waiting, and CPU burnt while spinning, go to the waiting card's meter:
//! waiting is not work. Works across threads and across processes on shared memory.

use crate::card::CardMeter;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Why a wait ended without its condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The deadline passed.
    Deadline,
    /// Somebody raised the abort flag.
    Aborted,
}

/// Who is charged for waiting, and for how long waits may last.
#[derive(Debug, Clone, Copy)]
pub struct Waiter<'a> {
    /// Counters of the waiting card; `None` charges nobody.
    pub meter: Option<&'a CardMeter>,
    /// Non-zero means: stop waiting.
    pub abort: Option<&'a AtomicU32>,
    /// Longest wait.
    pub deadline: Duration,
}

impl Waiter<'_> {
    /// Returns once `ready(word)` holds. `word` must be changed through [`signal`].
    pub fn wait(&self, word: &AtomicU32, ready: impl Fn(u32) -> bool) -> Result<(), Ended> {
        let _ = (word, ready);
        todo!()
    }
}

/// Changes `word` (release order) and wakes whoever waits on it.
pub fn signal(word: &AtomicU32, change: impl FnOnce(&AtomicU32)) {
    let _ = (word, change);
    todo!()
}
