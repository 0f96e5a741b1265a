//! Collectives between ranks, and the one wait primitive both engines share.
//!
//! Buckets are allocated by the collective, so that a backend can hand out memory its peers see.
//! Knows nothing of gradients or models.

mod local;
pub mod nccl;
mod rendezvous;
mod shm;
pub mod wait;

pub use local::Local;
pub use rendezvous::{Board, Rendezvous};
pub use shm::{Member, Shm};

use crate::card::cuda::{Event, Stream};
use crate::{Error, Result};
use std::sync::Arc;
use std::time::Duration;
use tch::{Device, Kind, Tensor};

/// Memory that a collective reduces in place.
///
/// Its tensor is the rank's own copy. A thread that hands a buffer to another must keep a tensor of its
/// own made by a view (`narrow`), never a second handle of this one: two handles share libtorch's
/// metadata, which is not made for two threads.
#[derive(Debug)]
pub struct Buffer {
    /// One-dimensional view of this rank's copy.
    pub tensor: Tensor,
    /// Which allocation of the collective it is.
    pub id: usize,
    /// Elements.
    pub len: usize,
    /// Element type.
    pub kind: Kind,
    /// The memory behind it, where the collective is [`Shm`].
    region: Option<Arc<shm::Region>>,
}

/// What an all-reduce makes of the ranks' values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their sum over the number of ranks.
    Mean,
}

/// What ranks do together. Every rank makes the same calls in the same order, from one thread a rank
/// (whichever thread owns the value). Every wait ends at the deadline given at set-up, with an error
/// that names the ranks that had not arrived and the number of the collective; after an error on any
/// rank all further calls on all ranks fail.
pub trait Collective: Send {
    /// This process's rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Memory for `len` elements on every rank, zeroed.
    fn allocate(&mut self, len: usize, kind: Kind) -> Result<Buffer>;

    /// What it goes over, for people: `shm`, `nccl`, or `local` for a single rank.
    fn name(&self) -> &'static str;

    /// Where its buffers live.
    fn device(&self) -> Device {
        Device::Cpu
    }

    /// Whether it can divide by the number of ranks on the way: [`Reduction::Mean`].
    fn averages(&self) -> bool {
        false
    }

    /// Sums over ranks, in place, bit-equal on all of them. What the calling thread's tensor operations do
    /// from now on comes after it.
    fn all_reduce(&mut self, buffer: &Buffer) -> Result<()>;

    /// As [`Self::all_reduce`], but may still go on in [`Self::stream`] when it returns.
    fn start_all_reduce(&mut self, buffer: &Buffer, reduction: Reduction) -> Result<()> {
        match reduction {
            Reduction::Sum => self.all_reduce(buffer),
            Reduction::Mean => Err(Error::usage("this collective does not average")),
        }
    }

    /// Copies `root`'s bytes to all, in place.
    fn broadcast(&mut self, buffer: &Buffer, root: usize) -> Result<()>;

    /// Every rank's bytes, in rank order. For small messages: plans, digests, verification.
    fn exchange(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Returns when all ranks have called it.
    fn barrier(&mut self) -> Result<()>;

    /// A way to stop the group that other threads can hold while a collective waits.
    fn abort_handle(&self) -> Abort;

    /// Tells all ranks to stop waiting: `reason` is what they report.
    fn abort(&self, reason: &str) {
        self.abort_handle().raise(reason);
    }

    /// The longest any wait may take.
    fn deadline(&self) -> Duration;

    /// The stream in which it works; `None` where every call ends before it returns.
    fn stream(&self) -> Option<&Arc<Stream>> {
        None
    }

    /// The calling thread owns this value from now on: where there is a stream, its tensor operations go there.
    fn enter(&mut self) -> Result<()> {
        Ok(())
    }

    /// What is asked for from now on waits for this event.
    fn after(&mut self, event: &Event) -> Result<()> {
        let _ = event;
        Ok(())
    }

    /// What the card's default stream is given from now on waits for all that was asked for so far.
    fn complete(&mut self) -> Result<()> {
        Ok(())
    }

    /// Looks after what was asked for and may not have ended: an error of it, or a missed deadline.
    fn watch(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Stops a group from any thread: see [`Collective::abort`]. The first reason stays.
#[derive(Clone)]
pub struct Abort(Arc<dyn Fn(&str) + Send + Sync>);

impl Abort {
    /// Tells all ranks to stop waiting: `reason` is what they report.
    pub fn raise(&self, reason: &str) {
        (self.0)(reason);
    }
}

impl std::fmt::Debug for Abort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Abort")
    }
}
