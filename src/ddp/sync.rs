//! What layers may ask of the other ranks in the middle of forward and backward.

use super::DistributedDataParallel;
use super::communicator::Communicator;
use super::core::lock;
use super::module::Module;
use crate::Result;
use crate::model::{Model, SumOverRanks};
use std::sync::Arc;

/// Sums by way of the communication thread, after whatever it was given before.
struct Sums(Arc<Communicator>);

impl SumOverRanks for Sums {
    fn sum(&self, values: Vec<f64>) -> Result<Vec<f64>> {
        self.0.sum(values)
    }
}

impl<M: Module> DistributedDataParallel<M> {
    /// For layers of a module of one's own, as [`crate::model::sync_batch_norm`] needs it. Whoever takes
    /// it has collectives in backward, among which buckets must have the same place on every rank: where
    /// graphs may differ between ranks, buckets wait for the end of backward from now on.
    pub fn sums_over_ranks(&mut self) -> Arc<dyn SumOverRanks> {
        let options = self.options();
        if options.find_unused_parameters || options.static_graph {
            lock(&self.core).overlap = false;
        }
        self.shares_statistics = true;
        Arc::new(Sums(Arc::clone(&self.communicator)))
    }
}

impl DistributedDataParallel<Box<dyn Model>> {
    /// Every BatchNorm of the model normalises by the samples of all ranks: PyTorch's
    /// `SyncBatchNorm.convert_sync_batchnorm`. All ranks do so, before their first forward, and from then
    /// on call forward equally often, also without samples.
    ///
    /// The gradient of what all ranks share is that of the sum of their losses. Ranks with unequal
    /// numbers of samples weigh their losses before backward, and reduce with [`Share::Weighted`].
    ///
    /// [`Share::Weighted`]: super::Share::Weighted
    pub fn convert_sync_batch_norm(&mut self) {
        let group = self.sums_over_ranks();
        self.module.sync_batch_norm(&group);
    }
}
