//! Phases of a step: named spans of one card's time. The host's part is taken with plain clock reads, a
//! CUDA card's with events in its stream, which have a time once the card has come past them.
//!
//! No barrier and no device synchronisation exists for timing alone. A recorder belongs to one thread.

use crate::card::cuda::{Mark, Stream, Timeline};
use crate::error::{Error, Kind, Result};
use crate::units::Nanos;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A named part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Waiting for, or preparing, the batch.
    Data,
    /// A card's chunk of the batch reaches it.
    Scatter,
    /// A card copies the weights from card 0.
    Replicate,
    /// Forward pass.
    Forward,
    /// Outputs reach card 0.
    Gather,
    /// Loss, and in `dp` its gradient with respect to the gathered output.
    Loss,
    /// Backward pass.
    Backward,
    /// Card 0 sums the gradients of all cards.
    Reduce,
    /// One bucket's all-reduce, on the communication thread.
    AllReduce,
    /// Optimiser step.
    Update,
    /// Nothing to do until another card is ready.
    Wait,
}

impl Phase {
    /// In the order in which a step runs them.
    pub const ALL: [Self; 11] = [
        Self::Data,
        Self::Scatter,
        Self::Replicate,
        Self::Forward,
        Self::Gather,
        Self::Loss,
        Self::Backward,
        Self::Reduce,
        Self::AllReduce,
        Self::Update,
        Self::Wait,
    ];

    /// The name used in files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Scatter => "scatter",
            Self::Replicate => "replicate",
            Self::Forward => "forward",
            Self::Gather => "gather",
            Self::Loss => "loss",
            Self::Backward => "backward",
            Self::Reduce => "reduce",
            Self::AllReduce => "all_reduce",
            Self::Update => "update",
            Self::Wait => "wait",
        }
    }

    /// Whether it moves data between cards.
    pub fn is_communication(self) -> bool {
        matches!(self, Self::Scatter | Self::Replicate | Self::Gather | Self::Reduce | Self::AllReduce)
    }
}

/// One phase of one step on one card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Step of the round, warm-up included.
    pub step: u64,
    /// Card (position in the run's card list).
    pub card: usize,
    /// Which phase.
    pub phase: Phase,
    /// Start, CLOCK_MONOTONIC.
    pub start: Nanos,
    /// Length.
    pub duration: Nanos,
    /// How long the host took to ask for it, where the card did it by itself; `None` where the host did it.
    #[serde(default)]
    pub issue: Option<Nanos>,
}

/// A span whose card may not have come to its end yet.
#[derive(Debug)]
pub enum Timed {
    /// The host did it: its times are known.
    Known(Span),
    /// A card does it. The span has the host's times, of asking for it.
    Marked {
        /// Of the host.
        span: Span,
        /// Where it begins in the card's stream.
        begin: Mark,
        /// Where it ends.
        end: Mark,
    },
    /// It could not be marked.
    Lost(Error),
}

impl Timed {
    /// The step it belongs to; the last one there is for what was lost.
    pub fn step(&self) -> u64 {
        match self {
            Self::Known(span) | Self::Marked { span, .. } => span.step,
            Self::Lost(_) => u64::MAX,
        }
    }

    /// The span, of a card that has been waited for.
    pub fn span(self) -> Result<Span> {
        match self {
            Self::Known(span) => Ok(span),
            Self::Marked { span, begin, end } => {
                let interval = begin.until(&end)?.ok_or_else(|| {
                    Error::new(
                        Kind::Worker,
                        format!("card {}: {} has not ended", span.card, span.phase.name()),
                    )
                })?;
                let duration = interval.end.since(interval.start);
                Ok(Span { start: interval.start, duration, issue: Some(span.duration), ..span })
            }
            Self::Lost(error) => Err(error),
        }
    }
}

/// The spans, of cards that have been waited for.
pub fn settle(timed: impl IntoIterator<Item = Timed>) -> Result<Vec<Span>> {
    timed.into_iter().map(Timed::span).collect()
}

/// One step of one process, as its worker reports it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// From 0, warm-up included.
    pub step: u64,
    /// Mean over this process's samples; `None` when it had none.
    pub loss: Option<f64>,
    /// Rows of this process: the weight of `loss`.
    pub samples: u64,
    /// Of these, rows that only fill up the epoch's last batch: not new samples.
    pub repeated: u64,
    /// Bytes of gradients that it gave to the others; `None` where nobody counts them.
    #[serde(default)]
    pub sent_bytes: Option<u64>,
    /// Before the batch was asked for.
    pub start: Nanos,
    /// After the update, device idle.
    pub end: Nanos,
    /// Phases of all its threads that ended since the last report.
    pub spans: Vec<Span>,
}

/// What one card's threads did between the first and the last measured step, read by their own process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardTotals {
    /// Card (position in the run's card list).
    pub card: usize,
    /// Cores it has: what utilisation is a share of.
    pub cores: usize,
    /// Length of the window.
    pub wall: Nanos,
    /// CPU time of its threads.
    pub on_cpu: Nanos,
    /// The part of `on_cpu` that was burnt inside the wait primitive.
    pub wait_cpu: Nanos,
    /// Most bytes alive at once; `None` where memory is not counted.
    pub memory_peak_bytes: Option<u64>,
}

/// Collects the spans of one thread of one card.
#[derive(Debug)]
pub struct Recorder {
    card: usize,
    step: u64,
    spans: Vec<Timed>,
    timeline: Option<Timeline>,
}

/// A phase that has begun.
#[derive(Debug)]
pub struct Begun {
    at: Nanos,
    mark: Option<Mark>,
}

impl Recorder {
    /// A recorder for what the calling thread does for this card.
    pub fn new(card: usize) -> Self {
        Self { card, step: 0, spans: Vec::new(), timeline: None }
    }

    /// A recorder for what this card does in a stream; for what the thread does where there is none.
    pub fn of(card: usize, stream: Option<&Arc<Stream>>) -> Self {
        Self { timeline: stream.map(|stream| Timeline::new(Arc::clone(stream))), ..Self::new(card) }
    }

    /// The card it records for.
    pub fn card(&self) -> usize {
        self.card
    }

    /// The stream it marks.
    pub fn stream(&self) -> Option<&Arc<Stream>> {
        self.timeline.as_ref().map(Timeline::stream)
    }

    /// The step that spans belong to now.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Spans from now on belong to this step. The card is idle at the start of one, which is when its time
    /// and the host's are tied.
    pub fn set_step(&mut self, step: u64) {
        let begins = step != self.step || self.spans.is_empty();
        self.step = step;
        if let Some(Err(error)) = self.timeline.as_mut().filter(|_| begins).map(Timeline::anchor) {
            self.lose(error);
        }
    }

    /// Runs `work` and records it as `phase`, also when it fails.
    pub fn time<T>(&mut self, phase: Phase, work: impl FnOnce() -> T) -> T {
        let begun = self.begin();
        let result = work();
        self.end(phase, begun);
        result
    }

    /// A phase begins whose name will be told at its end.
    pub fn begin(&mut self) -> Begun {
        Begun { at: Nanos::now(), mark: self.mark() }
    }

    /// It ends.
    pub fn end(&mut self, phase: Phase, Begun { at, mark }: Begun) {
        let duration = Nanos::now().since(at);
        let span = Span { step: self.step, card: self.card, phase, start: at, duration, issue: None };
        let timed = match mark.and_then(|begin| Some((begin, self.mark()?))) {
            Some((begin, end)) => Timed::Marked { span, begin, end },
            None => Timed::Known(span),
        };
        self.spans.push(timed);
    }

    /// Hands over what was recorded so far.
    pub fn drain(&mut self) -> Vec<Timed> {
        std::mem::take(&mut self.spans)
    }

    fn mark(&mut self) -> Option<Mark> {
        match self.timeline.as_mut().map(Timeline::mark)? {
            Ok(mark) => Some(mark),
            Err(error) => {
                self.lose(error);
                None
            }
        }
    }

    /// Without its marks a step is not worth reporting: whoever asks for the spans hears why.
    fn lose(&mut self, error: Error) {
        self.timeline = None;
        self.spans.push(Timed::Lost(error));
    }
}
