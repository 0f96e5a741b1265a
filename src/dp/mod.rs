//! DataParallel: one process, all cards, as `torch.nn.DataParallel` does it.
//!
//! A step has PyTorch's phases, one file each: [scatter], [replicate], [apply], [gather], [reduce]. Written as
//! well as DDP is: replica threads persist and are pinned, weights travel in one flat copy that each replica
//! fetches for itself, gradients are summed without a copy in between. What remains is DataParallel's
//! structure: every card waits for card 0, which gathers, computes the loss, sums and updates alone.
//!
//! On CPU, libtorch runs backward on the thread that calls it, so one `loss.backward()` over the gathered
//! output would run the replicas' parts one after another. Here the gathered output is a leaf: the loss gives
//! its gradient, slices of that go back to the replicas, and each runs its own backward on its own thread,
//! as the autograd engine does with CUDA devices.

mod apply;
mod engine;
mod gather;
mod link;
mod reduce;
mod replicate;
mod scatter;

pub use engine::DpEngine;
pub use gather::Gathered;

use crate::card::cuda::Stream;
use crate::card::{Card, Meter};
use crate::comm::wait::Waiter;
use crate::config::{InjectPlan, Precision};
use crate::engine::timed;
use crate::error::{Error, Kind, Result};
use crate::metrics::phase::{Phase, Recorder, Timed};
use crate::model::{Model, State};
use crate::torch::optim::Optimizer;
use crate::torch::seat::Seat;
use crate::torch::{grad, threads};
use apply::{Arrived, Factory, Flattened, Mode, Parts, Replica, Source};
use gather::Layout;
use link::{Gradients, Link, Weights};
use replicate::Flat;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;
use tch::{Device, Tensor};

/// How [`DataParallel`] runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// Axis along which batches are cut and outputs put together. Only 0 is supported.
    pub dim: i64,
    /// Share of a batch of each card, in the order of the cards, as positive numbers; `None` cuts as
    /// `tensor.chunk` does. An experiment that PyTorch has not: card 0 does more than the others, so give it
    /// less to compute. See [`crate::config::shares`]; a card of little weight may get no rows and then does
    /// not run.
    pub chunk_weights: Option<Vec<f64>>,
    /// Intra-op threads of each card. Also set for the thread that calls [`DataParallel::new`], which works
    /// for card 0: with libtorch's default, all cores, it would take them from the other cards.
    pub threads_per_card: usize,
    /// Longest wait for any card.
    pub deadline: Duration,
    /// Counters that waiting is charged to, one for each card number in use.
    pub meter: Option<Arc<Meter>>,
    /// Number format of the models' forwards.
    pub precision: Precision,
    /// A deliberate slowdown, for testing gates.
    pub inject: Option<InjectPlan>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            dim: 0,
            chunk_weights: None,
            threads_per_card: 1,
            deadline: Duration::from_secs(60),
            meter: None,
            precision: Precision::Fp32,
            inject: None,
        }
    }
}

/// One model on several cards: a batch goes in, the outputs of all cards come out as one tensor.
///
/// The first card of the list is "card 0", whatever its number, as the first of PyTorch's `device_ids` is: its
/// work runs on the thread that calls, it gathers, reduces and updates, its model is the one that is trained,
/// saved and looked at. Batches are cut as `tensor.chunk` cuts them, or by [`Options::chunk_weights`]; cards
/// that get no rows are not called. One card, or one row, takes the plain path: no copies, no threads.
///
/// What is defined beyond PyTorch, or differs:
/// - A model returns one tensor, not a structure of them: what differs between cards in more than its rows is
///   an error that names the card. Scalars are stacked ([`Gathered::weighted_mean`]), so a model with several
///   outputs can compute its own loss from them.
/// - Replicas live as long as this value, so what a model counts in fields of its own counts on, on each card
///   for the forwards of that card. State that training needs belongs into buffers: those are copied from
///   card 0 before every forward, and what card 0's forward writes to its own is kept, the rest dropped. A
///   card 0 without rows writes nothing.
/// - A weight without gradient on all cards keeps none; see [`Self::without_gradient`].
/// - Models that draw random numbers share libtorch's one CPU generator: their draws depend on timing.
/// - After a failed step the gradients are undefined (as after `zero_grad`), and the next step may be tried,
///   except after a missed deadline: then this value is of no further use.
pub struct DataParallel {
    cards: Vec<usize>,
    options: Options,
    model: Box<dyn Model>,
    parameters: Vec<Tensor>,
    flat: Option<Flat>,
    snapshot: Vec<Tensor>,
    replicas: Vec<Replica>,
    /// What the replicas are made of, in their order.
    parts: Vec<Parts>,
    seat: Seat,
    link: Link,
    /// Card 0's, where they travel flat.
    gradients: Option<Gradients>,
    abort: Arc<AtomicU32>,
    pending: Option<Pending>,
    spans: Vec<Timed>,
}

/// A forward whose backward has not happened yet.
enum Pending {
    /// One card worked: the output is the model's own.
    Plain,
    /// Others did, or several: their outputs were copied into `leaf`.
    Gathered { leaf: Tensor, own: Option<Tensor>, worked: Vec<usize>, layout: Layout },
}

/// What backward starts from.
enum Seed {
    Plain(Tensor),
    /// By position of the card; `own` is the output of the card at position 0, if it worked.
    Slices {
        own: Option<Tensor>,
        slices: Vec<(usize, Tensor)>,
    },
}

impl DataParallel {
    /// A model on these cards; the first one is card 0. `factory` is called once a card, with its number, on
    /// the thread that will work for it. All must build the same model; the values are card 0's.
    ///
    /// On CUDA cards the factory builds on the device of its card, and the calling thread opens that of card 0.
    pub fn new<C: Clone + Into<Card>>(
        cards: &[C],
        options: Options,
        factory: impl Fn(usize) -> Result<Box<dyn Model>> + Send + Sync + 'static,
    ) -> Result<Self> {
        let cards: Vec<Card> = cards.iter().cloned().map(Into::into).collect();
        check(&cards, &options)?;
        threads::set_intra_op(options.threads_per_card);
        let seat = match &cards[0] {
            // Whoever calls has chosen its own cores.
            Card::Virtual(_) => Seat::default(),
            card @ Card::Cuda { .. } => Seat::take(card, options.deadline)?,
        };
        let factory: Factory = Arc::new(factory);
        let model = factory(cards[0].index())
            .map_err(|error| error.context(format_args!("card {}", cards[0].index())))?;
        let parameters: Vec<Tensor> =
            model.state().parameters().map(|entry| entry.tensor.shallow_clone()).collect();
        let flat = if cards.len() > 1 { Some(Flat::adopt(model.state())?) } else { None };
        let snapshot = flat.as_ref().map_or(Ok(Vec::new()), Flat::snapshot)?;
        let abort = Arc::new(AtomicU32::new(0));
        let mut replicas = Vec::new();
        if let Some(flat) = &flat {
            for card in &cards[1..] {
                let source = Source { weights: flat.source(&snapshot)?, stream: seat.stream().cloned() };
                replicas.push(Replica::start(card, &options, &abort, source, &factory)?);
            }
        }
        let cards = cards.iter().map(Card::index).collect();
        let mut this = Self {
            cards,
            options,
            model,
            parameters,
            flat,
            snapshot,
            replicas,
            parts: Vec::new(),
            seat,
            link: Link::Host,
            gradients: None,
            abort,
            pending: None,
            spans: Vec::new(),
        };
        let first = replicate::specs(this.model.state());
        this.parts = this.collect(|replica, waiter, _| {
            let parts = replica.built(waiter)?;
            replicate::check_same(&first, &parts.specs)
                .map_err(|error| error.context(format_args!("card {}", replica.card())))?;
            Ok(parts)
        })?;
        this.link = Link::between(this.streams())?;
        if this.link.is_flat() {
            this.gradients = Some(Gradients::of(&this.parameters)?);
        }
        Ok(this)
    }

    /// The streams in which the cards compute, card 0's first; `None` where the host computes.
    fn streams(&self) -> Option<Vec<Arc<Stream>>> {
        let others = self.parts.iter().map(|parts| parts.stream.clone());
        std::iter::once(self.seat.stream().cloned()).chain(others).collect()
    }

    /// How weights and gradients travel: `host`, `peer` (copies from card to card) or `nccl`.
    pub fn link(&self) -> &'static str {
        self.link.name()
    }

    /// Waits until all cards have done what they were asked for, each at most until the deadline.
    pub fn synchronize(&self) -> Result<()> {
        let deadline = self.options.deadline;
        let streams = self.streams().unwrap_or_default();
        streams.iter().zip(&self.cards).try_for_each(|(stream, card)| {
            stream.synchronize(deadline).map_err(|error| {
                let error = error.context(format_args!("card {card}"));
                if self.link.is_flat() && error.kind() == Kind::Timeout {
                    error.hint(link::HANGING_COPIES)
                } else {
                    error
                }
            })
        })
    }

    /// Where the calling thread computes: at card 0.
    pub fn seat(&self) -> &Seat {
        &self.seat
    }

    /// The cards' numbers, card 0 first.
    pub fn cards(&self) -> &[usize] {
        &self.cards
    }

    /// Card 0's parameters and buffers: what an optimiser updates and a file holds.
    pub fn state(&self) -> &State {
        self.model.state()
    }

    /// Handles of card 0's trainable parameters, for any optimiser.
    pub fn parameters(&self) -> Vec<Tensor> {
        self.parameters.iter().map(Tensor::shallow_clone).collect()
    }

    /// Names of trainable parameters that have no gradient now.
    pub fn without_gradient(&self) -> Vec<&str> {
        let entries = self.model.state().parameters();
        entries.filter(|entry| grad::grad(&entry.tensor).is_none()).map(|entry| entry.name.as_str()).collect()
    }

    /// Forward on all cards, in training. Computing a loss from the output and calling [`Self::backward`]
    /// with it completes the gradients; a second forward before that forgets the first.
    pub fn forward(&mut self, input: &Tensor) -> Result<Gathered> {
        self.spans.clear();
        self.run_forward(input, Mode::Train, &mut Recorder::new(self.cards[0]))
    }

    /// Forward on all cards, without gradients and in evaluation mode.
    pub fn evaluate(&mut self, input: &Tensor) -> Result<Gathered> {
        self.spans.clear();
        self.run_forward(input, Mode::Evaluate, &mut Recorder::new(self.cards[0]))
    }

    /// Adds the gradients of `loss` (a scalar computed from the last forward's output) to those of card 0's
    /// parameters.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        let seed = self.seed(loss)?;
        self.run_backward(seed, &mut Recorder::new(self.cards[0]))
    }

    /// A whole training step: forward, `loss(output, target)`, backward, update. Gives the loss.
    pub fn step(
        &mut self,
        input: &Tensor,
        target: &Tensor,
        loss: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
        optimizer: &mut Optimizer,
    ) -> Result<f64> {
        optimizer.zero_grad()?;
        let gathered = self.forward(input)?;
        let loss = loss(&gathered.output, target)?;
        self.backward(&loss)?;
        optimizer.step()?;
        Ok(loss.f_double_value(&[])?)
    }

    fn run_forward(&mut self, input: &Tensor, mode: Mode, recorder: &mut Recorder) -> Result<Gathered> {
        self.pending = None;
        let weights = self.options.chunk_weights.as_deref();
        let chunks = recorder.time(Phase::Scatter, || scatter::chunks(input, self.cards.len(), weights))?;
        let worked: Vec<usize> =
            chunks.iter().enumerate().filter_map(|(card, chunk)| chunk.as_ref().map(|_| card)).collect();
        let rows = chunks.iter().flatten().map(|chunk| chunk.size()[0] as usize).collect();
        let plain = worked == [0];
        let mut weights = Weights::Copy;
        let Self { flat, snapshot, link, seat, parts, .. } = &mut *self;
        if let Some(flat) = flat.as_ref().filter(|_| !plain) {
            weights = recorder.time(Phase::Replicate, || {
                flat.update(snapshot)?;
                let replicas: Vec<&Flat> = parts.iter().map(|parts| &parts.weights).collect();
                link.replicate(seat, &flat.source(snapshot)?, &replicas)
            })?;
        }
        let (own, others) = self.parallel_apply(chunks, mode, &weights, recorder)?;
        let output = match own {
            Some(own) if plain => {
                self.pending = (mode == Mode::Train).then_some(Pending::Plain);
                own
            }
            own => recorder.time(Phase::Gather, || self.gather(own, others, worked, mode))?,
        };
        Ok(Gathered { output, rows })
    }

    /// Forward on the cards that have a chunk: card 0's output and the data of the others'.
    fn parallel_apply(
        &mut self,
        chunks: Vec<Option<Tensor>>,
        mode: Mode,
        weights: &Weights,
        recorder: &mut Recorder,
    ) -> Result<(Option<Tensor>, Vec<Tensor>)> {
        let mut chunks = chunks.into_iter();
        let device = self.seat.device();
        let first = chunks.next().flatten();
        for (replica, chunk) in self.replicas.iter_mut().zip(chunks) {
            if let Some(chunk) = chunk {
                replica.forward(recorder.step(), chunk, mode, weights.clone())?;
            }
        }
        let (inject, precision) = (self.options.inject.as_ref(), self.options.precision);
        let own = first.map(|chunk| {
            let chunk = match device {
                Device::Cpu => chunk,
                device => recorder.time(Phase::Scatter, || chunk.f_to_device(device))?,
            };
            timed(recorder, inject, Phase::Forward, || {
                apply::guarded(|| apply::forward(&*self.model, &chunk, mode, precision, device))
            })
        });
        let own = self.on_first_card(own.transpose());
        let others = recorder
            .time(Phase::Wait, || self.collect(|replica, waiter, spans| replica.output(waiter, spans)));
        // Only now that all have been waited for may the first card's error end the step.
        Ok((own?, others?))
    }

    /// One output from those of the cards at these positions; in training a leaf, from which backward starts.
    fn gather(
        &mut self,
        own: Option<Tensor>,
        others: Vec<Tensor>,
        worked: Vec<usize>,
        mode: Mode,
    ) -> Result<Tensor> {
        let mut outputs: Vec<Tensor> = own.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?;
        for output in others {
            outputs.push(output.f_to_device(self.seat.device())?);
        }
        let cards: Vec<usize> = worked.iter().map(|position| self.cards[*position]).collect();
        let (output, layout) = gather::gather(&outputs, &cards)?;
        if mode == Mode::Train {
            let leaf = output.f_set_requires_grad(output.is_floating_point())?;
            self.pending = Some(Pending::Gathered { leaf, own, worked, layout });
        }
        Ok(output)
    }

    /// From the loss to the gradient of the gathered output, on card 0 alone.
    fn seed(&mut self, loss: &Tensor) -> Result<Seed> {
        match self.pending.take() {
            None => Err(Error::usage("backward without a forward in training before it")),
            Some(Pending::Plain) => Ok(Seed::Plain(loss.shallow_clone())),
            Some(Pending::Gathered { leaf, own, worked, layout }) => {
                grad::backward(&[loss], &[None])?;
                let gradient = grad::grad(&leaf).ok_or_else(|| {
                    Error::usage("the loss does not depend on the output of the last forward")
                        .hint("call backward with a loss computed from that output before the next forward")
                })?;
                let slices = gather::slices(&gradient, &layout)?;
                Ok(Seed::Slices { own, slices: worked.into_iter().zip(slices).collect() })
            }
        }
    }

    /// From there to the gradients of all parameters, on all cards, and their sum on card 0.
    fn run_backward(&mut self, seed: Seed, recorder: &mut Recorder) -> Result<()> {
        let result = self.try_backward(seed, recorder);
        if result.is_err() {
            // No gradient rather than half of one.
            reduce::clear(&self.parameters)?;
        }
        result
    }

    fn try_backward(&mut self, seed: Seed, recorder: &mut Recorder) -> Result<()> {
        let inject = self.options.inject;
        let (own, slices) = match seed {
            Seed::Plain(loss) => {
                return timed(recorder, inject.as_ref(), Phase::Backward, || {
                    let nothing_to_train = self.parameters.is_empty() && !loss.requires_grad();
                    if nothing_to_train { Ok(()) } else { grad::backward(&[&loss], &[None]) }
                });
            }
            Seed::Slices { own, slices } => (own, slices),
        };
        let mut first = None;
        for (position, slice) in slices {
            match position.checked_sub(1) {
                None => first = Some(slice),
                Some(replica) => self.replicas[replica].backward(slice)?,
            }
        }
        let own = own.zip(first).map_or(Ok(()), |(output, slice)| {
            timed(recorder, inject.as_ref(), Phase::Backward, || {
                apply::guarded(|| apply::backward(&output, &slice))
            })
        });
        let own = self.on_first_card(own);
        let parameters = self.parameters();
        let worked: Vec<usize> =
            (0..self.replicas.len()).filter(|&replica| self.replicas[replica].owes_an_answer()).collect();
        let others = self.collect(|replica, waiter, spans| {
            let arrived = recorder.time(Phase::Wait, || replica.gradients(waiter, spans))?;
            match arrived {
                Arrived::Loose(gradients) => {
                    recorder.time(Phase::Reduce, || reduce::add(&parameters, gradients))?;
                    Ok(None)
                }
                Arrived::Flat(flattened) => Ok(Some(flattened)),
            }
        });
        own?;
        let flat: Vec<(usize, Flattened)> = worked
            .into_iter()
            .zip(others?)
            .filter_map(|(replica, arrived)| arrived.map(|arrived| (replica, arrived)))
            .collect();
        if flat.is_empty() {
            return Ok(());
        }
        recorder.time(Phase::Reduce, || self.reduce_flat(&parameters, flat))
    }

    /// Adds up gradients that travel flat.
    fn reduce_flat(&mut self, parameters: &[Tensor], arrived: Vec<(usize, Flattened)>) -> Result<()> {
        let Self { gradients, link, seat, parts, .. } = self;
        let Some(own) = gradients.as_mut() else { return Ok(()) };
        let mut present = own.take(parameters)?;
        for (_, Flattened { present: theirs, .. }) in &arrived {
            present.iter_mut().zip(theirs).for_each(|(any, this)| *any |= this);
        }
        let replicas: Vec<_> = arrived
            .into_iter()
            .filter_map(|(replica, Flattened { ready, .. })| {
                let parts = &parts[replica];
                Some((parts.gradients.as_ref()?, ready, parts.stream.clone()?))
            })
            .collect();
        link.reduce(seat, own, &replicas)?;
        own.give(parameters, &present)
    }

    fn on_first_card<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| error.context(format_args!("card {}", self.cards[0])))
    }

    /// Hears, in card order, the replicas that owe an answer. All are heard before the first error is reported,
    /// so that none is left working on a step that is over; a missed deadline ends it for all.
    fn collect<T>(
        &mut self,
        mut ask: impl FnMut(&mut Replica, &Waiter<'_>, &mut Vec<Timed>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let meter = self.options.meter.as_deref().map(|meter| meter.card(self.cards[0]));
        // A replica that waits for a copy itself knows better what is late, and is to be heard.
        let grace = if self.link.is_flat() { Duration::from_secs(1) } else { Duration::ZERO };
        let deadline = self.options.deadline.saturating_add(grace);
        let waiter = Waiter { meter, abort: Some(&self.abort), deadline };
        let spans = &mut self.spans;
        let owing = self.replicas.iter_mut().filter(|replica| replica.owes_an_answer());
        let answers: Vec<Result<T>> = owing.map(|replica| ask(replica, &waiter, spans)).collect();
        answers.into_iter().collect()
    }
}

/// Refuses what cannot be set up, by name.
fn check(cards: &[Card], options: &Options) -> Result<()> {
    if cards.is_empty() {
        return Err(Error::usage("DataParallel needs at least one card").hint("give the cards to run on"));
    }
    if options.dim != 0 {
        return Err(Error::usage(format!(
            "DataParallel along axis {}: only axis 0 is supported",
            options.dim
        ))
        .hint("move the axis that counts samples to the front, as with input.transpose(0, 1)"));
    }
    if let Some(weights) = &options.chunk_weights {
        if weights.len() != cards.len() {
            return Err(Error::usage(format!("{} chunk weights for {} cards", weights.len(), cards.len()))
                .hint("give one weight a card, in the order of the cards"));
        }
        if let Some(weight) = weights.iter().find(|weight| !weight.is_finite() || **weight <= 0.0) {
            return Err(Error::usage(format!("a chunk weight is {weight}"))
                .hint("weights are positive; leave a card out of the list to give it nothing"));
        }
    }
    let twice = cards
        .iter()
        .enumerate()
        .find(|(position, card)| cards[..*position].iter().any(|other| other.index() == card.index()));
    if let Some((_, card)) = twice {
        return Err(Error::usage(format!("card {} is listed twice", card.index())));
    }
    if let Some(meter) = &options.meter
        && let Some(card) = cards.iter().find(|card| card.index() >= meter.len())
    {
        return Err(Error::usage(format!(
            "card {} has no counters: the meter holds {} cards",
            card.index(),
            meter.len()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
