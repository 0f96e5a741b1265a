//! Collectives over NCCL: one process a card, on one host.
//!
//! NCCL moves the data in a stream of its own; everything else that ranks say to each other goes through
//! shared memory ([`Shm`]), which is also how a rank that waits finds out whose fault it is. Nothing waits
//! inside NCCL or the driver: it is asked, up to the deadline, and aborted when there is no hope.
//!
//! Note \[Streams\]
//! The thread that owns this value works in its stream: NCCL's kernels and what that thread's tensor
//! operations ask for come one after another. Others work in the card's default stream. The two are ordered
//! by events alone: [`Collective::after`] on the way in, [`Collective::complete`] on the way out.

mod checks;
mod communicator;
mod library;
mod one_process;

pub use library::{Library, beside_libtorch, library};
pub use one_process::OneProcess;

use super::shm::{Member, Shm};
use super::{Abort, Buffer, Collective, Reduction, Rendezvous};
use crate::card::cuda::{Event, Stream, Timing, driver};
use crate::error::{Error, Result};
use crate::torch::cuda;
use crate::torch::seat::Seat;
use crate::units::{Nanos, bytes};
use checks::Place;
use communicator::{Communicator, ID_BYTES, unique_id};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tch::{Device, Kind, Tensor};

/// Where rank 0 publishes the unique id.
const KEY: &str = "dp-vs-ddp/nccl";

/// Ranks of one host, each on a card of its own.
///
/// ```no_run
/// # use dp_vs_ddp::{Result, card::Card, comm::{Member, nccl::Nccl}, ddp::{DistributedDataParallel, Options}};
/// # use dp_vs_ddp::torch::{cuda, seat::Seat, store::Store};
/// # use std::time::Duration;
/// # fn main() -> Result<()> {
/// # let (rank, world_size, deadline) = (0, 1, Duration::from_secs(60));
/// // Before the first tensor.
/// cuda::load()?;
/// let seat = Seat::take(&Card::Cuda { index: rank, ordinal: rank }, deadline)?;
/// let store = tch::nn::VarStore::new(seat.device());
/// // ... layers, an optimiser ...
/// let meeting = Store::tcp("127.0.0.1", 29500, world_size, rank == 0, deadline)?;
/// let member = Member { rank, world_size, deadline, meter: None };
/// let nccl = Nccl::connect(member, &meeting, seat.clone())?;
/// let ddp = DistributedDataParallel::new(store, Box::new(nccl), Options { card: rank, seat, ..Options::default() })?;
/// // Forward, backward and update as on virtual cards; then, once a step:
/// ddp.synchronize()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Nccl {
    control: Shm,
    id: [u8; ID_BYTES],
    seat: Seat,
    stream: Arc<Stream>,
    /// Made at the first collective, by the thread that goes on to use it.
    communicator: Option<Communicator>,
    /// What the card has not been seen to end, oldest first.
    pending: VecDeque<Pending>,
    allocations: usize,
}

/// Where this rank computes, for the others.
fn place(ordinal: usize) -> Result<Place> {
    let card = driver()?.cards().get(ordinal);
    Ok(Place {
        uuid: card.map(|card| card.uuid.clone()).unwrap_or_default(),
        bus: card.and_then(|card| card.pci_bus_id.clone()).unwrap_or_default(),
    })
}

/// The machine's network interfaces.
fn interfaces() -> Vec<String> {
    let names = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let mut names: Vec<String> =
        names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A collective that the card was asked for.
#[derive(Debug)]
struct Pending {
    number: u64,
    end: Event,
    since: Nanos,
}

impl Nccl {
    /// Joins the group, and returns once all ranks have. `seat` is the CUDA card that this rank computes on.
    pub fn connect(member: Member, rendezvous: &dyn Rendezvous, seat: Seat) -> Result<Self> {
        let Some(context) = seat.stream().map(|stream| stream.context().clone()) else {
            return Err(
                Error::usage("NCCL needs a CUDA card").hint("use shared memory between virtual cards")
            );
        };
        let rank = member.rank;
        checks::interface(std::env::var("NCCL_SOCKET_IFNAME").ok().as_deref(), &interfaces())?;
        let stream = Arc::new(Stream::urgent(&context)?);
        let mut control = Shm::connect(member, rendezvous)?;
        let places = control.exchange(&place(context.ordinal())?.to_bytes())?;
        // All ranks see the same places, and so the same fault in them.
        checks::one_card_each(&places.iter().map(|bytes| Place::from_bytes(bytes)).collect::<Vec<_>>())?;
        // Whoever fails here must not leave the others waiting.
        let id = Self::agree_on_id(rank, rendezvous).map_err(|error| control.stop_all(error))?;
        Ok(Self { control, id, seat, stream, communicator: None, pending: VecDeque::new(), allocations: 0 })
    }

    fn agree_on_id(rank: usize, rendezvous: &dyn Rendezvous) -> Result<[u8; ID_BYTES]> {
        library()?;
        if rank == 0 {
            let id = unique_id()?;
            rendezvous.publish(KEY, &id)?;
            return Ok(id);
        }
        let id = rendezvous.fetch(KEY)?;
        id.try_into().map_err(|id: Vec<u8>| {
            Error::usage(format!("rank 0 published {} bytes as NCCL's unique id, not {ID_BYTES}", id.len()))
                .hint("start all ranks from one build")
        })
    }

    /// Asks the card for a collective, once what its stream is told to wait for is done.
    fn issue(
        &mut self,
        number: u64,
        ask: impl FnOnce(&mut Communicator, &Stream, communicator::Patience<'_>) -> Result<()>,
    ) -> Result<()> {
        let result = self.try_issue(number, ask);
        result.map_err(|error| self.give_up(error))
    }

    fn try_issue(
        &mut self,
        number: u64,
        ask: impl FnOnce(&mut Communicator, &Stream, communicator::Patience<'_>) -> Result<()>,
    ) -> Result<()> {
        // Here too: where jobs follow each other without a pause, nobody looks after them in between.
        self.forget_what_ended()?;
        let Self { control, communicator, stream, id, pending, .. } = self;
        let communicator = match communicator {
            Some(communicator) => communicator,
            None => {
                stream.context().bind()?;
                let (rank, world_size) = (control.rank(), control.world_size());
                let mut patience = |waited| control.look_after(number, waited);
                let joined = Communicator::join(rank, world_size, id, &mut patience);
                let free = stream.context().free_bytes().map(|free| format!(" ({} free)", bytes(free)));
                let free = free.unwrap_or_default();
                let at = |error: Error| {
                    error.context(format_args!("rank {rank}: NCCL cannot connect the ranks{free}"))
                };
                communicator.insert(joined.map_err(at)?)
            }
        };
        ask(communicator, stream, &mut |waited| control.look_after(number, waited))?;
        let end = Event::new(stream.context(), Timing::No)?;
        stream.record(&end)?;
        pending.push_back(Pending { number, end, since: Nanos::now() });
        Ok(())
    }

    /// Waits until the card has ended all that it was asked for.
    fn drain(&mut self) -> Result<()> {
        while !self.pending.is_empty() {
            self.watch()?;
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    }

    /// Ends this rank's part, so that its card does not spin for ever, and stops the group.
    fn give_up(&mut self, error: Error) -> Error {
        let error = self.control.stop_all(error);
        self.pending.clear();
        if let Some(communicator) = self.communicator.take() {
            communicator.abort();
        }
        error
    }

    fn forget_what_ended(&mut self) -> Result<()> {
        while let Some(oldest) = self.pending.front() {
            if !oldest.end.is_reached()? {
                break;
            }
            self.pending.pop_front();
        }
        Ok(())
    }

    fn try_watch(&mut self) -> Result<()> {
        self.forget_what_ended()?;
        self.control.stopped()?;
        if let Some(communicator) = &self.communicator {
            let rank = self.control.rank();
            communicator.health().map_err(|error| error.context(format_args!("rank {rank}")))?;
        }
        match self.pending.front() {
            None => Ok(()),
            Some(oldest) => {
                let waited = Duration::from_nanos(Nanos::now().since(oldest.since).0);
                self.control.look_after(oldest.number, waited)
            }
        }
    }

    /// Where libtorch's tensors cannot be in the stream's order, the host has to see to it.
    fn in_order(&mut self) -> Result<()> {
        if self.seat.device() == Device::Cpu { self.drain() } else { Ok(()) }
    }
}

impl Collective for Nccl {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn world_size(&self) -> usize {
        self.control.world_size()
    }

    fn name(&self) -> &'static str {
        "nccl"
    }

    fn device(&self) -> Device {
        self.seat.device()
    }

    fn stream(&self) -> Option<&Arc<Stream>> {
        Some(&self.stream)
    }

    fn averages(&self) -> bool {
        true
    }

    fn allocate(&mut self, len: usize, kind: Kind) -> Result<Buffer> {
        self.control.stopped()?;
        let tensor = Tensor::f_zeros([len as i64], (kind, self.seat.device()))?;
        let id = self.allocations;
        self.allocations += 1;
        Ok(Buffer { tensor, id, len, kind, region: None })
    }

    fn start_all_reduce(&mut self, buffer: &Buffer, reduction: Reduction) -> Result<()> {
        let number = self.control.issue_all_reduce(buffer)?;
        self.issue(number, |communicator, stream, patience| {
            communicator.all_reduce(&buffer.tensor, reduction, stream, patience)
        })
    }

    fn all_reduce(&mut self, buffer: &Buffer) -> Result<()> {
        self.start_all_reduce(buffer, Reduction::Sum)?;
        self.in_order()
    }

    fn broadcast(&mut self, buffer: &Buffer, root: usize) -> Result<()> {
        let number = self.control.issue_broadcast(buffer, root)?;
        self.issue(number, |communicator, stream, patience| {
            communicator.broadcast(&buffer.tensor, root, stream, patience)
        })?;
        self.in_order()
    }

    fn exchange(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.control.exchange(bytes)
    }

    fn barrier(&mut self) -> Result<()> {
        self.control.barrier()
    }

    fn abort_handle(&self) -> Abort {
        self.control.abort_handle()
    }

    fn deadline(&self) -> Duration {
        self.control.deadline()
    }

    fn enter(&mut self) -> Result<()> {
        self.stream.context().bind()?;
        cuda::work_in(self.seat.device(), &self.stream)
    }

    fn after(&mut self, event: &Event) -> Result<()> {
        self.stream.wait(event)
    }

    fn complete(&mut self) -> Result<()> {
        let Some(compute) = self.seat.stream().cloned() else { return Ok(()) };
        let end = Event::new(self.stream.context(), Timing::No)?;
        self.stream.record(&end)?;
        if self.seat.device() == Device::Cpu {
            self.drain()?;
        }
        compute.wait(&end)
    }

    fn watch(&mut self) -> Result<()> {
        let result = self.try_watch();
        result.map_err(|error| self.give_up(error))
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let Some(communicator) = self.communicator.take() else { return };
        // In a group that failed, others have left already and will never answer.
        if self.control.stopped().is_err() || self.drain_before_the_end().is_err() {
            communicator.abort();
            return;
        }
        // Ranks leave together, or the one that stays behind says why; nobody is left to be told here.
        let control = &self.control;
        let deadline = control.deadline();
        let _ = communicator.destroy(&mut |waited| {
            control.stopped()?;
            if waited < deadline { Ok(()) } else { Err(Error::usage("ranks did not leave together")) }
        });
    }
}

impl Nccl {
    /// What was asked for must end before its communicator goes.
    fn drain_before_the_end(&mut self) -> Result<()> {
        while !self.pending.is_empty() {
            self.try_watch()?;
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}
