//! One card, no communication: the reference that the other engines must agree with.

use super::{Engine, Loss, Memory, Recipe, StepOutcome, Updater, timed};
use crate::Result;
use crate::data::Batch;
use crate::metrics::phase::{Phase, Recorder};
use crate::model::{self, Model, State};
use crate::torch::seat::Seat;
use crate::torch::{grad, no_grad};

/// Trains a model on the card of the calling thread.
pub struct Single {
    model: Box<dyn Model>,
    recipe: Recipe,
    updater: Updater,
    seat: Seat,
}

impl Single {
    /// Over this model's trainable parameters, in the host's memory.
    pub fn new(model: Box<dyn Model>, recipe: Recipe) -> Self {
        Self::at(Seat::default(), model, recipe)
    }

    /// Over the trainable parameters of a model that was built on this seat's device.
    pub fn at(seat: Seat, model: Box<dyn Model>, recipe: Recipe) -> Self {
        let parameters = model.state().parameters().map(|entry| entry.tensor.shallow_clone()).collect();
        Self { model, recipe, updater: Updater::new(recipe, parameters), seat }
    }
}

impl Engine for Single {
    fn backward(&mut self, batch: Batch, recorder: &mut Recorder) -> Result<StepOutcome> {
        let inject = self.recipe.inject.as_ref();
        let loss = self.recipe.autocast(self.seat.device(), || {
            let output = timed(recorder, inject, Phase::Forward, || self.model.forward(&batch.input, true))?;
            recorder.time(Phase::Loss, || model::loss(&output, &batch.target))
        })?;
        let value = Loss::of(&loss)?;
        let loss = self.updater.scaled(loss)?;
        timed(recorder, inject, Phase::Backward, || grad::backward(&[&loss], &[None]))?;
        self.updater.unscale()?;
        Ok(StepOutcome { loss: value, samples: batch.samples, sent_bytes: None, spans: Vec::new() })
    }

    fn update(&mut self, recorder: &mut Recorder) -> Result<()> {
        self.updater.update(recorder)
    }

    fn memory(&self) -> Memory {
        self.updater.memory(self.model.state().parameters().map(|entry| entry.name.as_str()))
    }

    fn restore(&mut self, memory: &Memory) {
        let Self { updater, model, .. } = self;
        updater.restore(model.state().parameters().map(|entry| entry.name.as_str()), memory);
    }

    fn seat(&self) -> &Seat {
        &self.seat
    }

    fn skipped_steps(&self) -> u64 {
        self.updater.skipped_steps()
    }

    fn state(&self) -> &State {
        self.model.state()
    }

    fn evaluate(&mut self, batch: Batch) -> Result<(u64, u64)> {
        let output = no_grad(|| self.model.forward(&batch.input, false))?;
        model::correct(&output, &batch.target)
    }

    fn cards(&self) -> Vec<usize> {
        vec![0]
    }
}
