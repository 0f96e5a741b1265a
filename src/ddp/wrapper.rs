//! The wrapper: acts on what the bucket plan and the reducer decide.
//!
//! Never waits for another rank except through the communication thread. Knows nothing of data sets,
//! optimisers or the program around it.

use super::agree::{self, BufferSync, Named};
use super::bucket::assign;
use super::communicator::{Communicator, Desk};
use super::core::{Core, Graph, Mode, Slot, lock, place, shapes, sizes};
use super::hooks::{CommHook, comm_hook};
use super::reducer::Reducer;
use super::{Module, Options, Share};
use crate::comm::{Buffer, Collective, Reduction};
use crate::config::CommHookPlan;
use crate::error::Kind;
use crate::metrics::phase::{Phase, Timed};
use crate::torch::grad::{self, Hook};
use crate::torch::seat::Seat;
use crate::{Error, Result};
use std::sync::{Arc, Mutex};
use tch::Tensor;

/// One process a card, each with its own replica; gradients are averaged while backward still runs.
///
/// ```no_run
/// # use dp_vs_ddp::{Result, comm::Local, ddp::{DistributedDataParallel, Options}};
/// # use tch::{Device, Kind, Tensor, nn, nn::{Module, OptimizerConfig}};
/// # fn main() -> Result<()> {
/// let store = nn::VarStore::new(Device::Cpu);
/// let net = nn::linear(store.root(), 4, 2, Default::default());
/// let mut optimizer = nn::Sgd::default().build(&store, 0.1)?;
/// // `Shm::connect` in place of `Local` joins other processes.
/// let mut ddp = DistributedDataParallel::new(store, Box::new(Local::new()), Options::default())?;
/// let (input, target) = (Tensor::randn([8, 4], (Kind::Float, Device::Cpu)), Tensor::zeros([8], (Kind::Int64, Device::Cpu)));
/// let output = ddp.forward(|_| Ok(net.forward(&input)))?;
/// let loss = output.cross_entropy_for_logits(&target);
/// ddp.backward(&loss)?;
/// optimizer.step();
/// optimizer.zero_grad();
/// # Ok(())
/// # }
/// ```
///
/// Differences from PyTorch, all because tch has no end-of-backward callback or for safety:
/// * backward goes through [`backward`](Self::backward), not `loss.backward()`, which is an error here;
/// * after it, `.grad` *is* the bucket (PyTorch's `gradient_as_bucket_view=True` after backward), valid
///   until the next backward: copy it to keep it;
/// * buffers are copied from rank 0 after backward rather than before forward. The next forward sees the
///   same values, ranks are equal between steps, and no graph that still waits for its backward is written to;
/// * buckets are planned in reverse order from the first step on, and once more, as in PyTorch, in the
///   order in which rank 0's gradients arrived in that step.
pub struct DistributedDataParallel<M: Module> {
    pub(super) module: M,
    /// Dropped before `core`, which their closures use.
    hooks: Vec<Hook>,
    pub(super) core: Arc<Mutex<Core>>,
    pub(super) communicator: Arc<Communicator>,
    options: Options,
    rank: usize,
    world_size: usize,
    buffers: Option<BufferSync>,
    /// By what summed gradients are divided.
    pub(super) divisor: usize,
    /// What the collective makes of them.
    reduction: Reduction,
    link: &'static str,
    /// The rank whose buffers are everybody's.
    pub(super) source: usize,
    /// Whether layers have collectives of their own.
    pub(super) shares_statistics: bool,
    plan: Vec<Vec<usize>>,
    rebuild: Rebuild,
    /// Backward passes begun.
    steps: u64,
    /// What the end of this backward has to see to.
    finishing: Option<Finishing>,
    /// Which parameters any rank uses, once a static graph is known.
    always_used: Option<Arc<Mutex<Vec<bool>>>>,
}

/// When buckets are planned anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rebuild {
    /// After the first backward.
    AfterFirst,
    /// Now: the arrival order is known.
    Due,
    /// It was done, or will not be.
    Done,
}

/// Gradients that are still to be put in place once all buckets are reduced.
struct Finishing {
    /// Parameters that were not used here.
    unready: Vec<usize>,
    /// Which parameters any rank used; `None` takes all as used.
    used: Option<Arc<Mutex<Vec<bool>>>>,
}

impl<M: Module> DistributedDataParallel<M> {
    /// Wraps a module: checks that all ranks hold the same names, shapes and types, gives all of them
    /// rank 0's parameters and buffers, and hooks into backward.
    ///
    /// A module with nothing to train is passed through: no bucket, no all-reduce.
    pub fn new(module: M, mut collective: Box<dyn Collective>, options: Options) -> Result<Self> {
        let (rank, world_size) = (collective.rank(), collective.world_size());
        let built = Self::build(module, collective.as_mut(), options, rank);
        let (wrapped, buckets, staging) = built.inspect_err(|error| collective.abort(&error.to_string()))?;
        let Wrapped { module, options, slots, plan, buffers } = wrapped;
        let hook = comm_hook(options.comm_hook);
        let shapes = shapes(&plan, &slots);
        let link = collective.name();
        let reduction = match options.comm_hook {
            CommHookPlan::None if collective.averages() => Reduction::Mean,
            _ => Reduction::Sum,
        };
        let desk = Desk::new(collective, buckets, shapes, hook, reduction, staging, options.card);
        let seat = options.seat.clone();
        let communicator = Arc::new(Communicator::start(desk, options.meter.clone(), seat)?);
        if options.init_sync {
            agree::same_values(&communicator, rank, &module)
                .inspect_err(|error| communicator.abort(&error.to_string()))?;
        }
        let graph = if options.static_graph { Graph::Learning } else { Graph::Dynamic };
        let core = Core::new(rank, options.overlap, graph, &plan, slots, Arc::clone(&communicator));
        let core = Arc::new(Mutex::new(core));
        let parameters: Vec<Tensor> =
            lock(&core).slots.iter().map(|slot| slot.parameter.shallow_clone()).collect();
        let hooks: Result<Vec<Hook>> = parameters
            .iter()
            .enumerate()
            .map(|(index, parameter)| {
                let core = Arc::clone(&core);
                grad::on_gradient(parameter, move || lock(&core).gradient_ready(index))
            })
            .collect();
        Ok(Self {
            module,
            hooks: hooks?,
            core,
            communicator,
            rebuild: if options.find_unused_parameters && !options.static_graph {
                Rebuild::Done
            } else {
                Rebuild::AfterFirst
            },
            options,
            rank,
            world_size,
            buffers,
            divisor: world_size,
            reduction,
            link,
            source: 0,
            shares_statistics: false,
            plan,
            steps: 0,
            finishing: None,
            always_used: None,
        })
    }

    fn build(
        module: M,
        collective: &mut dyn Collective,
        options: Options,
        rank: usize,
    ) -> Result<(Wrapped<M>, Vec<Buffer>, Vec<Buffer>)> {
        if options.init_sync {
            agree::same_model(collective, &module, &options)?;
        }
        let trained: Vec<Named> =
            module.named_parameters().into_iter().filter(|(_, tensor)| tensor.requires_grad()).collect();
        let order: Vec<usize> = (0..trained.len()).rev().collect();
        let plan = assign(&agree::items(&trained, collective.device())?, &order, &options.limits());
        let mut slots: Vec<Slot> = trained
            .into_iter()
            .map(|(name, parameter)| Slot { name, parameter, view: Tensor::new(), was_undefined: true })
            .collect();
        let mut buckets = Vec::new();
        for bucket in sizes(&plan, &slots) {
            buckets.push(collective.allocate(bucket.0, bucket.1)?);
        }
        place(&plan, &mut slots, buckets.iter().map(|bucket| &bucket.tensor))
            .map_err(|error| error.context(format_args!("rank {rank}")))?;
        let synced = if options.broadcast_buffers && collective.world_size() > 1 {
            BufferSync::new(collective, &module.named_buffers())?
        } else {
            None
        };
        let (buffers, staging) = synced.map_or((None, Vec::new()), |(sync, memory)| (Some(sync), memory));
        Ok((Wrapped { module, options, slots, plan, buffers }, buckets, staging))
    }

    /// The wrapped module: for evaluation, saving, and anything else that needs no other rank.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// What it was wrapped with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Parameters that are trained, in creation order.
    pub fn parameters(&self) -> Vec<Tensor> {
        lock(&self.core).slots.iter().map(|slot| slot.parameter.shallow_clone()).collect()
    }

    /// Parameters by bucket, in launch order; positions in [`parameters`](Self::parameters).
    pub fn buckets(&self) -> &[Vec<usize>] {
        &self.plan
    }

    /// Bytes of gradients that every backward reduces.
    pub fn gradient_bytes(&self) -> usize {
        let core = lock(&self.core);
        core.slots.iter().map(|slot| slot.view.numel() * slot.view.kind().elt_size_in_bytes()).sum()
    }

    /// A training forward. May be called several times before one backward.
    pub fn forward<T>(&mut self, run: impl FnOnce(&M) -> Result<T>) -> Result<T> {
        self.communicator.begin(self.steps);
        let result = self.rebuild_if_due().and_then(|()| run(&self.module));
        result.map_err(|error| self.stop(error))
    }

    /// Backward, with gradients averaged over ranks in `.grad` at the end. Every rank calls it equally often.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.begin_backward(Some(loss), Share::Equal)?;
        self.finish_backward()
    }

    /// Backward of this rank's own graph; reductions of complete buckets go on behind it. `None` as loss
    /// takes part with zeros: a rank that has no samples this time.
    ///
    /// With [`Share::Samples`], gradients must be undefined at the start (as `zero_grad` leaves them).
    pub fn begin_backward(&mut self, loss: Option<&Tensor>, share: Share) -> Result<()> {
        self.run_backward(loss, share).map_err(|error| self.stop(error))
    }

    /// Waits for the reductions and puts the last gradients and rank 0's buffers in place.
    pub fn finish_backward(&mut self) -> Result<()> {
        self.finish().map_err(|error| self.stop(error))
    }

    /// Puts a hook of the user's own in place of [`Options::comm_hook`]. All ranks do, before their first
    /// backward.
    pub fn register_comm_hook(&mut self, hook: Box<dyn CommHook>) -> Result<()> {
        self.reduction = Reduction::Sum;
        self.communicator.call(move |desk| {
            desk.hook = hook;
            desk.reduction = Reduction::Sum;
            Ok(())
        })
    }

    /// Backward that adds to this rank's gradients and leaves it at that: PyTorch's `no_sync`. The next
    /// [`backward`](Self::backward) reduces the sum. What the data leave over at their end, fewer
    /// micro-batches than usual, is reduced by making its last one such a `backward`, with losses divided
    /// by the number of micro-batches there really were.
    pub fn backward_no_sync(&mut self, loss: &Tensor) -> Result<()> {
        if self.finishing.is_some() {
            return Err(self.stop(self.began_twice()));
        }
        lock(&self.core).prepare_without_reduction();
        let result = if self.hooks.is_empty() { Ok(()) } else { grad::backward(&[loss], &[None]) };
        lock(&self.core).mode = Mode::Idle;
        result.map_err(|error| self.stop(error))
    }

    /// Bytes of gradients that this rank gave to the others since it was wrapped.
    pub fn bytes_sent(&self) -> u64 {
        self.communicator.sent()
    }

    /// Backward passes that reduced.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// What the communication thread did since the last call, or in the last backward.
    pub fn take_spans(&self) -> Vec<Timed> {
        self.communicator.take_spans()
    }

    /// What its collective goes over: `nccl`, `shm`, or `local` for a single rank.
    pub fn link(&self) -> &'static str {
        self.link
    }

    /// Where it computes.
    pub fn seat(&self) -> &Seat {
        &self.options.seat
    }

    /// Waits until the card has done all that this step asked it for. An error of the communication, also
    /// one that came after [`finish_backward`](Self::finish_backward), ends the wait and is returned.
    pub fn synchronize(&self) -> Result<()> {
        self.communicator.synchronize().map_err(|error| self.stop(error))
    }

    /// Stops the group: an error on this rank ends all of them, with this reason.
    pub(super) fn stop(&self, error: Error) -> Error {
        lock(&self.core).mode = Mode::Idle;
        let named = format!("rank {}: ", self.rank);
        let text = error.to_string();
        self.communicator.abort(text.strip_prefix(&named).unwrap_or(&text));
        error
    }

    fn run_backward(&mut self, loss: Option<&Tensor>, share: Share) -> Result<()> {
        if self.finishing.is_some() {
            return Err(self.began_twice());
        }
        // The second step rebuilds, in forward. A caller who skips forward gets it here.
        self.rebuild_if_due()?;
        let scale = share.scale(self.divisor)?;
        let scale = match self.reduction {
            Reduction::Sum => scale,
            // The collective divides by all ranks.
            Reduction::Mean => scale * self.world_size as f64,
        };
        self.communicator.begin(self.steps);
        self.send_buffers()?;
        lock(&self.core).prepare(scale, share, self.steps, self.options.gradient_as_bucket_view)?;
        let mut unready = Vec::new();
        // Nothing to train: the loss has no graph, and that is fine.
        if let Some(loss) = loss.filter(|_| !self.hooks.is_empty()) {
            // Before backward, so that the buckets of what it will not reach need not wait for its end.
            unready = self.unreached(loss)?;
            lock(&self.core).take_as_ready(&unready)?;
            grad::backward(&[loss], &[None])?;
        }
        let mut core = lock(&self.core);
        // A rank without samples learns its graph in a later step than the others.
        let learning = core.graph == Graph::Learning;
        let left = if learning && loss.is_some() { core.learn() } else { core.reducer.unready() };
        let learnt = self.always_used.is_none() && self.options.static_graph;
        if loss.is_some() && !learning && !left.is_empty() {
            match core.graph {
                Graph::Dynamic if self.options.find_unused_parameters => {}
                Graph::Dynamic => return Err(core.unused(&left)),
                Graph::Learning | Graph::Static(_) => {
                    return Err(core.changed(&left, "took no part, which it did"));
                }
            }
        }
        core.complete(&left)?;
        let ask = learnt || (self.options.find_unused_parameters && !self.options.static_graph);
        let used = if ask { Some(core.agree_on_used()?) } else { self.always_used.clone() };
        if learnt {
            self.always_used.clone_from(&used);
        }
        core.end();
        unready.extend(left);
        self.finishing = Some(Finishing { unready, used });
        self.steps += 1;
        Ok(())
    }

    /// Parameters that are known to take no part in this loss, before backward finds out.
    fn unreached(&self, loss: &Tensor) -> Result<Vec<usize>> {
        if self.options.static_graph {
            return Ok(lock(&self.core).never_used());
        }
        if !self.options.find_unused_parameters {
            return Ok(Vec::new());
        }
        let reached = grad::reached(loss, &self.hooks)?;
        Ok((0..reached.len()).filter(|&parameter| !reached[parameter]).collect())
    }

    fn began_twice(&self) -> Error {
        Error::usage(format!("rank {}: backward began twice", self.rank))
            .hint("call finish_backward after begin_backward")
    }

    fn finish(&mut self) -> Result<()> {
        let Some(Finishing { unready, used }) = self.finishing.take() else {
            return Err(Error::usage(format!("rank {}: there is no backward to finish", self.rank))
                .hint("call begin_backward first"));
        };
        self.communicator.wait()?;
        let core = lock(&self.core);
        for parameter in unready {
            let slot = &core.slots[parameter];
            let used = used.as_ref().is_none_or(|used| lock(used).get(parameter) == Some(&true));
            // Unused everywhere: the gradient stays undefined, so that an optimiser leaves the weight and
            // its momentum alone, as in a single process.
            match (used, slot.was_undefined) {
                (true, _) => grad::set_grad(&slot.parameter, Some(&slot.view))?,
                (false, true) => grad::set_grad(&slot.parameter, None)?,
                (false, false) => {}
            }
        }
        drop(core);
        self.apply_buffers()?;
        if self.rebuild == Rebuild::AfterFirst {
            self.rebuild = Rebuild::Due;
        }
        Ok(())
    }

    /// Starts rank 0's buffers on their way. They are final once forward has run, so this too overlaps.
    pub(super) fn send_buffers(&mut self) -> Result<()> {
        let source = self.source;
        let Some(buffers) = &mut self.buffers else { return Ok(()) };
        if self.rank == source {
            buffers.fill(&self.module.named_buffers())?;
        }
        let step = self.steps;
        self.communicator.post(move |desk| {
            desk.timed(Phase::Replicate, step, |Desk { collective, staging, .. }| {
                staging.iter().try_for_each(|buffer| collective.broadcast(buffer, source))
            })
        })
    }

    /// Writes what has arrived of them.
    pub(super) fn apply_buffers(&self) -> Result<()> {
        match self.buffers.as_ref().filter(|_| self.rank != self.source) {
            Some(buffers) => buffers.apply(&self.module.named_buffers()),
            None => Ok(()),
        }
    }

    /// Plans buckets anew in the order in which rank 0's gradients arrived in the first step.
    fn rebuild_if_due(&mut self) -> Result<()> {
        if self.rebuild != Rebuild::Due {
            return Ok(());
        }
        self.rebuild = Rebuild::Done;
        let mut core = lock(&self.core);
        let mine: Vec<u8> = core.reducer.arrival().iter().flat_map(|&at| (at as u32).to_le_bytes()).collect();
        let orders = self.communicator.call(move |desk| desk.collective.exchange(&mine))?;
        let order: Vec<usize> = orders[self.source]
            .chunks_exact(4)
            .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize)
            .collect();
        let items: Vec<_> = core.slots.iter().map(Slot::item).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..items.len()) {
            return Err(Error::new(
                Kind::Worker,
                format!("rank {} sent an order that is none of these parameters", self.source),
            ));
        }
        let plan = assign(&items, &order, &self.options.limits());
        if plan == self.plan {
            return Ok(());
        }
        core.detach_gradients()?;
        let sizes = sizes(&plan, &core.slots);
        let shapes = shapes(&plan, &core.slots);
        let flats = self.communicator.call(move |desk| {
            // First, so that the old and the new memory are never there together.
            desk.buckets.clear();
            desk.hook.buckets_changed();
            desk.shapes = shapes;
            let mut flats = Vec::new();
            for (len, kind) in sizes {
                let bucket = desk.collective.allocate(len, kind)?;
                // Note [One thread a tensor]: a view, not a second handle.
                flats.push(bucket.tensor.f_narrow(0, 0, len as i64)?);
                desk.buckets.push(bucket);
            }
            Ok(flats)
        })?;
        place(&plan, &mut core.slots, flats.iter())?;
        core.reducer = Reducer::new(&plan, core.slots.len());
        drop(core);
        self.plan = plan;
        Ok(())
    }
}

impl<M: Module> Drop for DistributedDataParallel<M> {
    fn drop(&mut self) {
        self.hooks.clear();
        // Gradients that the user still reads outlive the buckets. A failure leaves zeroes in them.
        let _ = lock(&self.core).detach_gradients();
    }
}

impl<M: Module> std::fmt::Debug for DistributedDataParallel<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DistributedDataParallel")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("options", &self.options)
            .field("buckets", &self.plan)
            .finish_non_exhaustive()
    }
}

/// What is known before the communication thread takes the collective.
struct Wrapped<M> {
    module: M,
    options: Options,
    slots: Vec<Slot>,
    plan: Vec<Vec<usize>>,
    buffers: Option<BufferSync>,
}
