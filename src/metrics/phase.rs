//! Phases of a step: named spans of one card's time, taken with plain clock reads.
//!
//! No barrier and no device synchronisation exists for timing alone. A recorder belongs to one thread.

use crate::units::Nanos;
use serde::{Deserialize, Serialize};

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
    spans: Vec<Span>,
}

impl Recorder {
    /// A recorder for this card.
    pub fn new(card: usize) -> Self {
        Self { card, step: 0, spans: Vec::new() }
    }

    /// The card it records for.
    pub fn card(&self) -> usize {
        self.card
    }

    /// The step that spans belong to now.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Spans from now on belong to this step.
    pub fn set_step(&mut self, step: u64) {
        self.step = step;
    }

    /// Runs `work` and records it as `phase`, also when it fails.
    pub fn time<T>(&mut self, phase: Phase, work: impl FnOnce() -> T) -> T {
        let start = Nanos::now();
        let result = work();
        self.push(phase, start, Nanos::now());
        result
    }

    /// Records a span that was timed elsewhere.
    pub fn push(&mut self, phase: Phase, start: Nanos, end: Nanos) {
        self.spans.push(Span { step: self.step, card: self.card, phase, start, duration: end.since(start) });
    }

    /// Hands over what was recorded so far.
    pub fn drain(&mut self) -> Vec<Span> {
        std::mem::take(&mut self.spans)
    }
}
