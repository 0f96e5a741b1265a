//! The `ddp` engine: the wrapper as the run loop drives it.

use super::{DistributedDataParallel, Options, Share};
use crate::comm::Collective;
use crate::config::DdpPlan;
use crate::data::Batch;
use crate::engine::{Engine, Loss, Memory, Recipe, StepOutcome, Updater, timed};
use crate::metrics::phase::{Phase, Recorder};
use crate::model::{self, Model, State};
use crate::torch::seat::Seat;
use crate::{Error, Result};
use tch::{Kind, Tensor};

/// One rank: its own replica and optimiser, on the card of the calling thread.
pub struct DdpEngine {
    ddp: DistributedDataParallel<Box<dyn Model>>,
    recipe: Recipe,
    updater: Updater,
    accumulate: usize,
    sync_batch_norm: bool,
    join: bool,
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
        Ok(Self { ddp, recipe, updater, accumulate: 1, sync_batch_norm: false, join: false, card })
    }

    /// Follows those options of the plan that are not the wrapper's: `accumulate` cuts every batch into so
    /// many micro-batches, of which only the last one communicates; `join` asks all ranks in every step how
    /// many samples they have, and weighs by that.
    pub fn following(mut self, plan: &DdpPlan) -> Self {
        self.accumulate = plan.accumulate.max(1);
        self.sync_batch_norm = plan.sync_batch_norm;
        self.join = plan.join;
        if self.sync_batch_norm {
            self.ddp.convert_sync_batch_norm();
        }
        self
    }

    /// The wrapper.
    pub fn ddp(&self) -> &DistributedDataParallel<Box<dyn Model>> {
        &self.ddp
    }
}

/// Input and target of each micro-batch, as `tensor.chunk` cuts them.
fn micro_batches(batch: &Batch, count: usize) -> Result<Vec<(Tensor, Tensor)>> {
    let cut = |tensor: &Tensor| tensor.f_chunk(count as i64, 0);
    Ok(cut(&batch.input)?.into_iter().zip(cut(&batch.target)?).collect())
}

/// The mean loss over `target`'s rows times `weight`; without rows a zero that reaches all weights.
fn weighted_loss(output: &Tensor, target: &Tensor, weight: f64) -> Result<Tensor> {
    if target.size()[0] == 0 {
        return Ok(output.f_sum(Kind::Float)?);
    }
    let loss = model::loss(output, target)?;
    // Exact ones are left out, so that nothing is spent where there is nothing to weigh.
    Ok(if weight == 1.0 { loss } else { loss.f_mul_scalar(weight)? })
}

impl Engine for DdpEngine {
    fn backward(&mut self, batch: Batch, recorder: &mut Recorder) -> Result<StepOutcome> {
        let Self { ddp, recipe, updater, accumulate, sync_batch_norm, join, .. } = self;
        let inject = recipe.inject.as_ref();
        let device = ddp.seat().device();
        let sent = ddp.bytes_sent();
        let mine = batch.samples;
        let global = if *join {
            recorder.time(Phase::Wait, || ddp.count(mine as u64))?.into_iter().sum::<u64>() as usize
        } else {
            batch.global_samples
        };
        let mut parts = if mine > 0 { micro_batches(&batch, *accumulate)? } else { Vec::new() };
        // By samples: equal shares come out as 1/world_size, and uneven ranks as one process on all of them.
        let share = if *sync_batch_norm {
            // Statistics are shared: all ranks come to every forward.
            let none = || Ok::<_, Error>((batch.input.f_narrow(0, 0, 0)?, batch.target.f_narrow(0, 0, 0)?));
            while parts.len() < *accumulate {
                parts.push(none()?);
            }
            Share::Weighted
        } else {
            Share::Samples { mine, global }
        };
        let whole = if *sync_batch_norm { global } else { mine };
        let mut value = Loss::default();
        let mut last = None;
        for (input, target) in parts {
            if let Some(loss) = last.take() {
                timed(recorder, inject, Phase::Backward, || ddp.backward_no_sync(&loss))?;
            }
            let loss = recipe.autocast(device, || {
                let forward = || ddp.forward(|model| model.forward(&input, true));
                let output = timed(recorder, inject, Phase::Forward, forward)?;
                recorder.time(Phase::Loss, || {
                    let loss = weighted_loss(&output, &target, target.size()[0] as f64 / whole as f64)?;
                    value.add(&loss)?;
                    Ok(loss)
                })
            })?;
            last = Some(updater.scaled(loss)?);
        }
        timed(recorder, inject, Phase::Backward, || ddp.begin_backward(last.as_ref(), share))?;
        recorder.time(Phase::Wait, || ddp.finish_backward())?;
        updater.unscale()?;
        Ok(StepOutcome {
            // Weighted over this rank's samples.
            loss: value.times(whole as f64 / mine.max(1) as f64),
            samples: mine,
            sent_bytes: Some(ddp.bytes_sent() - sent),
            spans: ddp.take_spans(),
        })
    }

    fn update(&mut self, recorder: &mut Recorder) -> Result<()> {
        self.updater.update(recorder)
    }

    fn memory(&self) -> Memory {
        self.updater.memory(self.ddp.module().state().parameters().map(|entry| entry.name.as_str()))
    }

    fn restore(&mut self, memory: &Memory) {
        let Self { updater, ddp, .. } = self;
        updater.restore(ddp.module().state().parameters().map(|entry| entry.name.as_str()), memory);
    }

    fn seat(&self) -> &Seat {
        self.ddp.seat()
    }

    fn link(&self) -> Option<&'static str> {
        Some(self.ddp.link())
    }

    fn synchronize(&mut self) -> Result<()> {
        self.ddp.synchronize()
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
