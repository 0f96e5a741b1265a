//! Which rank sees which sample when: PyTorch's DistributedSampler, index for index.
//!
//! Pure. The permutation is `torch.randperm`'s for a generator seeded with `seed + epoch`. Two ways to
//! cut an epoch into global batches live here: [`batches`] gives every rank equally many rows, repeating
//! or dropping samples at the end as DistributedSampler does; [`chunks`] sees every sample once and cuts
//! each global batch as `tensor.chunk` does, so that ranks may get unequal parts or none.

use crate::config::shares;
use rand_mt::Mt;

/// One step's rows, by rank.
pub type Shares = Vec<Vec<usize>>;

/// torch.randperm(n) of a fresh CPU generator with this seed.
///
/// Holds for `n` below 2^32 / 20, where libtorch draws 32-bit numbers; [`super::Dataset`] admits no more.
pub fn randperm(n: usize, seed: u64) -> Vec<usize> {
    // libtorch's mt19937 keeps the low half of a seed.
    let mut generator = Mt::new(seed as u32);
    let mut order: Vec<usize> = (0..n).collect();
    for i in 0..n.saturating_sub(1) {
        let ahead = generator.next_u32() as usize % (n - i);
        order.swap(i, i + ahead);
    }
    order
}

/// How a data set is shared by ranks, as `torch.utils.data.DistributedSampler`.
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
    /// Samples each rank gets in an epoch.
    pub fn per_rank(&self) -> usize {
        if self.drop_last { self.samples / self.world_size } else { self.samples.div_ceil(self.world_size) }
    }

    /// Samples that an epoch shows twice (or more often) so that all ranks get equally many.
    pub fn repeated(&self) -> usize {
        (self.per_rank() * self.world_size).saturating_sub(self.samples)
    }

    /// Samples that an epoch leaves out so that all ranks get equally many.
    pub fn left_out(&self) -> usize {
        self.samples.saturating_sub(self.per_rank() * self.world_size)
    }

    /// `rank`'s indices in `epoch`, in order.
    pub fn indices(&self, rank: usize, epoch: u64) -> Vec<usize> {
        let total = self.per_rank() * self.world_size;
        // Wraps round as often as it takes: 3 samples on 7 ranks are 0,1,2,0,1,2,0.
        self.order(epoch).into_iter().cycle().take(total).skip(rank).step_by(self.world_size).collect()
    }

    /// Every sample once, in this epoch's order.
    fn order(&self, epoch: u64) -> Vec<usize> {
        if self.shuffle {
            randperm(self.samples, self.seed.wrapping_add(epoch))
        } else {
            (0..self.samples).collect()
        }
    }
}

/// Global batch after global batch of one epoch, each the concatenation in rank order of what ranks
/// `0..world_size` would load at that step. The inner list is by rank.
pub fn batches(sampler: &DistributedSampler, epoch: u64, per_card: usize) -> Vec<Shares> {
    let ranks: Vec<Vec<usize>> = (0..sampler.world_size).map(|rank| sampler.indices(rank, epoch)).collect();
    let steps = sampler.per_rank().div_ceil(per_card);
    (0..steps)
        .map(|step| {
            let first = step * per_card;
            let last = (first + per_card).min(sampler.per_rank());
            ranks.iter().map(|indices| indices[first..last].to_vec()).collect()
        })
        .collect()
}

/// As [`batches`], but no sample twice: towards the end of the epoch ranks get fewer rows, or none.
pub(super) fn uneven_batches(sampler: &DistributedSampler, epoch: u64, per_card: usize) -> Vec<Shares> {
    let mut steps = batches(sampler, epoch, per_card);
    for (step, shares) in steps.iter_mut().enumerate() {
        for (rank, rows) in shares.iter_mut().enumerate() {
            // Row `i` of rank `r` is sample `i * world + r` of the epoch.
            let real = sampler.samples.saturating_sub(rank).div_ceil(sampler.world_size);
            rows.truncate(real.saturating_sub(step * per_card));
        }
    }
    steps
}

/// Global batch after global batch of one epoch, every sample once, each cut for the ranks as
/// `tensor.chunk` cuts it: ranks at the end may get less, or nothing. With `drop_last` a last batch that
/// is not full is left out.
pub fn chunks(sampler: &DistributedSampler, epoch: u64, global: usize) -> Vec<Shares> {
    sampler
        .order(epoch)
        .chunks(global)
        .filter(|batch| batch.len() == global || !sampler.drop_last)
        .map(|batch| {
            shares(batch.len(), sampler.world_size, None)
                .into_iter()
                .scan(0, |first, rows| {
                    *first += rows;
                    Some(batch[*first - rows..*first].to_vec())
                })
                .collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn sampler(samples: usize, world_size: usize) -> DistributedSampler {
        DistributedSampler { samples, world_size, shuffle: false, drop_last: false, seed: 0 }
    }

    #[test]
    fn permutations_are_libtorchs() {
        // The only test of this crate's unit tests that draws from the global generator twice in a row;
        // repeated until no other test's draw fell between seeding and drawing.
        for (n, seed) in
            [(0, 7), (1, 0), (2, 3), (10, 0), (10, 42), (9000, 1), (100_000, 5), (10, (1 << 32) + 42)]
        {
            let ours: Vec<i64> = randperm(n, seed).into_iter().map(|index| index as i64).collect();
            let agrees = (0..20).any(|_| {
                tch::manual_seed(seed as i64);
                let theirs = tch::Tensor::randperm(n as i64, (tch::Kind::Int64, tch::Device::Cpu));
                Vec::<i64>::try_from(theirs).unwrap() == ours
            });
            assert!(agrees, "n = {n}, seed = {seed}");
        }
    }

    #[test]
    fn a_permutation_has_every_index_once() {
        let seen: BTreeSet<usize> = randperm(1000, 9).into_iter().collect();
        assert_eq!(seen.len(), 1000);
        assert_ne!(randperm(1000, 9), randperm(1000, 10));
    }

    #[test]
    fn ranks_take_every_nth_sample() {
        let sampler = sampler(8, 2);
        assert_eq!(sampler.indices(0, 0), [0, 2, 4, 6]);
        assert_eq!(sampler.indices(1, 0), [1, 3, 5, 7]);
    }

    // Field case 053: with one seed for all ranks shards overlap in nothing but the padding.
    #[test]
    fn shards_cover_everything_and_overlap_only_in_padding() {
        for (samples, padding) in [(100, 0), (101, 3)] {
            let sampler = DistributedSampler { shuffle: true, seed: 11, ..sampler(samples, 4) };
            let all: Vec<usize> = (0..4).flat_map(|rank| sampler.indices(rank, 3)).collect();
            assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), samples);
            assert_eq!(all.len() - samples, padding);
            assert_eq!(sampler.repeated(), padding);
        }
    }

    // Field case 055: padding wraps round more than once.
    #[test]
    fn fewer_samples_than_ranks_wrap_round_as_often_as_needed() {
        let ids = |samples, ranks| -> Vec<usize> {
            (0..ranks).flat_map(|rank| sampler(samples, ranks).indices(rank, 0)).collect()
        };
        assert_eq!(ids(3, 7), [0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(ids(4, 9), [0, 1, 2, 3, 0, 1, 2, 3, 0]);
        assert_eq!(ids(1, 8), [0; 8]);
        assert!(ids(0, 2).is_empty());
    }

    // Field case 056: padding and what is left out are counted apart.
    #[test]
    fn what_is_repeated_or_left_out_is_counted() {
        let padded = sampler(21, 2);
        assert_eq!((padded.per_rank(), padded.repeated(), padded.left_out()), (11, 1, 0));
        let dropped = DistributedSampler { drop_last: true, ..sampler(21, 2) };
        assert_eq!((dropped.per_rank(), dropped.repeated(), dropped.left_out()), (10, 0, 1));
    }

    #[test]
    fn a_global_batch_is_what_ranks_would_load_in_rank_order() {
        // Rank 0 has 0 2 4 6 8, rank 1 has 1 3 5 7 9.
        let steps = batches(&sampler(10, 2), 0, 2);
        assert_eq!(steps, [[vec![0, 2], vec![1, 3]], [vec![4, 6], vec![5, 7]], [vec![8], vec![9]]]);
    }

    #[test]
    fn uneven_batches_are_those_without_the_repetitions() {
        // 7 on 3 ranks, padded: 0 3 6 | 1 4 0 | 2 5 1.
        assert_eq!(
            uneven_batches(&sampler(7, 3), 0, 2),
            [vec![vec![0, 3], vec![1, 4], vec![2, 5]], vec![vec![6], vec![], vec![]]]
        );
        assert_eq!(uneven_batches(&sampler(1, 3), 0, 2), [[vec![0], vec![], vec![]]]);
        assert_eq!(uneven_batches(&sampler(6, 3), 0, 2), batches(&sampler(6, 3), 0, 2));
    }

    #[test]
    fn epochs_differ_in_order_and_not_in_content() {
        let sampler = DistributedSampler { shuffle: true, ..sampler(64, 2) };
        assert_ne!(sampler.indices(0, 0), sampler.indices(0, 1));
        let content = |epoch| (0..2).flat_map(|rank| sampler.indices(rank, epoch)).collect::<BTreeSet<_>>();
        assert_eq!(content(0), content(1));
    }

    #[test]
    fn chunks_see_every_sample_once_and_may_leave_cards_idle() {
        assert_eq!(
            chunks(&sampler(12, 4), 0, 9),
            [
                vec![vec![0, 1, 2], vec![3, 4, 5], vec![6, 7, 8], vec![]],
                vec![vec![9], vec![10], vec![11], vec![]],
            ]
        );
        let dropping = DistributedSampler { drop_last: true, ..sampler(12, 4) };
        assert_eq!(chunks(&dropping, 0, 9).len(), 1);
    }
}
