//! Memory that several processes of one user map, and that nobody has to clean up.
//!
//! A sealed memfd: it has no name in any file system, so nothing is left behind when a process is
//! killed, and it can neither shrink nor grow, so a checked mapping never faults. Knows nothing of what
//! is kept in it.

#![allow(unsafe_code)]

use crate::error::Kind;
use crate::{Error, Result};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// A shared mapping of a memfd, zeroed when made.
///
/// The bytes are shared with other processes, so there is no slice of them here: users lay atomics
/// over them, or order their accesses by other means.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping is plain memory that any thread may reach; it is unmapped once, by the one owner,
// and the type itself never reads or writes it.
unsafe impl Send for SharedMemory {}
// SAFETY: as above: `&SharedMemory` only hands out the address.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes `len` zeroed bytes; `name` shows in `/proc/PID/maps` and is not a path.
    pub fn create(name: &str, len: usize) -> Result<Self> {
        let failed = |error: rustix::io::Errno| {
            let kind = match error {
                rustix::io::Errno::NOMEM => Kind::OutOfMemory,
                _ => Kind::Unavailable,
            };
            Error::new(kind, format!("cannot make {len} bytes of shared memory for `{name}`: {error}"))
                .hint("use a smaller model or fewer cards, or raise the memory limit of this container")
                .caused_by(error)
        };
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(failed)?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(failed)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed)?;
        Self::map(fd, len).map_err(failed)
    }

    /// Maps what another process made, found by its [`path`](Self::path).
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |error: rustix::io::Errno| {
            Error::io("cannot map the shared memory", path, error.into()).hint(
                "the process that made it must still run, under the same user and in the same pid namespace",
            )
        };
        let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        // A file that may shrink would turn a later access into SIGBUS; other files do not know seals at all.
        let sealed = rustix::fs::fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !sealed {
            let what = format!("`{}` is not shared memory made by this program", path.display());
            return Err(Error::new(Kind::Corrupt, what).hint("check the path that was handed to the worker"));
        }
        let len = rustix::fs::fstat(&fd).map_err(failed)?.st_size as usize;
        Self::map(fd, len).map_err(failed)
    }

    fn map(fd: OwnedFd, len: usize) -> rustix::io::Result<Self> {
        // mmap refuses length 0, and an empty allocation still needs an address.
        let mapped = len.max(1);
        // SAFETY: a fresh mapping at an address that the kernel chooses; nothing else refers to it.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { start, len, fd })
    }

    /// Where another process of this user finds it while this process lives and keeps it.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!(
            "/proc/{}/fd/{}",
            rustix::process::getpid().as_raw_nonzero(),
            self.fd.as_raw_fd()
        ))
    }

    /// Gives the memory back but keeps the addresses: what still points here finds private zeroes
    /// instead of a fault.
    ///
    /// For memory that was lent to something that cannot keep an owner alive, as libtorch's blobs. Costs
    /// address space, nothing else, for the rest of the process.
    pub fn retire(self) {
        let memory = std::mem::ManuallyDrop::new(self);
        // SAFETY: replaces exactly the mapping made in `map`, atomically; `self` is gone, so this is the
        // only place that still knows it as shared memory. Failing leaves the old mapping, as valid.
        let _ = unsafe {
            rustix::mm::mmap_anonymous(
                memory.start.as_ptr().cast(),
                memory.len.max(1),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )
        };
        // SAFETY: `memory` is never dropped nor used again, so its descriptor is moved out once.
        drop(unsafe { std::ptr::read(&memory.fd) });
    }

    /// The descriptor behind it.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// First byte, aligned to a page.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `map`, with the length used there; whoever lays references
        // over it keeps this value alive. Failing would only leak address space.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len.max(1)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_see_the_same_bytes() {
        let made = SharedMemory::create("test", 10_000).unwrap();
        let opened = SharedMemory::open(&made.path()).unwrap();
        assert_eq!(opened.len(), 10_000);
        // SAFETY: both mappings are alive, the offset is inside, no other thread touches them.
        unsafe {
            made.start().as_ptr().add(9_999).write_volatile(7);
            assert_eq!(opened.start().as_ptr().add(9_999).read_volatile(), 7);
            assert_eq!(opened.start().as_ptr().read_volatile(), 0);
        }
    }

    #[test]
    fn retired_memory_can_still_be_read_and_is_no_longer_shared() {
        let made = SharedMemory::create("test", 4096).unwrap();
        let opened = SharedMemory::open(&made.path()).unwrap();
        let dangling = made.start().as_ptr();
        // SAFETY: retiring keeps the addresses mapped; no other thread touches them.
        unsafe {
            dangling.write_volatile(7);
            made.retire();
            assert_eq!(dangling.read_volatile(), 0);
            assert_eq!(opened.start().as_ptr().read_volatile(), 7);
        }
    }

    #[test]
    fn an_empty_allocation_is_fine() {
        let made = SharedMemory::create("test", 0).unwrap();
        assert!(SharedMemory::open(&made.path()).unwrap().is_empty());
    }

    #[test]
    fn other_files_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = SharedMemory::open(file.path()).unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(error.to_string().contains(&file.path().display().to_string()), "{error}");
    }

    #[test]
    fn a_gone_owner_is_an_error_with_the_path() {
        let path = SharedMemory::create("test", 1).unwrap().path();
        assert!(SharedMemory::open(&path).is_err());
    }
}
