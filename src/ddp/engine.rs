//! The `ddp` engine: the wrapper as the run loop drives it.

use super::{DistributedDataParallel, Options, Share};
use crate::Result;
use crate::comm::Collective;
use crate::data::Batch;
use crate::engine::{Engine, Recipe, StepOutcome, Updater, timed};
use crate::metrics::phase::{Phase, Recorder};
use crate::model::{self, Model, State};
use tch::Tensor;

/// One rank: its own replica and optimiser, on the card of the calling thread.
pub struct DdpEngine {
    ddp: DistributedDataParallel<Box<dyn Model>>,
    recipe: Recipe,
    updater: Updater,
    accumulate: usize,
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
        Ok(Self { ddp, recipe, updater, accumulate: 1, card })
    }

    /// Cuts every batch into this many micro-batches, of which only the last one communicates.
    pub fn accumulating(mut self, micro_batches: usize) -> Self {
        self.accumulate = micro_batches.max(1);
        self
    }

    /// The wrapper.
    pub fn ddp(&self) -> &DistributedDataParallel<Box<dyn Model>> {
        &self.ddp
    }
}

/// Input and target of each micro-batch, as `tensor.chunk` cuts them; none of an empty batch.
fn micro_batches(batch: &Batch, count: usize) -> Result<Vec<(Tensor, Tensor)>> {
    if batch.samples == 0 {
        return Ok(Vec::new());
    }
    let cut = |tensor: &Tensor| tensor.f_chunk(count as i64, 0);
    Ok(cut(&batch.input)?.into_iter().zip(cut(&batch.target)?).collect())
}

impl Engine for DdpEngine {
    fn backward(&mut self, batch: Batch, recorder: &mut Recorder) -> Result<StepOutcome> {
        let Self { ddp, recipe, updater, accumulate, .. } = self;
        let inject = recipe.inject.as_ref();
        // By samples: equal shares come out as 1/world_size, and uneven ranks as one process on all of them.
        let share = Share::Samples { mine: batch.samples, global: batch.global_samples };
        let mut value = 0.0;
        let mut last = None;
        for (input, target) in micro_batches(&batch, *accumulate)? {
            if let Some(loss) = last.take() {
                timed(recorder, inject, Phase::Backward, || ddp.backward_no_sync(&loss))?;
            }
            let loss = recipe.autocast(|| {
                let forward = || ddp.forward(|model| model.forward(&input, true));
                let output = timed(recorder, inject, Phase::Forward, forward)?;
                recorder.time(Phase::Loss, || -> Result<_> {
                    let mut loss = model::loss(&output, &target)?;
                    if *accumulate > 1 {
                        // So that the sum over micro-batches is the mean over this rank's samples.
                        let part = target.size()[0] as f64 / batch.samples as f64;
                        loss = loss.f_mul_scalar(part)?;
                    }
                    value += loss.f_double_value(&[])?;
                    Ok(loss)
                })
            })?;
            last = Some(updater.scaled(loss)?);
        }
        let sent = ddp.bytes_sent();
        timed(recorder, inject, Phase::Backward, || ddp.begin_backward(last.as_ref(), share))?;
        recorder.time(Phase::Wait, || ddp.finish_backward())?;
        updater.unscale()?;
        Ok(StepOutcome {
            loss: value,
            samples: batch.samples,
            sent_bytes: Some(ddp.bytes_sent() - sent),
            spans: ddp.take_spans(),
        })
    }

    fn update(&mut self, recorder: &mut Recorder) -> Result<()> {
        self.updater.update(recorder)
    }

    fn skipped_steps(&self) -> u64 {
        self.updater.skipped_steps()
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
