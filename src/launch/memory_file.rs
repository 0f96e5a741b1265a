//! A file without a name, for ranks to meet in or to read: whoever is killed, nothing is left behind.

use crate::error::{Error, Kind, Result};
use rustix::fs::{MemfdFlags, memfd_create};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

/// An empty file in memory, which lives as long as this value or who has opened it.
#[derive(Debug)]
pub struct MemoryFile {
    fd: OwnedFd,
}

impl MemoryFile {
    /// Makes one.
    pub fn create() -> Result<Self> {
        let fd = memfd_create("dp-vs-ddp", MemfdFlags::CLOEXEC).map_err(|errno| {
            Error::new(Kind::Unavailable, format!("cannot make a file in memory (memfd_create): {errno}"))
        })?;
        Ok(Self { fd })
    }

    /// Makes one with these contents.
    pub fn with(contents: &[u8]) -> Result<Self> {
        let file = Self::create()?;
        std::fs::write(file.path(), contents).map_err(|source| {
            Error::new(Kind::Unavailable, format!("cannot fill a file in memory: {source}"))
        })?;
        Ok(file)
    }

    /// Where processes of this user find it while this process keeps it.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.fd.as_raw_fd()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_file_by_path_until_it_is_dropped() {
        let file = MemoryFile::create().unwrap();
        let path = file.path();
        std::fs::write(&path, "met").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "met");
        drop(file);
        assert!(!std::fs::read_to_string(&path).is_ok_and(|text| text == "met"));
    }
}
