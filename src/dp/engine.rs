//! DataParallel as an engine of the run loop: the phases of a step, timed on every card.

use super::apply::Mode;
use super::{DataParallel, Options};
use crate::card::Card;
use crate::data::Batch;
use crate::engine::{Engine, Loss, Memory, Recipe, StepOutcome, Updater};
use crate::error::Result;
use crate::metrics::phase::{Phase, Recorder};
use crate::model::{self, Model, State};
use crate::torch::precision::autocast;
use crate::torch::seat::Seat;
use tch::Device;

/// Trains one model on all cards from the calling thread, which works for the first of them.
pub struct DpEngine {
    parallel: DataParallel,
    updater: Updater,
}

impl DpEngine {
    /// As [`DataParallel::new`], with an optimiser over card 0's parameters.
    pub fn new<C: Clone + Into<Card>>(
        cards: &[C],
        options: Options,
        recipe: impl Into<Recipe>,
        factory: impl Fn(usize) -> Result<Box<dyn Model>> + Send + Sync + 'static,
    ) -> Result<Self> {
        let recipe = recipe.into();
        let options = Options { precision: recipe.precision, ..options };
        let parallel = DataParallel::new(cards, options, factory)?;
        let updater = Updater::new(recipe, parallel.parameters());
        Ok(Self { parallel, updater })
    }
}

impl Engine for DpEngine {
    fn backward(&mut self, batch: Batch, recorder: &mut Recorder) -> Result<StepOutcome> {
        let gathered = self.parallel.run_forward(&batch.input, Mode::Train, recorder)?;
        let (precision, device) = (self.parallel.options.precision, self.parallel.seat().device());
        let (loss, seed) = recorder.time(Phase::Loss, || -> Result<_> {
            let target = batch.target.f_to_device(device)?;
            let loss = autocast(precision, device, || model::loss(&gathered.output, &target))?;
            Ok((Loss::of(&loss)?, self.parallel.seed(&self.updater.scaled(loss)?)?))
        })?;
        self.parallel.run_backward(seed, recorder)?;
        self.updater.unscale()?;
        Ok(StepOutcome {
            loss,
            samples: batch.samples,
            sent_bytes: None,
            spans: std::mem::take(&mut self.parallel.spans),
        })
    }

    fn update(&mut self, recorder: &mut Recorder) -> Result<()> {
        self.updater.update(recorder)
    }

    fn memory(&self) -> Memory {
        self.updater.memory(self.parallel.state().parameters().map(|entry| entry.name.as_str()))
    }

    fn restore(&mut self, memory: &Memory) {
        let Self { updater, parallel } = self;
        updater.restore(parallel.state().parameters().map(|entry| entry.name.as_str()), memory);
    }

    fn seat(&self) -> &Seat {
        self.parallel.seat()
    }

    /// The host's: chunks go to each card from there.
    fn batch_device(&self) -> Device {
        Device::Cpu
    }

    fn link(&self) -> Option<&'static str> {
        (self.parallel.cards().len() > 1).then(|| self.parallel.link())
    }

    fn synchronize(&mut self) -> Result<()> {
        self.parallel.synchronize()
    }

    fn skipped_steps(&self) -> u64 {
        self.updater.skipped_steps()
    }

    fn state(&self) -> &State {
        self.parallel.state()
    }

    fn evaluate(&mut self, batch: Batch) -> Result<(u64, u64)> {
        let gathered = self.parallel.evaluate(&batch.input)?;
        self.parallel.spans.clear();
        model::correct(&gathered.output, &batch.target.f_to_device(self.parallel.seat().device())?)
    }

    fn cards(&self) -> Vec<usize> {
        self.parallel.cards().to_vec()
    }
}
