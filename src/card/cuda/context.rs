//! A card's primary context: the one that libtorch uses, too.

#![allow(unsafe_code)]

use super::driver::{Fault, check, driver};
use crate::Result;
use cudarc::driver::sys;
use std::sync::Arc;

/// A hold on the primary context of one card. Making the first one of a process opens the card.
#[derive(Debug)]
pub struct Context {
    ordinal: usize,
    pub(super) raw: sys::CUcontext,
}

// SAFETY: the driver's contexts may be used from any thread; which one is current is a thread's own affair.
unsafe impl Send for Context {}
// SAFETY: as above; this value never changes.
unsafe impl Sync for Context {}

impl Context {
    /// Opens `cuda:ordinal`, and makes it the calling thread's current one.
    pub fn open(ordinal: usize) -> Result<Arc<Self>> {
        driver()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` outlives the call; a number that is no card is refused.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, ordinal as i32) })
            .map_err(|fault| crate::Error::from(fault).context(format_args!("cuda:{ordinal}")))?;
        let context = Arc::new(Self { ordinal, raw });
        context.bind()?;
        Ok(context)
    }

    /// The `i` of `cuda:i`.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Makes it current in the calling thread, from now on.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`, which retains it.
        Ok(check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })?)
    }

    /// Bytes of the card that nobody uses; `None` where the driver does not say.
    pub fn free_bytes(&self) -> Option<u64> {
        let (mut free, mut total) = (0, 0);
        let told = self.within(|| {
            // SAFETY: both outlive the call.
            check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })
        });
        told.ok().map(|()| free as u64)
    }

    /// Lets this card read the memory of `peer` directly. That they cannot is no error: copies then go
    /// through the host.
    pub fn enable_peer(&self, peer: &Self) -> Result<bool> {
        const ALREADY: u32 = 704;
        const UNSUPPORTED: u32 = 217;
        let result = self.within(|| {
            // SAFETY: both contexts live as long as the borrows of them.
            check("cuCtxEnablePeerAccess", unsafe { sys::cuCtxEnablePeerAccess(peer.raw, 0) })
        });
        match result {
            Ok(()) => Ok(true),
            Err(fault) if fault.code == Some(ALREADY) => Ok(true),
            Err(fault) if fault.code == Some(UNSUPPORTED) => Ok(false),
            Err(fault) => Err(fault.into()),
        }
    }

    /// Runs `work` with this context current, and puts back what was: the thread may belong to another card.
    pub(super) fn within<T>(&self, work: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
        // SAFETY: the context lives as long as `self`.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.raw) })?;
        let result = work();
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed above; `popped` outlives the call.
        let put_back = check("cuCtxPopCurrent", unsafe { sys::cuCtxPopCurrent_v2(&mut popped) });
        let value = result?;
        put_back.map(|()| value)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `open`. A driver that is shutting down refuses, which is fine.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.ordinal as i32) };
    }
}
