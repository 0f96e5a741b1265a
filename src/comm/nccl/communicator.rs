//! One NCCL communicator: made without blocking, asked without blocking, aborted or destroyed once.

#![allow(unsafe_code)]

use super::library::{last_words, library, words};
use crate::card::cuda::Stream;
use crate::comm::Reduction;
use crate::error::{Error, Kind, Result};
use crate::units::Nanos;
use cudarc::nccl::sys;
use std::mem::ManuallyDrop;
use std::time::Duration;
use tch::Tensor;

/// Bytes of a unique id, by which ranks find each other.
pub(super) const ID_BYTES: usize = 128;

const SUCCESS: u32 = 0;
const IN_PROGRESS: u32 = 7;

/// NCCL's mark of a setting that is left to it.
const UNDEFINED: i32 = i32::MIN;
/// What every `ncclConfig_t` begins with.
const MAGIC: u32 = 0xcafe_beef;

/// A fresh unique id.
pub(super) fn unique_id() -> Result<[u8; ID_BYTES]> {
    library()?;
    let mut id = sys::ncclUniqueId { internal: [0; ID_BYTES] };
    // SAFETY: `id` outlives the call.
    check("ncclGetUniqueId", unsafe { sys::ncclGetUniqueId(&mut id) } as u32)?;
    Ok(id.internal.map(|byte| byte as u8))
}

/// A rank of a group, in the card that was current when it was made. Used by one thread at a time.
#[derive(Debug)]
pub(super) struct Communicator {
    raw: sys::ncclComm_t,
}

// SAFETY: NCCL lets a communicator move between threads, as long as one at a time uses it.
unsafe impl Send for Communicator {}

/// What is asked again and again while NCCL goes on behind the caller's back: whether to stop waiting.
pub(super) type Patience<'a> = &'a mut dyn FnMut(Duration) -> Result<()>;

impl Communicator {
    /// Joins a group, and returns once all ranks have, or `patience` ends.
    pub(super) fn join(
        rank: usize,
        world_size: usize,
        id: &[u8; ID_BYTES],
        patience: Patience<'_>,
    ) -> Result<Self> {
        let mut config = sys::ncclConfig_t {
            size: size_of::<sys::ncclConfig_t>(),
            magic: MAGIC,
            version: library()?.code.unsigned_abs(),
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
            trafficClass: UNDEFINED,
            commName: std::ptr::null(),
            collnetEnable: UNDEFINED,
            CTAPolicy: UNDEFINED,
            shrinkShare: UNDEFINED,
            nvlsCTAs: UNDEFINED,
        };
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as std::ffi::c_char) };
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` and `config` outlive the call; NCCL copies what it keeps.
        let result =
            unsafe { sys::ncclCommInitRankConfig(&mut raw, world_size as i32, id, rank as i32, &mut config) }
                as u32;
        let mut this = Self { raw };
        match this.settle("ncclCommInitRankConfig", result, patience) {
            Ok(()) => Ok(this),
            Err(error) => {
                this.abort();
                Err(error)
            }
        }
    }

    /// Asks for the mean, or the sum, of all ranks' tensors, in place.
    pub(super) fn all_reduce(
        &mut self,
        tensor: &Tensor,
        reduction: Reduction,
        stream: &Stream,
        patience: Patience<'_>,
    ) -> Result<()> {
        let (data, len, kind) = parts(tensor)?;
        let operation = match reduction {
            Reduction::Mean => sys::ncclRedOp_t::ncclAvg,
            Reduction::Sum => sys::ncclRedOp_t::ncclSum,
        };
        // SAFETY: the tensor's memory stays until its stream has come past this: buffers outlive the group.
        let result =
            unsafe { sys::ncclAllReduce(data, data, len, kind, operation, self.raw, stream.as_raw().cast()) }
                as u32;
        self.settle("ncclAllReduce", result, patience)
    }

    /// Asks for `root`'s tensor on all ranks, in place.
    pub(super) fn broadcast(
        &mut self,
        tensor: &Tensor,
        root: usize,
        stream: &Stream,
        patience: Patience<'_>,
    ) -> Result<()> {
        let (data, len, kind) = parts(tensor)?;
        // SAFETY: as above.
        let result = unsafe {
            sys::ncclBroadcast(data, data, len, kind, root as i32, self.raw, stream.as_raw().cast())
        } as u32;
        self.settle("ncclBroadcast", result, patience)
    }

    /// What went wrong behind the callers' backs, if anything did.
    pub(super) fn health(&self) -> Result<()> {
        match self.state()? {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(failed("a collective", code)),
        }
    }

    /// Ends it where ranks may be hanging: frees the card's part of it.
    pub(super) fn abort(self) {
        let this = ManuallyDrop::new(self);
        if !this.raw.is_null() {
            // SAFETY: made by `join`; given up here, so that nothing uses it again.
            let _ = unsafe { sys::ncclCommAbort(this.raw) };
        }
    }

    /// Ends it where all ranks are content.
    pub(super) fn destroy(mut self, patience: Patience<'_>) -> Result<()> {
        // SAFETY: made by `join`.
        let result = unsafe { sys::ncclCommFinalize(self.raw) } as u32;
        match self.settle("ncclCommFinalize", result, patience) {
            Ok(()) => {
                let this = ManuallyDrop::new(self);
                // SAFETY: finalised; given up here, so that nothing uses it again.
                check("ncclCommDestroy", unsafe { sys::ncclCommDestroy(this.raw) } as u32)
            }
            Err(error) => {
                self.abort();
                Err(error)
            }
        }
    }

    fn state(&self) -> Result<u32> {
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: `state` outlives the call.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.raw, &mut state) } as u32;
        check("ncclCommGetAsyncError", asked)?;
        Ok(state as u32)
    }

    /// Waits until NCCL has taken in what it was asked for: only then is it in the stream.
    fn settle(&mut self, call: &str, result: u32, patience: Patience<'_>) -> Result<()> {
        let start = Nanos::now();
        let mut state = result;
        loop {
            match state {
                SUCCESS => return Ok(()),
                IN_PROGRESS => {
                    let waited = Duration::from_nanos(Nanos::now().since(start).0);
                    patience(waited)?;
                    if waited > Duration::from_millis(1) {
                        std::thread::sleep(Duration::from_micros(100));
                    } else {
                        std::thread::yield_now();
                    }
                    state = self.state()?;
                }
                code => return Err(failed(call, code)),
            }
        }
    }
}

impl Drop for Communicator {
    /// A communicator that nobody ended belongs to a group that failed.
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by `join`, and neither aborted nor destroyed: those two forget this value.
            let _ = unsafe { sys::ncclCommAbort(self.raw) };
        }
    }
}

/// Where a tensor's elements lie, how many, and of which type.
pub(super) fn parts(tensor: &Tensor) -> Result<(*mut std::ffi::c_void, usize, sys::ncclDataType_t)> {
    use sys::ncclDataType_t::*;
    use tch::Kind::*;
    let kind = match tensor.kind() {
        Float => ncclFloat32,
        Double => ncclFloat64,
        Half => ncclFloat16,
        BFloat16 => ncclBfloat16,
        Int => ncclInt32,
        Int64 => ncclInt64,
        Uint8 | Bool => ncclUint8,
        Int8 => ncclInt8,
        other => {
            return Err(
                Error::usage(format!("NCCL cannot send {other:?}")).hint("use a float or integer type")
            );
        }
    };
    if !tensor.is_contiguous() {
        return Err(Error::usage("NCCL needs tensors whose elements lie side by side"));
    }
    Ok((tensor.data_ptr(), tensor.numel(), kind))
}

pub(super) fn check(call: &str, code: u32) -> Result<()> {
    if code == SUCCESS { Ok(()) } else { Err(failed(call, code)) }
}

fn failed(call: &str, code: u32) -> Error {
    let what = match last_words() {
        Some(more) => format!("{call} failed: {}: {more}", words(code)),
        None => format!("{call} failed: {}", words(code)),
    };
    Error::new(Kind::Worker, what).hint("run again with NCCL_DEBUG=WARN, which makes NCCL tell more")
}
