//! libtorch's CUDA half: loaded at run time where there is a driver, and asked for what tch does not offer.
//!
//! The link line drops libtorch_cuda, because programs must start on machines without a driver. Loaded
//! before the first tensor it registers itself, and `Device::Cuda` works. A scripted driver computes
//! nothing: with it, tensors stay in the host's memory, and all else goes its way as on real cards.

use super::shim;
use crate::card::cuda::{Context, Stream, driver};
use crate::error::{Error, Kind, Result};
use std::ffi::CStr;
use std::path::PathBuf;
use tch::{Device, Tensor};

/// Makes CUDA devices usable in this process. To be called before the first tensor.
pub fn load() -> Result<()> {
    if driver()?.scripted {
        return Ok(());
    }
    let name = c"libtorch_cuda.so";
    // SAFETY: runs the initialisers of libtorch's own library, which register its CUDA half.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        return Err(Error::new(
            Kind::Unavailable,
            format!("libtorch's CUDA half cannot be loaded: {}", last_error()),
        )
        .hint("this libtorch may be for CPUs only: run `./setup --full`, then build again"));
    }
    if tch::Cuda::is_available() {
        return Ok(());
    }
    Err(Error::new(Kind::Unavailable, "libtorch finds no CUDA device, though the driver has some")
        .hint("libtorch may be built for a newer CUDA than the driver: `dp-vs-ddp doctor` compares them"))
}

/// Whether libtorch_cuda is there to be loaded, and where it would come from. Loads nothing.
pub fn library() -> Option<PathBuf> {
    let cpu = super::loaded().ok()?.path?;
    Some(cpu.with_file_name("libtorch_cuda.so")).filter(|path| path.exists())
}

fn last_error() -> String {
    // SAFETY: the text belongs to this thread until its next call of these functions.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: not null, and ended by a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The device on which libtorch's tensors of `cuda:ordinal` live.
pub fn device(ordinal: usize) -> Result<Device> {
    Ok(if driver()?.scripted { Device::Cpu } else { Device::Cuda(ordinal) })
}

/// The device of `cuda:ordinal`, made the calling thread's own.
pub(super) fn enter(ordinal: usize) -> Result<Device> {
    if driver()?.scripted {
        return Ok(Device::Cpu);
    }
    let mut default_stream = false;
    // SAFETY: the flag outlives the call.
    unsafe { shim::check(shim::dvd_cuda_enter(ordinal as i64, &mut default_stream)) }?;
    if !default_stream {
        return Err(Error::new(
            Kind::Torch,
            format!("libtorch does not compute in the default stream of cuda:{ordinal}"),
        )
        .hint("events would not order its work; this is a fault of the program, please report it"));
    }
    Ok(Device::Cuda(ordinal))
}

/// The calling thread's tensor operations on `device` go to this stream from now on.
pub fn work_in(device: Device, stream: &Stream) -> Result<()> {
    let Device::Cuda(ordinal) = device else { return Ok(()) };
    // SAFETY: a stream of this device, which outlives the thread's use of it: its owner keeps both.
    unsafe { shim::check(shim::dvd_cuda_work_in(ordinal as i64, stream.as_raw())) }
}

/// Copies a tensor from another card, in `stream`, which is that of the target's card. Both must stay until
/// it has come past this.
pub fn copy(target: &Tensor, stream: &Stream, source: &Tensor, from: &Context) -> Result<()> {
    let same = target.numel() == source.numel() && target.kind() == source.kind();
    if !same || !target.is_contiguous() || !source.is_contiguous() {
        return Err(Error::usage(format!("cannot copy {source:?} between cards as {target:?}")));
    }
    let bytes = source.numel() * source.kind().elt_size_in_bytes();
    // SAFETY: both tensors are as long as is copied; that they stay is what callers see to.
    unsafe { stream.copy_from(target.data_ptr().cast(), from, source.data_ptr().cast(), bytes) }
}

/// Most bytes that tensors on `device` used at once since the last [`reset_peak`]; `None` for a host's memory.
pub fn peak_bytes(device: Device) -> Result<Option<u64>> {
    let Device::Cuda(ordinal) = device else { return Ok(None) };
    let (mut live, mut peak) = (0, 0);
    // SAFETY: both outlive the call.
    unsafe { shim::check(shim::dvd_cuda_memory(ordinal as i64, &mut live, &mut peak)) }?;
    Ok(Some(peak))
}

/// Starts a new peak at what is used now.
pub fn reset_peak(device: Device) -> Result<()> {
    let Device::Cuda(ordinal) = device else { return Ok(()) };
    // SAFETY: takes a number.
    unsafe { shim::check(shim::dvd_cuda_reset_peak(ordinal as i64)) }
}
