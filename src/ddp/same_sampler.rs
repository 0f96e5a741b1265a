//! Ranks draw their samples each for itself: what they draw from has to be the same on all of them, and no
//! gradient would ever tell that it is not.

use crate::comm::Collective;
use crate::data::DistributedSampler;
use crate::error::{Error, Kind, Result};

/// An error on every rank, naming the first difference, unless all ranks share the data in the same way:
/// with another seed on each, shards overlap and samples are missed.
///
/// To be called on every rank before training, with the collective that the wrapper gets afterwards.
pub fn same_sampler(collective: &mut dyn Collective, sampler: &DistributedSampler) -> Result<()> {
    let all = collective.exchange(description(sampler).join("\n").as_bytes())?;
    let all: Vec<String> = all.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect();
    match first_difference(&all) {
        None => Ok(()),
        Some(what) => Err(Error::new(
            Kind::Worker,
            format!("rank {}: ranks share the data in different ways: {what}", collective.rank()),
        )
        .hint("give all ranks the same data, batch and seed")),
    }
}

/// One line a property.
fn description(sampler: &DistributedSampler) -> [String; 5] {
    let DistributedSampler { samples, world_size, shuffle, drop_last, seed } = sampler;
    [
        format!("samples = {samples}"),
        format!("world size = {world_size}"),
        format!("shuffle = {shuffle}"),
        format!("drop_last = {drop_last}"),
        format!("seed = {seed}"),
    ]
}

/// The first line in which a rank differs from rank 0. Pure.
fn first_difference(all: &[String]) -> Option<String> {
    let (first, others) = all.split_first()?;
    first.lines().enumerate().find_map(|(line, ours)| {
        let theirs = |text: &'_ String| text.lines().nth(line).unwrap_or("nothing").to_owned();
        let rank = others.iter().position(|other| theirs(other) != ours)?;
        Some(format!("{ours} on rank 0, {} on rank {}", theirs(&others[rank]), rank + 1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Shm;
    use std::collections::BTreeSet;
    use std::time::Duration;

    fn sampler(seed: u64) -> DistributedSampler {
        DistributedSampler { samples: 100, world_size: 4, shuffle: true, drop_last: false, seed }
    }

    /// What four ranks are told.
    fn told(of_rank: impl Fn(usize) -> DistributedSampler + Sync) -> Vec<Option<String>> {
        let group = Shm::threads(4, Duration::from_secs(20)).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = group
                .into_iter()
                .enumerate()
                .map(|(rank, mut shm)| {
                    let sampler = of_rank(rank);
                    scope.spawn(move || same_sampler(&mut shm, &sampler).err().map(|e| e.to_string()))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Case 053: a seed of its own on every rank makes shards overlap, and is an error on all of them.
    #[test]
    fn ranks_with_seeds_of_their_own_are_told() {
        let distinct = |apart: u64| {
            let rows = (0..4).flat_map(|rank| sampler(5 + apart * rank as u64).indices(rank, 0));
            rows.collect::<BTreeSet<_>>().len()
        };
        assert_eq!(distinct(0), 100, "one seed covers everything");
        assert!(distinct(1) <= 80, "a fifth or more is missed: {}", distinct(1));

        assert_eq!(told(|_| sampler(5)), [None, None, None, None]);
        for (rank, error) in told(|rank| sampler(5 + rank as u64)).into_iter().enumerate() {
            let expected = "ranks share the data in different ways: seed = 5 on rank 0, seed = 6 on rank 1";
            assert_eq!(error, Some(format!("rank {rank}: {expected}")));
        }
    }

    #[test]
    fn the_first_property_that_differs_is_named() {
        let errors = told(|rank| DistributedSampler { samples: 100 + rank / 3, ..sampler(rank as u64 / 2) });
        let expected =
            "ranks share the data in different ways: samples = 100 on rank 0, samples = 101 on rank 3";
        assert_eq!(errors[0], Some(format!("rank 0: {expected}")));
    }
}
