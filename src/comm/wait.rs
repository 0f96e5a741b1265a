//! The one wait primitive: spin a little, then sleep in a futex, never past a deadline.
//!
//! Both engines wait here and nowhere else, with the same spin budget, so that neither is charged
//! less for idling. Time spent waiting, and CPU burnt while spinning, go to the waiting card's meter:
//! waiting is not work. Works across threads and across processes on shared memory.

use crate::card::CardMeter;
use crate::units::Nanos;
use rustix::thread::futex;
use std::cell::Cell;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, fence};
use std::time::Duration;

/// The longest a wait spins: about what a futex sleep and wake-up cost.
const MOST_SPIN: Nanos = Nanos(20_000);

/// The longest a wait sleeps before it looks at the abort flag and the clock again, and charges the
/// meter: short enough that an abort is seen at once by a person, long enough to cost nothing.
const SLICE: Nanos = Nanos(10_000_000);

thread_local! {
    /// How long this thread spins next time. Follows what spinning brought: halves when a wait was so
    /// long that spinning was for nothing (cores shared with the thread that is waited for, or uneven
    /// work), doubles when it was short.
    static SPIN: Cell<Nanos> = const { Cell::new(MOST_SPIN) };
}

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
    ///
    /// What was written before the signal is visible after the wait. A wait whose condition holds
    /// already costs one load: no clock, no system call, and it succeeds even after an abort.
    pub fn wait(&self, word: &AtomicU32, ready: impl Fn(u32) -> bool) -> Result<(), Ended> {
        if ready(word.load(Acquire)) { Ok(()) } else { self.wait_slowly(word, &ready) }
    }

    #[cold]
    fn wait_slowly(&self, word: &AtomicU32, ready: &dyn Fn(u32) -> bool) -> Result<(), Ended> {
        let mut charge = Charge::start(self.meter);
        let start = charge.wall;
        let spin = SPIN.get();
        let ended = match self.spin(word, ready, start, spin) {
            Some(ended) => ended,
            None => self.sleep(word, ready, start, &mut charge),
        };
        let waited = charge.settle().since(start);
        SPIN.set(next_spin(spin, waited));
        ended
    }

    /// `None` when the budget ran out with nothing decided.
    fn spin(
        &self,
        word: &AtomicU32,
        ready: &dyn Fn(u32) -> bool,
        start: Nanos,
        budget: Nanos,
    ) -> Option<Result<(), Ended>> {
        loop {
            for _ in 0..32 {
                if ready(word.load(Acquire)) {
                    return Some(Ok(()));
                }
                std::hint::spin_loop();
            }
            if self.aborted() {
                return Some(Err(Ended::Aborted));
            }
            if Nanos::now().since(start) >= budget {
                return None;
            }
        }
    }

    fn sleep(
        &self,
        word: &AtomicU32,
        ready: &dyn Fn(u32) -> bool,
        start: Nanos,
        charge: &mut Charge<'_>,
    ) -> Result<(), Ended> {
        let deadline = Nanos(u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX));
        loop {
            let seen = word.load(Acquire);
            if ready(seen) {
                return Ok(());
            }
            if self.aborted() {
                return Err(Ended::Aborted);
            }
            let waited = charge.settle().since(start);
            if waited >= deadline {
                return Err(Ended::Deadline);
            }
            let slice = SLICE.0.min(deadline.0 - waited.0);
            let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: slice as _ };
            // The kernel sleeps only while the word is still `seen`: a signal between the load above and
            // this call cannot be lost. Not PRIVATE: the word may be in memory of several processes.
            match futex::wait(word, futex::Flags::empty(), seen, Some(&timeout)) {
                Ok(()) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::TIMEDOUT) => {}
                // A sandbox without futexes: poll, without taking the core from those who work.
                Err(_) => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }

    fn aborted(&self) -> bool {
        self.abort.is_some_and(|flag| flag.load(Acquire) != 0)
    }
}

/// Changes `word` (release order) and wakes whoever waits on it.
pub fn signal(word: &AtomicU32, change: impl FnOnce(&AtomicU32)) {
    // Whatever order `change` uses, writes before it are seen by whoever sees the new value.
    fence(Release);
    change(word);
    wake(word);
}

/// Makes whoever sleeps on `word` look again, without changing it: for an abort flag beside it.
pub fn wake(word: &AtomicU32) {
    // The woken may have freed the word already; the kernel then finds no waiters, which is fine.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// What a thread spins next, after spinning for at most `spin` in a wait that took `waited`. Pure.
fn next_spin(spin: Nanos, waited: Nanos) -> Nanos {
    // Twice: a sleep that a slightly longer spin would have saved includes the wake-up itself.
    if waited.0 <= 2 * MOST_SPIN.0 {
        Nanos((2 * spin.0).clamp(1_000, MOST_SPIN.0))
    } else {
        Nanos(spin.0 / 2)
    }
}

/// Time on its way to a meter.
struct Charge<'a> {
    meter: Option<&'a CardMeter>,
    wall: Nanos,
    cpu: Nanos,
}

impl<'a> Charge<'a> {
    fn start(meter: Option<&'a CardMeter>) -> Self {
        let cpu = if meter.is_some() { Nanos::thread_cpu() } else { Nanos::default() };
        Self { meter, wall: Nanos::now(), cpu }
    }

    /// Charges what has passed since the last call, and returns the time it is.
    fn settle(&mut self) -> Nanos {
        let now = Nanos::now();
        if let Some(meter) = self.meter {
            let cpu = Nanos::thread_cpu();
            meter.wait_wall_ns.fetch_add(now.since(self.wall).0, Relaxed);
            meter.wait_cpu_ns.fetch_add(cpu.since(self.cpu).0, Relaxed);
            self.cpu = cpu;
        }
        self.wall = now;
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::{Meter, SharedMemory};

    fn waiter(ms: u64) -> Waiter<'static> {
        Waiter { meter: None, abort: None, deadline: Duration::from_millis(ms) }
    }

    #[test]
    fn a_ready_word_returns_even_after_an_abort() {
        let abort = AtomicU32::new(1);
        let word = AtomicU32::new(5);
        let waiter = Waiter { abort: Some(&abort), ..waiter(0) };
        assert_eq!(waiter.wait(&word, |value| value == 5), Ok(()));
        assert_eq!(waiter.wait(&word, |value| value == 6), Err(Ended::Aborted));
    }

    #[test]
    fn a_wait_ends_at_its_deadline_and_is_charged() {
        let meter = Meter::create(1).unwrap();
        let word = AtomicU32::new(0);
        let start = Nanos::now();
        let ended = Waiter { meter: Some(meter.card(0)), ..waiter(60) }.wait(&word, |value| value == 1);
        let took = Nanos::now().since(start);
        assert_eq!(ended, Err(Ended::Deadline));
        assert!(took.as_ms() >= 60.0, "{took:?}");
        let wall = Nanos(meter.card(0).wait_wall_ns.load(Relaxed));
        assert!(wall.as_ms() >= 60.0 && wall <= took, "{wall:?} of {took:?}");
        // Sleeping burns next to nothing: that is what tells waiting from work.
        let cpu = Nanos(meter.card(0).wait_cpu_ns.load(Relaxed));
        assert!(cpu.0 > 0 && cpu.as_ms() < 20.0, "{cpu:?}");
    }

    #[test]
    fn a_raised_abort_ends_a_sleep_within_a_slice_or_at_once_when_woken() {
        let abort = AtomicU32::new(0);
        let word = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let start = Nanos::now();
                let ended = Waiter { abort: Some(&abort), ..waiter(20_000) }.wait(&word, |value| value == 1);
                (ended, Nanos::now().since(start))
            });
            std::thread::sleep(Duration::from_millis(30));
            abort.store(1, Release);
            wake(&word);
            let (ended, took) = waiting.join().unwrap();
            assert_eq!(ended, Err(Ended::Aborted));
            assert!(took.as_ms() < 2_000.0, "{took:?}");
        });
    }

    #[test]
    fn no_wake_up_is_lost_between_two_threads_over_one_memory() {
        const TURNS: u32 = 20_000;
        let made = SharedMemory::create("test", 4096).unwrap();
        let opened = SharedMemory::open(&made.path()).unwrap();
        // Two mappings of one word, as two processes have: only a shared futex wakes across them.
        let turn = |memory: &SharedMemory, mine: u32| {
            // SAFETY: the mapping is page-aligned, zeroed, large enough and alive for the whole test.
            #[expect(unsafe_code, reason = "a word in shared memory")]
            let word = unsafe { memory.start().cast::<AtomicU32>().as_ref() };
            for round in 0..TURNS {
                let expected = 2 * round + mine;
                waiter(10_000).wait(word, |value| value == expected).unwrap();
                signal(word, |word| word.store(expected + 1, Relaxed));
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| turn(&made, 0));
            turn(&opened, 1);
        });
    }

    #[test]
    fn the_spin_budget_follows_what_spinning_brought() {
        let long = Nanos(1_000_000);
        let short = Nanos(3_000);
        assert_eq!(next_spin(MOST_SPIN, long), Nanos(10_000));
        assert_eq!(next_spin(Nanos(1), long), Nanos(0));
        assert_eq!(next_spin(Nanos(0), short), Nanos(1_000));
        assert_eq!(next_spin(Nanos(15_000), short), MOST_SPIN);
    }
}
