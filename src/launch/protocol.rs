//! What parent and worker tell each other: one job down the worker's standard input, then messages up
//! its standard output, one JSON value a line.
//!
//! The worker's standard input stays open as long as the parent lives: its end is how a worker learns
//! that nobody listens any more.

use crate::config::{EngineKind, Layout, Plan};
use crate::error::{Error, Kind};
use crate::metrics::phase::{CardTotals, StepReport};
use crate::metrics::record::CardInfo;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What one worker is to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The whole plan.
    pub plan: Plan,
    /// Engine to run.
    pub engine: EngineKind,
    /// Round, from 0.
    pub round: usize,
    /// This process.
    pub rank: usize,
    /// Processes of this engine.
    pub world_size: usize,
    /// Cards of the engine, all ranks together, in rank order.
    pub cards: Vec<CardInfo>,
    /// Where ranks meet; `None` for a single process.
    pub store: Option<StoreAddress>,
    /// Shared counters of all cards, as `/proc/PID/fd/N`; `None` counts for nobody.
    pub meter: Option<PathBuf>,
    /// Weights to start from, in place of the seed's.
    pub init: Option<PathBuf>,
    /// Where rank 0 leaves the weights it starts from.
    pub save_initial: Option<PathBuf>,
    /// Where rank 0 leaves the gradients of its first step, as they are before they are clipped.
    pub save_gradients: Option<PathBuf>,
    /// Where rank 0 leaves the weights of the end.
    pub save_final: Option<PathBuf>,
    /// How long it runs.
    pub mode: Mode,
}

impl Job {
    /// Positions, in the run's card list, of the cards this process works for: all of them where one
    /// process drives the engine, else the one at its rank.
    pub fn own_cards(&self) -> &[CardInfo] {
        match self.engine.layout() {
            Layout::ProcessPerCard => self.cards.get(self.rank..=self.rank).unwrap_or_default(),
            Layout::OneCard | Layout::OneProcess => &self.cards,
        }
    }
}

/// How long a worker runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The plan's warm-up and measured steps.
    Compare,
    /// Whole epochs, with a test after each.
    Train {
        /// How many.
        epochs: u64,
    },
}

/// Where the ranks of a job find each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreAddress {
    /// A file that all ranks can open: one host.
    File(PathBuf),
    /// A TCP store.
    Tcp {
        /// Host of rank 0, or of the agent.
        host: String,
        /// Its port.
        port: u16,
        /// Whether this process serves it.
        serve: bool,
    },
}

/// What a worker says, in this order; [`Message::Failed`] may come at any time and is the last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum Message {
    /// Model, data and connections stand.
    Ready {
        /// How weights and gradients travel between its cards; `None` for a single one, and where nobody tells.
        #[serde(default)]
        link: Option<String>,
    },
    /// A training goes on where another one stopped.
    Resumed {
        /// Epochs that are done already.
        epochs: u64,
    },
    /// Warm-up is over.
    MeasuringStarts,
    /// A step ended.
    Step(StepReport),
    /// The last measured step ended.
    MeasuringEnds,
    /// One card's account of the measured steps.
    CardTotals(CardTotals),
    /// An epoch was tested on this rank's share of the test data.
    Evaluated {
        /// From 1.
        epoch: u64,
        /// Right predictions.
        correct: u64,
        /// Predictions.
        total: u64,
    },
    /// Weights after the last step.
    Weights {
        /// Equal exactly when the weights are bit-equal.
        digest: String,
        /// Updates that were left out because float16 could not hold their gradients.
        #[serde(default)]
        skipped_steps: u64,
    },
    /// It cannot go on.
    Failed {
        /// Sort of failure.
        kind: Kind,
        /// What failed.
        error: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// All is said.
    Done,
}

impl From<&Error> for Message {
    fn from(error: &Error) -> Self {
        Self::Failed { kind: error.kind(), error: error.to_string(), hint: error.advice().map(str::to_owned) }
    }
}
