//! What all engines share: the trait, the loop that warms up and measures, and the `single` engine.
//!
//! Engines differ in how they come by gradients ([`Engine::backward`]); what is done with them
//! ([`Updater`]) is the same for all, and the loop never asks which engine it drives.

mod burn;
mod run_loop;
mod single;
mod update;

pub use burn::{burn, timed};
pub use run_loop::{Event, RunLoop, StepEvent};
pub use single::Single;
pub use update::{Memory, Recipe, Updater};

use crate::Result;
use crate::data::Batch;
use crate::metrics::phase::{Recorder, Span};
use crate::model::State;

/// One way to run a training step. A value of this trait lives in one process and works for one or
/// more cards.
pub trait Engine {
    /// Forward and backward on this process's part of the global batch. Afterwards the gradients of
    /// [`Self::state`] are those of the mean loss over the global batch, on every process. Phases of the
    /// calling thread go to `recorder`; those of other threads come back in the outcome.
    fn backward(&mut self, batch: Batch, recorder: &mut Recorder) -> Result<StepOutcome>;

    /// Turns the gradients into new weights, and forgets them.
    fn update(&mut self, recorder: &mut Recorder) -> Result<()>;

    /// Updates that were left out because float16 could not hold their gradients.
    fn skipped_steps(&self) -> u64 {
        0
    }

    /// What updates remember, for a checkpoint.
    fn memory(&self) -> Memory;

    /// Goes on from what [`Self::memory`] gave, of this engine or another.
    fn restore(&mut self, memory: &Memory);

    /// The weights (of card 0, or of this rank).
    fn state(&self) -> &State;

    /// Right predictions, out of how many, on a batch; no gradients.
    fn evaluate(&mut self, batch: Batch) -> Result<(u64, u64)>;

    /// Cards this process works for; the calling thread works for the first of them.
    fn cards(&self) -> Vec<usize>;
}

/// What one backward gave.
#[derive(Debug)]
pub struct StepOutcome {
    /// Mean loss over this process's samples.
    pub loss: f64,
    /// Rows of this process's part: the weight of `loss`.
    pub samples: usize,
    /// Bytes of gradients that this process gave to others; `None` where nobody counts them.
    pub sent_bytes: Option<u64>,
    /// Phases of other threads of this process that ended since the last step.
    pub spans: Vec<Span>,
}
