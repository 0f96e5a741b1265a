//! Uneven inputs: PyTorch's `Join`. A rank that has run out keeps the others company until all have.
//!
//! Costs one small exchange a step: who still has a batch.

use super::core::lock;
use super::module::Module;
use super::{DistributedDataParallel, Share};
use crate::torch::grad;
use crate::{Error, Result};

/// By what summed gradients are divided once ranks have run out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Divide {
    /// By all ranks, as ever: PyTorch's `divide_by_initial_world_size=True`. A sample counts as much in a
    /// step with few ranks as in any other.
    #[default]
    InitialWorldSize,
    /// By those that still have a batch.
    Remaining,
}

impl<M: Module> DistributedDataParallel<M> {
    /// Calls `step` for each of this rank's batches, of which ranks may have different numbers, or none.
    /// `step` does forward, exactly one [`backward`](Self::backward) that reduces, and the update.
    ///
    /// A rank without a batch left takes part in the reductions with zeros and does not update; buffers come
    /// from the highest rank that has one. When all have run out, that of the last step gives its weights
    /// and buffers to all.
    pub fn join<B>(
        &mut self,
        batches: impl IntoIterator<Item = Result<B>>,
        divide: Divide,
        step: impl FnMut(&mut Self, B) -> Result<()>,
    ) -> Result<()> {
        let result = self.join_until_all_are_done(batches, divide, step);
        self.divisor = self.world_size();
        self.source = 0;
        result.map_err(|error| self.stop(error))
    }

    fn join_until_all_are_done<B>(
        &mut self,
        batches: impl IntoIterator<Item = Result<B>>,
        divide: Divide,
        mut step: impl FnMut(&mut Self, B) -> Result<()>,
    ) -> Result<()> {
        if self.shares_statistics {
            return Err(Error::usage("join cannot keep company in forward, which sync_batch_norm needs")
                .hint("give all ranks equally many batches, or leave sync_batch_norm off"));
        }
        let mut batches = batches.into_iter().fuse();
        let mut last = None;
        loop {
            let batch = batches.next().transpose()?;
            let counts = self.count(u64::from(batch.is_some()))?;
            let active: Vec<usize> = (0..counts.len()).filter(|&rank| counts[rank] > 0).collect();
            let Some(&source) = active.last() else { break };
            last = Some(source);
            self.source = source;
            self.divisor = match divide {
                Divide::InitialWorldSize => self.world_size(),
                Divide::Remaining => active.len(),
            };
            match batch {
                Some(batch) => self.one_step(batch, &mut step)?,
                None => self.keep_company()?,
            }
        }
        last.map_or(Ok(()), |source| self.spread_weights(source))
    }

    /// One number of every rank's, by rank.
    pub(super) fn count(&self, mine: u64) -> Result<Vec<u64>> {
        let all = self.communicator.call(move |desk| desk.collective.exchange(&mine.to_le_bytes()))?;
        Ok(all.into_iter().map(|bytes| bytes.try_into().map_or(0, u64::from_le_bytes)).collect())
    }

    fn one_step<B>(&mut self, batch: B, step: &mut impl FnMut(&mut Self, B) -> Result<()>) -> Result<()> {
        let before = self.steps();
        step(self, batch)?;
        match self.steps() - before {
            1 => Ok(()),
            other => Err(Error::usage(format!(
                "rank {}: a step of join called backward {other} times",
                self.rank()
            ))
            .hint("reduce once in every step: the ranks that have run out do, too")),
        }
    }

    /// The collectives of a step, with zeros.
    fn keep_company(&mut self) -> Result<()> {
        // What the last step left is not to be counted again.
        self.parameters().iter().try_for_each(|parameter| grad::set_grad(parameter, None))?;
        self.begin_backward(None, Share::Equal)?;
        self.finish_backward()
    }

    /// Weights and buffers of `source` to all, by way of the gradient buckets.
    fn spread_weights(&mut self, source: usize) -> Result<()> {
        let mine = self.rank() == source;
        let mut core = lock(&self.core);
        core.detach_gradients()?;
        if mine {
            core.stage_parameters()?;
        }
        drop(core);
        self.source = source;
        self.send_buffers()?;
        self.communicator.post(move |desk| {
            let super::communicator::Desk { collective, buckets, .. } = desk;
            buckets.iter().try_for_each(|bucket| collective.broadcast(bucket, source))
        })?;
        self.communicator.wait()?;
        if !mine {
            lock(&self.core).unstage_parameters()?;
        }
        self.apply_buffers()
    }
}
