//! Streams and events of a card: what orders its work, and tells when it happened.
//!
//! The host never waits inside the driver: it asks, up to a deadline.

#![allow(unsafe_code)]

use super::Context;
use super::driver::{Fault, check};
use crate::error::{Error, Kind, Result};
use crate::units::Nanos;
use cudarc::driver::sys;
use std::sync::Arc;
use std::time::Duration;

const NOT_READY: u32 = 600;

/// Work of one card in order.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    /// Null is the context's legacy default stream.
    raw: sys::CUstream,
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; this value never changes.
unsafe impl Sync for Stream {}

impl Stream {
    /// The card's legacy default stream: where libtorch computes unless told otherwise.
    pub fn default_of(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), raw: std::ptr::null_mut() }
    }

    /// A stream of its own, with the highest priority there is, which does not wait for the default one:
    /// what it does overtakes computing that has not begun.
    pub fn urgent(context: &Arc<Context>) -> Result<Self> {
        const NON_BLOCKING: u32 = 1;
        let raw = context.within(|| {
            let (mut least, mut greatest) = (0, 0);
            // SAFETY: both outlive the call.
            check("cuCtxGetStreamPriorityRange", unsafe {
                sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest)
            })?;
            let mut raw = std::ptr::null_mut();
            // SAFETY: `raw` outlives the call.
            check("cuStreamCreateWithPriority", unsafe {
                sys::cuStreamCreateWithPriority(&mut raw, NON_BLOCKING, greatest)
            })?;
            Ok(raw)
        })?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// The card's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The driver's handle, for libraries that enqueue on it: null for the default stream of the context.
    pub fn as_raw(&self) -> *mut std::ffi::c_void {
        self.raw.cast()
    }

    /// What is enqueued from now on waits for `event`; the host does not.
    pub fn wait(&self, event: &Event) -> Result<()> {
        Ok(self.context.within(|| {
            // SAFETY: stream and event live as long as the borrows of them; the driver keeps what it needs.
            check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
        })?)
    }

    /// Marks the end of what was enqueued so far.
    pub fn record(&self, event: &Event) -> Result<()> {
        Ok(self.context.within(|| {
            // SAFETY: as above; both are of one context.
            check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, self.raw) })
        })?)
    }

    /// Copies `bytes` from the memory of card `from` to this stream's card.
    ///
    /// # Safety
    /// Both ranges are device memory of their cards and stay so until this stream has come past the copy.
    pub unsafe fn copy_from(
        &self,
        target: *mut u8,
        from: &Context,
        source: *const u8,
        bytes: usize,
    ) -> Result<()> {
        Ok(self.context.within(|| {
            // SAFETY: promised by the caller.
            check("cuMemcpyPeerAsync", unsafe {
                sys::cuMemcpyPeerAsync(
                    target as u64,
                    self.context.raw,
                    source as u64,
                    from.raw,
                    bytes,
                    self.raw,
                )
            })
        })?)
    }

    /// Waits until all that was enqueued is done, at most until the deadline.
    pub fn synchronize(&self, deadline: Duration) -> Result<()> {
        self.synchronize_unless(deadline, &mut || Ok(()))
    }

    /// As [`Self::synchronize`], but ends with the first error of `hopeless`, which is asked all the while.
    pub fn synchronize_unless(
        &self,
        deadline: Duration,
        hopeless: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let end = Event::new(&self.context, Timing::No)?;
        self.record(&end)?;
        end.synchronize_unless(deadline, hopeless)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by `urgent`, destroyed once; the driver finishes what is enqueued first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// Whether an event keeps the time: one that does not is cheaper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// It does.
    Yes,
    /// It only orders.
    No,
}

/// A moment in a stream.
#[derive(Debug)]
pub struct Event {
    /// Its context outlives it.
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; this value never changes.
unsafe impl Sync for Event {}

impl Event {
    /// One that has not been recorded: it counts as reached.
    pub fn new(context: &Arc<Context>, timing: Timing) -> Result<Self> {
        const DISABLE_TIMING: u32 = 2;
        let flags = if timing == Timing::Yes { 0 } else { DISABLE_TIMING };
        let raw = context.within(|| {
            let mut raw = std::ptr::null_mut();
            // SAFETY: `raw` outlives the call.
            check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
            Ok(raw)
        })?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// Whether the stream has come to it. An error of the card's earlier work comes out here.
    pub fn is_reached(&self) -> Result<bool> {
        let reached = self.context.within(|| {
            // SAFETY: the event lives as long as `self`.
            match check("cuEventQuery", unsafe { sys::cuEventQuery(self.raw) }) {
                Ok(()) => Ok(true),
                Err(Fault { code: Some(NOT_READY), .. }) => Ok(false),
                Err(fault) => Err(fault),
            }
        });
        reached.map_err(|fault| {
            let ordinal = self.context.ordinal();
            Error::new(Kind::Worker, format!("cuda:{ordinal}: {fault}"))
                .hint("the card's work failed: look for Xid errors in `dmesg`; CUDA_LAUNCH_BLOCKING=1 finds the place")
        })
    }

    /// Waits until the stream has come to it, at most until the deadline.
    pub fn synchronize(&self, deadline: Duration) -> Result<()> {
        self.synchronize_unless(deadline, &mut || Ok(()))
    }

    fn synchronize_unless(&self, deadline: Duration, hopeless: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let start = Nanos::now();
        loop {
            if self.is_reached()? {
                return Ok(());
            }
            hopeless()?;
            let waited = Nanos::now().since(start);
            if u128::from(waited.0) >= deadline.as_nanos() {
                return Err(Error::new(
                    Kind::Timeout,
                    format!(
                        "cuda:{}: the card has not finished its work in {:.1} s",
                        self.context.ordinal(),
                        deadline.as_secs_f64()
                    ),
                )
                .hint("a collective may wait for a rank that is gone; raise run.deadline_s if steps take that long"));
            }
            pause(waited);
        }
    }

    /// Time from `earlier` to this event, both reached, of one card, made with [`Timing::Yes`].
    pub fn since(&self, earlier: &Self) -> Result<Nanos> {
        let ms = self.context.within(|| {
            let mut ms = 0f32;
            // SAFETY: both events live as long as the borrows of them; `ms` outlives the call.
            check("cuEventElapsedTime", unsafe { sys::cuEventElapsedTime(&mut ms, earlier.raw, self.raw) })?;
            Ok(ms)
        })?;
        Ok(Nanos((f64::from(ms).max(0.0) * 1e6).round() as u64))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// Between two questions: the end of a step is seen at once, as it is what is measured; whoever waits longer than
/// a step may leave the core to others.
fn pause(waited: Nanos) {
    match waited.0 {
        0..50_000 => std::hint::spin_loop(),
        50_000..50_000_000 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(100)),
    }
}
