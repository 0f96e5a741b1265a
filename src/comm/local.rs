//! World size 1, and the fake that unit tests use.

use super::{Abort, Buffer, Collective};
use crate::error::Kind as ErrorKind;
use crate::{Error, Result};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tch::{Device, Kind, Tensor};

/// The collective of a single rank: everything is already reduced.
#[derive(Debug, Default)]
pub struct Local {
    allocations: usize,
    aborted: Arc<OnceLock<String>>,
}

impl Local {
    /// A group of one.
    pub fn new() -> Self {
        Self::default()
    }

    fn check(&self) -> Result<()> {
        match self.aborted.get() {
            None => Ok(()),
            Some(reason) => Err(Error::new(ErrorKind::Worker, reason.clone())),
        }
    }
}

impl Collective for Local {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn name(&self) -> &'static str {
        "local"
    }

    fn allocate(&mut self, len: usize, kind: Kind) -> Result<Buffer> {
        self.check()?;
        let tensor = Tensor::f_zeros([len as i64], (kind, Device::Cpu))?;
        let id = self.allocations;
        self.allocations += 1;
        Ok(Buffer { tensor, id, len, kind, region: None })
    }

    fn all_reduce(&mut self, _: &Buffer) -> Result<()> {
        self.check()
    }

    fn broadcast(&mut self, _: &Buffer, root: usize) -> Result<()> {
        self.check()?;
        if root == 0 { Ok(()) } else { Err(Error::usage(format!("there is no rank {root} in a group of 1"))) }
    }

    fn exchange(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.check()?;
        Ok(vec![bytes.to_owned()])
    }

    fn barrier(&mut self) -> Result<()> {
        self.check()
    }

    fn abort_handle(&self) -> Abort {
        let aborted = Arc::clone(&self.aborted);
        Abort(Arc::new(move |reason| {
            // The first reason stays.
            let _ = aborted.set(reason.to_owned());
        }))
    }

    fn deadline(&self) -> Duration {
        Duration::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_keeps_its_own_values() {
        let mut local = Local::new();
        let mut buffer = local.allocate(3, Kind::Float).unwrap();
        let _ = buffer.tensor.f_fill_(2.5).unwrap();
        local.all_reduce(&buffer).unwrap();
        assert_eq!(Vec::<f32>::try_from(&buffer.tensor).unwrap(), [2.5, 2.5, 2.5]);
        assert_eq!(local.exchange(b"x").unwrap(), [b"x".to_vec()]);
    }

    #[test]
    fn the_first_reason_of_an_abort_stays() {
        let mut local = Local::new();
        local.abort("first");
        local.abort("second");
        assert_eq!(local.barrier().unwrap_err().to_string(), "first");
    }
}
