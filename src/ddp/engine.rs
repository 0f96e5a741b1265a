//! The `ddp` engine: the wrapper as the run loop drives it.

use super::{DistributedDataParallel, Options, Share};
use crate::Result;
use crate::comm::Collective;
use crate::data::Batch;
use crate::engine::{Engine, Recipe, StepOutcome, Updater, timed};
use crate::metrics::phase::{Phase, Recorder};
use crate::model::{self, Model, State};

/// One rank: its own replica and optimiser, on the card of the calling thread.
pub struct DdpEngine {
    ddp: DistributedDataParallel<Box<dyn Model>>,
    recipe: Recipe,
    updater: Updater,
    card: usize,
}

impl DdpEngine {
    /// Joins `model` to those of the other ranks: rank 0's weights win.
    pub fn new(
        model: Box<dyn Model>,
        collective: Box<dyn Collective>,
        options: Options,
        recipe: impl Into<Recipe>,
    ) -> Result<Self> {
        let recipe = recipe.into();
        let card = options.card;
        let ddp = DistributedDataParallel::new(model, collective, options)?;
        let updater = Updater::new(recipe, ddp.parameters());
        Ok(Self { ddp, recipe, updater, card })
    }

    /// The wrapper.
    pub fn ddp(&self) -> &DistributedDataParallel<Box<dyn Model>> {
        &self.ddp
    }
}

impl Engine for DdpEngine {
    fn backward(&mut self, batch: Batch, recorder: &mut Recorder) -> Result<StepOutcome> {
        let Self { ddp, recipe, .. } = self;
        let inject = recipe.inject.as_ref();
        // By samples: equal shares come out as 1/world_size, and uneven ranks as one process on all of them.
        let share = Share::Samples { mine: batch.samples, global: batch.global_samples };
        let mut value = 0.0;
        let loss = if batch.samples == 0 {
            None
        } else {
            let forward = || ddp.forward(|model| model.forward(&batch.input, true));
            let output = timed(recorder, inject, Phase::Forward, forward)?;
            let loss = recorder.time(Phase::Loss, || -> Result<_> {
                let loss = model::loss(&output, &batch.target)?;
                value = loss.f_double_value(&[])?;
                Ok(loss)
            })?;
            Some(loss)
        };
        timed(recorder, inject, Phase::Backward, || ddp.begin_backward(loss.as_ref(), share))?;
        recorder.time(Phase::Wait, || ddp.finish_backward())?;
        Ok(StepOutcome { loss: value, samples: batch.samples, spans: ddp.take_spans() })
    }

    fn update(&mut self, recorder: &mut Recorder) -> Result<()> {
        self.updater.update(recorder)
    }

    fn state(&self) -> &State {
        self.ddp.module().state()
    }

    fn evaluate(&mut self, batch: Batch) -> Result<(u64, u64)> {
        let output = tch::no_grad(|| self.ddp.module().forward(&batch.input, false))?;
        model::correct(&output, &batch.target)
    }

    fn cards(&self) -> Vec<usize> {
        vec![self.card]
    }
}
