//! Exact memory of a virtual card: an allocator round libtorch's CPU allocator that tags each block
//! with the card of the thread that asked for it, and counts on free.
//!
//! Bytes are those asked for: libtorch's own rounding, the 64-byte tag, and what libraries take with
//! malloc (oneDNN's scratch space) are not in them.

use super::shim::{self, Counters};
use crate::Result;
use crate::card::Meter;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Installs the counting allocator for the life of the process. Call it before the first tensor: what
/// was allocated earlier is never counted. A second call is an error.
pub fn install(meter: Arc<Meter>) -> Result<()> {
    let cards: Vec<Counters> = (0..meter.len())
        .map(|index| {
            let card = meter.card(index);
            Counters { live: &raw const card.live_bytes, peak: &raw const card.peak_bytes }
        })
        .collect();
    // SAFETY: the shim copies the list; the counters it points to stay mapped, as the leak below
    // keeps the meter for the life of the process.
    unsafe { shim::check(shim::dvd_memory_install(cards.as_ptr(), cards.len())) }?;
    std::mem::forget(meter);
    Ok(())
}

/// Blocks asked for by threads that never called [`set_thread_card`] belong to this card (0 until it
/// is called). Blocks of a card that the meter does not have are not counted.
pub fn set_process_card(card: usize) {
    // SAFETY: sets an atomic.
    unsafe { shim::dvd_memory_set_process_card(card as i64) };
}

/// Blocks asked for by this thread from now on belong to this card, whoever frees them. OpenMP's
/// helper threads allocate next to nothing and count for the process's card.
pub fn set_thread_card(card: usize) {
    // SAFETY: sets a thread-local number.
    unsafe { shim::dvd_memory_set_thread_card(card as i64) };
}

/// Starts a new peak at what is alive now.
pub fn reset_peak(meter: &Meter, card: usize) {
    let card = meter.card(card);
    restart(&card.live_bytes, &card.peak_bytes);
}

fn restart(live: &AtomicU64, peak: &AtomicU64) {
    peak.store(live.load(Ordering::Relaxed), Ordering::Relaxed);
    // Another thread may have allocated between the two, and its peak be overwritten.
    peak.fetch_max(live.load(Ordering::Relaxed), Ordering::Relaxed);
}
