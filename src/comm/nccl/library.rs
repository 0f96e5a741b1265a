//! The door to NCCL: loaded once, checked for every function that is used, never panicking.
//!
//! libtorch brings an NCCL of its own, and a process must not get a second one: that copy is opened first,
//! by its full path, and what cudarc then finds by name has to be it.

#![allow(unsafe_code)]

use crate::error::{Error, Kind, Result};
use crate::torch;
use cudarc::nccl::sys;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::sync::OnceLock;

const FUNCTIONS: &[&str] = &[
    "ncclGetVersion",
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommInitAll",
    "ncclCommGetAsyncError",
    "ncclCommAbort",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclAllReduce",
    "ncclBroadcast",
    "ncclReduce",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclGetErrorString",
    "ncclGetLastError",
];

/// The oldest whose communicators can be made without blocking: 2.14.
const OLDEST: i32 = 21400;

/// NCCL, loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// 10000 x major + 100 x minor + patch.
    pub code: i32,
}

impl Library {
    /// As in `2.28.9`.
    pub fn version(&self) -> String {
        format!("{}.{}.{}", self.code / 10000, self.code / 100 % 100, self.code % 100)
    }
}

/// NCCL, loaded at the first call; afterwards always the same answer.
pub fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<Result<Library, (String, &'static str)>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| {
            catch_unwind(load)
                .unwrap_or_else(|_| Err(("loading NCCL panicked".to_owned(), "please report it")))
        })
        .as_ref()
        .map_err(|(what, hint)| Error::new(Kind::Unavailable, what.clone()).hint(*hint))
}

/// libtorch's own NCCL, where pip installed both.
pub fn beside_libtorch() -> Option<PathBuf> {
    let libtorch = torch::loaded().ok()?.path?;
    let packages = libtorch.ancestors().nth(3)?;
    Some(packages.join("nvidia/nccl/lib/libnccl.so.2")).filter(|path| path.exists())
}

fn load() -> Result<Library, (String, &'static str)> {
    const GET: &str = "fetch it with `./setup --full`, then build again";
    let theirs = beside_libtorch();
    if let Some(path) = theirs.as_ref().and_then(|path| CString::new(path.as_os_str().as_bytes()).ok()) {
        // SAFETY: libtorch's own library, which it would load itself. Never closed.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    }
    // SAFETY: loading a library runs its initialisers; that is what NCCL is for.
    if !unsafe { sys::is_culib_present() } {
        return Err(match theirs {
            Some(path) => (
                format!("`{}` is there, but no `libnccl.so` beside it", path.display()),
                "make the link, `ln -s libnccl.so.2 libnccl.so` in that folder, and build again",
            ),
            None => ("there is no NCCL (libnccl.so) here".to_owned(), GET),
        });
    }
    // SAFETY: only looked up, never called through this type.
    let has = |name: &str| unsafe { sys::culib().get::<*const ()>(name.as_bytes()).is_ok() };
    if let Some(missing) = FUNCTIONS.iter().find(|name| !has(name)) {
        return Err((format!("NCCL has no function `{missing}`: it is older than 2.14"), GET));
    }
    let mut code = 0;
    // SAFETY: `code` outlives the call.
    let result = unsafe { sys::ncclGetVersion(&mut code) } as u32;
    if result != 0 {
        return Err((format!("ncclGetVersion failed: {}", words(result)), GET));
    }
    if code < OLDEST {
        return Err((format!("NCCL {} is older than 2.14", Library { code }.version()), GET));
    }
    if let Some(other) = two_copies() {
        return Err((
            format!("this process has two NCCLs: {}", other.join(" and ")),
            "take the system's out of LD_LIBRARY_PATH, so that libtorch's own is found",
        ));
    }
    Ok(Library { code })
}

/// The NCCLs that are mapped, if they are more than one file.
fn two_copies() -> Option<Vec<String>> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mut files: Vec<String> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with("libnccl.so")))
        .map(str::to_owned)
        .collect();
    files.sort();
    files.dedup();
    (files.len() > 1).then_some(files)
}

/// What NCCL says of a result.
pub(super) fn words(code: u32) -> String {
    let name = match code {
        1 => "unhandled CUDA error",
        2 => "system error",
        3 => "internal error",
        4 => "invalid argument",
        5 => "invalid usage",
        6 => "remote process exited or network error",
        7 => "still in progress",
        8 => "timeout",
        _ => "an error that has no name here",
    };
    format!("{name} (NCCL error {code})")
}

/// What NCCL says happened last, in any communicator of this thread.
pub(super) fn last_words() -> Option<String> {
    // SAFETY: a null communicator asks for the process's last error; the text is NCCL's and stays.
    let text = unsafe { sys::ncclGetLastError(std::ptr::null_mut()) };
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, and ended by a zero.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned();
    Some(text).filter(|text| !text.is_empty())
}
