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
use crate::metrics::phase::{Recorder, Timed};
use crate::model::State;
use crate::torch::seat::Seat;
use tch::{Device, Tensor};

/// One way to run a training step. A value of this trait lives in one process and works for one or
/// more cards.
pub trait Engine {
    /// Forward and backward on this process's part of the global batch. Afterwards the gradients of
    /// [`Self::state`] are those of the mean loss over the global batch, on every process. Phases of the
    /// calling thread go to `recorder`; those of other threads come back in the outcome.
    fn backward(&mut self, batch: Batch, recorder: &mut Recorder) -> Result<StepOutcome>;

    /// Turns the gradients into new weights, and forgets them.
    fn update(&mut self, recorder: &mut Recorder) -> Result<()>;

    /// Waits until the cards have done all that they were asked for, at most until the deadline. Once a step.
    fn synchronize(&mut self) -> Result<()> {
        self.seat().synchronize()
    }

    /// Where the calling thread works: at the first of [`Self::cards`].
    fn seat(&self) -> &Seat;

    /// How weights and gradients travel between its cards; `None` for a single one.
    fn link(&self) -> Option<&'static str> {
        None
    }

    /// Where batches are to be brought before they are handed in.
    fn batch_device(&self) -> Device {
        self.seat().device()
    }

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
    /// Over this process's samples.
    pub loss: Loss,
    /// Rows of this process's part: the weight of `loss`.
    pub samples: usize,
    /// Bytes of gradients that this process gave to others; `None` where nobody counts them.
    pub sent_bytes: Option<u64>,
    /// Phases of other threads of this process that ended since the last step.
    pub spans: Vec<Timed>,
}

/// A mean loss that the card may still be computing.
#[derive(Debug, Default)]
pub struct Loss {
    parts: Vec<Tensor>,
    factor: f64,
}

impl Loss {
    /// This scalar.
    pub fn of(loss: &Tensor) -> Result<Self> {
        let mut whole = Self::default();
        whole.add(loss)?;
        Ok(whole.times(1.0))
    }

    /// The sum of what there is and this scalar.
    pub fn add(&mut self, loss: &Tensor) -> Result<()> {
        self.parts.push(loss.f_detach()?);
        Ok(())
    }

    /// The sum times a factor.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// Its value; waits for the card.
    pub fn value(&self) -> Result<f64> {
        let sum: f64 = self.parts.iter().map(|part| Ok(part.f_double_value(&[])?)).sum::<Result<f64>>()?;
        Ok(sum * self.factor)
    }
}
