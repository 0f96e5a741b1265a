//! Apply: one persistent thread for each further card, and how card 0's thread talks to it.
//!
//! A replica lives on its thread from building to dropping. Orders and answers go through channels that
//! hold one message; both sides wait for them in the shared wait primitive only. A tensor that is sent
//! belongs to the receiver from then on: no tensor is used by two threads at once, and nothing is locked.

use super::Options;
use super::link::{self, Gradients, Weights};
use super::reduce;
use super::replicate::{self, Flat, Spec};
use super::scatter;
use crate::card::Card;
use crate::card::cuda::{Event, Stream};
use crate::comm::wait::{Ended, Waiter, signal};
use crate::config::Precision;
use crate::engine::timed;
use crate::error::{Error, Kind, Result};
use crate::metrics::phase::{Phase, Recorder, Timed};
use crate::model::Model;
use crate::torch::precision::autocast;
use crate::torch::seat::Seat;
use crate::torch::{grad, memory, no_grad, threads};
use crate::units::Nanos;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;
use tch::{Device, Tensor};

/// Builds one card's model.
pub(super) type Factory = Arc<dyn Fn(usize) -> Result<Box<dyn Model>> + Send + Sync>;

/// Whether a forward is followed by a backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Train,
    Evaluate,
}

/// What card 0 asks of a replica.
enum Order {
    /// Fetch weights and these rows, and run the model on them.
    Forward { step: u64, chunk: Tensor, mode: Mode, weights: Weights },
    /// Run backward from the last output with this gradient.
    Backward { gradient: Tensor },
}

/// What a replica answers.
enum Answer {
    Built(Parts),
    Output(Tensor),
    Gradients(Arrived),
}

/// What a replica is made of, as card 0 needs to know it.
pub(super) struct Parts {
    pub(super) specs: Vec<Spec>,
    pub(super) stream: Option<Arc<Stream>>,
    /// Where its weights are.
    pub(super) weights: Flat,
    /// Where its gradients will be, if they travel flat.
    pub(super) gradients: Option<Gradients>,
}

/// A replica's gradients.
pub(super) enum Arrived {
    /// Where autograd left them, in parameter order.
    Loose(Vec<Option<Tensor>>),
    /// In its flat tensors.
    Flat(Flattened),
}

/// Gradients that travel flat.
pub(super) struct Flattened {
    /// They are complete once the card has come to it.
    pub(super) ready: Arc<Event>,
    /// Which of them there were, in parameter order.
    pub(super) present: Vec<bool>,
}

/// Two counters, of orders and of answers: what both sides wait on.
#[derive(Debug, Default)]
struct Link {
    orders: AtomicU32,
    answers: AtomicU32,
}

/// Card 0's end of a replica.
pub(super) struct Replica {
    card: usize,
    link: Arc<Link>,
    // `None` once the replica is told to end.
    orders: Option<SyncSender<Order>>,
    answers: Receiver<(Result<Answer>, Vec<Timed>)>,
    asked: u32,
    /// Whether an answer is still to come.
    owes: bool,
    thread: Option<JoinHandle<()>>,
    abort: Arc<AtomicU32>,
    patience: Duration,
}

impl Replica {
    /// Starts the thread, which builds its model at once; [`Self::built`] says how that went.
    pub(super) fn start(
        card: &Card,
        options: &Options,
        abort: &Arc<AtomicU32>,
        source: Source,
        factory: &Factory,
    ) -> Result<Self> {
        let link = Arc::new(Link::default());
        let (orders, incoming) = sync_channel(1);
        let (outgoing, answers) = sync_channel(1);
        let worker = Worker {
            card: card.clone(),
            options: options.clone(),
            abort: Arc::clone(abort),
            link: Arc::clone(&link),
            incoming,
            outgoing,
            source,
            seat: Seat::default(),
            recorder: Recorder::new(card.index()),
        };
        let factory = Arc::clone(factory);
        let thread = std::thread::Builder::new()
            .name(format!("card{}", card.index()))
            .spawn(move || worker.run(&factory))
            .map_err(|error| {
                Error::new(
                    Kind::Unavailable,
                    format!("cannot start the thread of card {}: {error}", card.index()),
                )
                .hint("lower run.cards, or raise the limit on threads")
            })?;
        Ok(Self {
            card: card.index(),
            link,
            orders: Some(orders),
            answers,
            asked: 1,
            owes: true,
            thread: Some(thread),
            abort: Arc::clone(abort),
            patience: options.deadline,
        })
    }

    /// Waits for the model to be built, and gives what it holds.
    pub(super) fn built(&mut self, waiter: &Waiter<'_>) -> Result<Parts> {
        match self.answer(waiter, &mut Vec::new())? {
            Answer::Built(parts) => Ok(parts),
            _ => Err(self.out_of_turn()),
        }
    }

    /// Sends rows off; the replica starts at once.
    pub(super) fn forward(&mut self, step: u64, chunk: Tensor, mode: Mode, weights: Weights) -> Result<()> {
        self.order(Order::Forward { step, chunk, mode, weights })
    }

    /// Waits for the output of the last [`Self::forward`].
    pub(super) fn output(&mut self, waiter: &Waiter<'_>, spans: &mut Vec<Timed>) -> Result<Tensor> {
        match self.answer(waiter, spans)? {
            Answer::Output(output) => Ok(output),
            _ => Err(self.out_of_turn()),
        }
    }

    /// Sends the output's gradient off.
    pub(super) fn backward(&mut self, gradient: Tensor) -> Result<()> {
        self.order(Order::Backward { gradient })
    }

    /// Waits for the gradients of the last [`Self::backward`], in parameter order.
    pub(super) fn gradients(&mut self, waiter: &Waiter<'_>, spans: &mut Vec<Timed>) -> Result<Arrived> {
        match self.answer(waiter, spans)? {
            Answer::Gradients(gradients) => Ok(gradients),
            _ => Err(self.out_of_turn()),
        }
    }

    fn order(&mut self, order: Order) -> Result<()> {
        let stopped = self.abort.load(Relaxed) != 0;
        if stopped || self.orders.as_ref().is_none_or(|orders| orders.try_send(order).is_err()) {
            return Err(self.lost(self.ended()));
        }
        self.asked = self.asked.wrapping_add(1);
        self.owes = true;
        signal(&self.link.orders, |orders| {
            orders.fetch_add(1, Relaxed);
        });
        Ok(())
    }

    fn answer(&mut self, waiter: &Waiter<'_>, spans: &mut Vec<Timed>) -> Result<Answer> {
        let asked = self.asked;
        self.owes = false;
        let arrived = waiter.wait(&self.link.answers, |answers| answers == asked);
        let (answer, worked) = match arrived {
            Ok(()) => self.answers.try_recv().map_err(|_| self.lost(self.ended()))?,
            Err(Ended::Aborted) => return Err(self.ended()),
            Err(Ended::Deadline) => {
                let what =
                    format!("card {} did not answer within {} s", self.card, waiter.deadline.as_secs_f64());
                let error =
                    Error::new(Kind::Timeout, what).hint("raise run.deadline_s if a step may take that long");
                return Err(self.lost(error));
            }
        };
        spans.extend(worked);
        answer.map_err(|error| error.context(format_args!("card {}", self.card)))
    }

    /// Without this card no step can be finished: nobody waits for anybody from now on.
    fn lost(&self, error: Error) -> Error {
        self.abort.store(1, Release);
        error
    }

    fn ended(&self) -> Error {
        Error::new(Kind::Worker, format!("card {} was stopped by an earlier failure", self.card))
    }

    fn out_of_turn(&self) -> Error {
        Error::new(Kind::Worker, format!("card {} answered another question than it was asked", self.card))
    }

    /// Tells the thread to end when it has finished what it is doing. Does not wait.
    pub(super) fn dismiss(&mut self) {
        self.orders = None;
        signal(&self.link.orders, |orders| {
            orders.fetch_add(1, Relaxed);
        });
    }

    /// Whether it was asked something that nobody has heard the answer to.
    pub(super) fn owes_an_answer(&self) -> bool {
        self.owes
    }

    /// The card's number.
    pub(super) fn card(&self) -> usize {
        self.card
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.dismiss();
        let Some(thread) = self.thread.take() else { return };
        if self.abort.load(Relaxed) != 0 {
            // It missed its deadline and may never return from the model: wait once more, then leave it.
            let start = Nanos::now();
            while !thread.is_finished() && u128::from(Nanos::now().since(start).0) < self.patience.as_nanos()
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !thread.is_finished() {
                return;
            }
        }
        // Panics inside were caught and reported as errors.
        let _ = thread.join();
    }
}

/// The replica's end: what its thread owns.
struct Worker {
    card: Card,
    seat: Seat,
    options: Options,
    abort: Arc<AtomicU32>,
    link: Arc<Link>,
    incoming: Receiver<Order>,
    outgoing: SyncSender<(Result<Answer>, Vec<Timed>)>,
    source: Source,
    recorder: Recorder,
}

/// Card 0's weights, and where card 0 computes.
pub(super) struct Source {
    pub(super) weights: Flat,
    pub(super) stream: Option<Arc<Stream>>,
}

/// A model on its card, between a forward and a backward.
struct Built {
    model: Box<dyn Model>,
    flat: Flat,
    parameters: Vec<Tensor>,
    gradients: Option<Gradients>,
    /// Where copies from other cards go.
    copies: Option<Stream>,
    output: Option<Tensor>,
}

impl Built {
    fn parts(&self, seat: &Seat) -> Result<Parts> {
        Ok(Parts {
            specs: replicate::specs(self.model.state()),
            stream: seat.stream().cloned(),
            weights: self.flat.source(self.flat.buffers())?,
            gradients: self.gradients.as_ref().map(Gradients::handles).transpose()?,
        })
    }
}

impl Worker {
    fn run(mut self, factory: &Factory) {
        let mut built = match guarded(|| self.build(factory)) {
            Ok(built) => built,
            Err(error) => return self.reply(Err(error)),
        };
        self.reply(built.parts(&self.seat).map(Answer::Built));
        let mut idle_since = None;
        let mut seen = 0;
        while let Some(order) = self.next_order(&mut seen) {
            if let Order::Forward { step, .. } = &order {
                self.recorder.set_step(*step);
            }
            if let Some(begun) = idle_since.take() {
                self.recorder.end(Phase::Wait, begun);
            }
            let answer = guarded(|| self.obey(&mut built, order));
            idle_since = Some(self.recorder.begin());
            self.reply(answer);
        }
    }

    fn build(&mut self, factory: &Factory) -> Result<Built> {
        let index = self.card.index();
        self.seat = Seat::take(&self.card, self.options.deadline)?;
        self.recorder = Recorder::of(index, self.seat.stream());
        memory::set_thread_card(index);
        threads::set_intra_op(self.options.threads_per_card);
        let model = factory(index)?;
        let flat = Flat::adopt(model.state())?;
        let parameters: Vec<Tensor> =
            model.state().parameters().map(|entry| entry.tensor.shallow_clone()).collect();
        let gradients = self.seat.stream().map(|_| Gradients::of(&parameters)).transpose()?;
        let copies = self.seat.stream().map(|stream| Stream::urgent(stream.context())).transpose()?;
        Ok(Built { model, flat, parameters, gradients, copies, output: None })
    }

    /// `None` when card 0's side is gone or has given up.
    fn next_order(&self, seen: &mut u32) -> Option<Order> {
        let meter = self.options.meter.as_deref().map(|meter| meter.card(self.card.index()));
        let waiter = Waiter { meter, abort: Some(&self.abort), deadline: self.options.deadline };
        loop {
            let last = *seen;
            match waiter.wait(&self.link.orders, |orders| orders != last) {
                Ok(()) => {}
                // Card 0 may take its time between steps: nothing is overdue here.
                Err(Ended::Deadline) => continue,
                Err(Ended::Aborted) => return None,
            }
            *seen = last.wrapping_add(1);
            match self.incoming.try_recv() {
                Ok(order) => return Some(order),
                Err(TryRecvError::Empty) => continue,
                Err(TryRecvError::Disconnected) => return None,
            }
        }
    }

    fn obey(&mut self, built: &mut Built, order: Order) -> Result<Answer> {
        match order {
            Order::Forward { chunk, mode, weights, .. } => {
                self.forward(built, chunk, mode, &weights).map(Answer::Output)
            }
            Order::Backward { gradient } => self.backward(built, gradient).map(Answer::Gradients),
        }
    }

    fn forward(&mut self, built: &mut Built, chunk: Tensor, mode: Mode, weights: &Weights) -> Result<Tensor> {
        built.output = None;
        let Self { seat, source, .. } = self;
        let input = self.recorder.time(Phase::Scatter, || scatter::fetch(&chunk, seat.device()))?;
        drop(chunk);
        self.recorder.time(Phase::Replicate, || {
            let (copies, from) = (built.copies.as_ref(), source.stream.as_deref());
            weights.fetch(seat, copies, &mut built.flat, &source.weights, from)
        })?;
        let device = seat.device();
        let (inject, precision) = (self.options.inject.as_ref(), self.options.precision);
        let output = timed(&mut self.recorder, inject, Phase::Forward, || {
            forward(&*built.model, &input, mode, precision, device)
        })?;
        let data = output.f_detach()?;
        built.output = (mode == Mode::Train).then_some(output);
        Ok(data)
    }

    fn backward(&mut self, built: &mut Built, gradient: Tensor) -> Result<Arrived> {
        let Some(output) = built.output.take() else {
            return Err(Error::usage("backward without a forward in training before it"));
        };
        let device = self.seat.device();
        let own = self.recorder.time(Phase::Scatter, || scatter::fetch(&gradient, device))?;
        drop(gradient);
        let inject = self.options.inject.as_ref();
        timed(&mut self.recorder, inject, Phase::Backward, || backward(&output, &own))?;
        match &mut built.gradients {
            None => Ok(Arrived::Loose(reduce::take(&built.parameters)?)),
            Some(gradients) => self.recorder.time(Phase::Reduce, || {
                let present = gradients.take(&built.parameters)?;
                Ok(Arrived::Flat(Flattened { ready: link::moment(&self.seat)?, present }))
            }),
        }
    }

    fn reply(&mut self, answer: Result<Answer>) {
        // A closed channel means that card 0's side is gone: the next wait for an order ends the thread.
        let _ = self.outgoing.try_send((answer, self.recorder.drain()));
        signal(&self.link.answers, |answers| {
            answers.fetch_add(1, Relaxed);
        });
    }
}

/// One card's forward.
pub(super) fn forward(
    model: &dyn Model,
    input: &Tensor,
    mode: Mode,
    precision: Precision,
    device: Device,
) -> Result<Tensor> {
    match mode {
        Mode::Train => autocast(precision, device, || model.forward(input, true)),
        Mode::Evaluate => no_grad(|| model.forward(input, false)),
    }
}

/// One card's backward; nothing to do for an output that no parameter went into.
pub(super) fn backward(output: &Tensor, gradient: &Tensor) -> Result<()> {
    if output.requires_grad() { grad::backward(&[output], &[Some(gradient)]) } else { Ok(()) }
}

/// Runs `work`, with a panic turned into an error.
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    // What a panic may have left half done belongs to the model, which is the caller's to judge.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(&*panic)))
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::new(Kind::Worker, format!("panicked: {}", text.unwrap_or("no message")))
}
