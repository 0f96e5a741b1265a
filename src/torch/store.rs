//! Rendezvous through libtorch's own stores, so that we need no protocol of ours and can join the
//! store that `torchrun` made.

use crate::Result;
use std::time::Duration;

/// A key-value store that all ranks share.
#[derive(Debug)]
pub struct Store {
    _todo: (),
}

impl Store {
    /// One host: a file that all ranks can open.
    pub fn file(path: &std::path::Path, world_size: usize, timeout: Duration) -> Result<Self> {
        let _ = (path, world_size, timeout);
        todo!()
    }

    /// Across hosts, or under torchrun: rank 0 serves unless an agent already does.
    pub fn tcp(host: &str, port: u16, world_size: usize, serve: bool, timeout: Duration) -> Result<Self> {
        let _ = (host, port, world_size, serve, timeout);
        todo!()
    }

    /// Publishes a value.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let _ = (key, value);
        todo!()
    }

    /// Waits for a value, up to the store's timeout.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let _ = key;
        todo!()
    }

    /// Adds to a counter and returns its new value.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let _ = (key, amount);
        todo!()
    }
}
