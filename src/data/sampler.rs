//! Which rank sees which sample when: PyTorch's DistributedSampler, index for index.
//!
//! Pure. The permutation is `torch.randperm`'s for a generator seeded with `seed + epoch`.

/// torch.randperm(n) of a fresh CPU generator with this seed.
pub fn randperm(n: usize, seed: u64) -> Vec<usize> {
    let _ = (n, seed);
    todo!()
}

/// One rank's share of a data set.
#[derive(Debug, Clone)]
pub struct DistributedSampler {
    /// Samples in the data set.
    pub samples: usize,
    /// Ranks that share it.
    pub world_size: usize,
    /// New order every epoch.
    pub shuffle: bool,
    /// Drop the tail instead of repeating samples.
    pub drop_last: bool,
    /// Same on all ranks.
    pub seed: u64,
}

impl DistributedSampler {
    /// `rank`'s indices in `epoch`, in order.
    pub fn indices(&self, rank: usize, epoch: u64) -> Vec<usize> {
        let _ = (rank, epoch);
        todo!()
    }
}

/// Global batch after global batch of one epoch, each the concatenation in rank order of what ranks
/// `0..world_size` would load at that step. The inner list is by rank.
pub fn batches(sampler: &DistributedSampler, epoch: u64, per_card: usize) -> Vec<Vec<Vec<usize>>> {
    let _ = (sampler, epoch, per_card);
    todo!()
}
