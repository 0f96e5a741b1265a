//! Virtual cards: disjoint sets of CPU cores where there are enough, shared ones where there are not.
//!
//! Where the kernel tells which logical cores are hyperthreads of one physical core, cards get physical
//! cores of their own first: two cards on one physical core would slow each other down unseen.

use crate::error::{Error, Kind, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::{BTreeMap, BTreeSet};

/// Most virtual cards a run takes without being asked.
const MOST_BY_DEFAULT: usize = 4;

/// A set of core numbers, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cores(pub Vec<usize>);

impl std::fmt::Display for Cores {
    /// Ranges as the kernel writes them: `0-1,4`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut rest = self.0.as_slice();
        let mut separator = "";
        while let Some(&first) = rest.first() {
            let run = rest.iter().enumerate().take_while(|(i, core)| **core == first + i).count();
            match run {
                1 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{}", first + run - 1)?,
            }
            rest = &rest[run..];
            separator = ",";
        }
        Ok(())
    }
}

/// One virtual card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualCard {
    /// Position in the card list.
    pub index: usize,
    /// Cores its threads are pinned to.
    pub cores: Cores,
}

/// The usable cores by physical core: each inner list holds the hyperthreads of one, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    physical: Vec<Vec<usize>>,
}

impl Topology {
    /// Of the cores this process may run on; where the kernel does not tell, every core is its own.
    pub fn of_this_process() -> Result<Self> {
        Ok(Self::new(&available_cores()?, |core| {
            let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
            std::fs::read_to_string(path).ok().map(|list| list.trim().to_owned())
        }))
    }

    /// Groups cores whose `siblings` text is the same.
    fn new(cores: &Cores, siblings: impl Fn(usize) -> Option<String>) -> Self {
        let mut groups: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for &core in &cores.0 {
            groups.entry(siblings(core).unwrap_or_else(|| core.to_string())).or_default().push(core);
        }
        let mut physical: Vec<_> = groups.into_values().collect();
        physical.sort_unstable();
        Self { physical }
    }

    /// Usable physical cores.
    pub fn physical_cores(&self) -> usize {
        self.physical.len()
    }

    /// Cards a run takes when nobody says: one a physical core, at most four.
    pub fn default_cards(&self) -> usize {
        self.physical_cores().clamp(1, MOST_BY_DEFAULT)
    }

    /// Intra-op threads of a card when nobody says: the physical cores shared out evenly, at least one.
    pub fn default_threads_per_card(&self, cards: usize) -> usize {
        (self.physical_cores() / cards.max(1)).max(1)
    }

    /// The cores to deal to cards: one hyperthread of each physical core while those suffice, else all
    /// of them with siblings side by side, so that siblings land on the same card.
    pub fn cores_for(&self, threads: usize) -> Cores {
        if threads <= self.physical.len() {
            Cores(self.physical.iter().filter_map(|siblings| siblings.first().copied()).collect())
        } else {
            Cores(self.physical.concat())
        }
    }
}

/// Cores this process may run on (its affinity mask, not the machine's size).
pub fn available_cores() -> Result<Cores> {
    let set = sched_getaffinity(None)
        .map_err(|errno| Error::new(Kind::Unavailable, format!("cannot read the CPU affinity: {errno}")))?;
    Ok(Cores((0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()))
}

/// Deals cores to cards: contiguous and disjoint while there are enough of them, else round robin
/// (then [`VirtualCard::cores`] overlap, which the caller warns about). Pure.
pub fn virtual_cards(cores: &Cores, cards: usize, threads_per_card: usize) -> Vec<VirtualCard> {
    let count = cores.0.len().max(1);
    (0..cards)
        .map(|index| {
            // Going round at the end gives both rules at once.
            let dealt = (index * threads_per_card..(index + 1) * threads_per_card)
                .filter_map(|turn| cores.0.get(turn % count).copied());
            let distinct: BTreeSet<_> = dealt.collect();
            VirtualCard { index, cores: Cores(distinct.into_iter().collect()) }
        })
        .collect()
}

/// Pins the calling thread, and so every thread it makes from now on.
pub fn pin_current_thread(cores: &Cores) -> Result<()> {
    let mut set = CpuSet::new();
    for &core in &cores.0 {
        if core >= CpuSet::MAX_CPU {
            return Err(Error::usage(format!("core {core} is past the last one that can be asked for")));
        }
        set.set(core);
    }
    sched_setaffinity(None, &set).map_err(|errno| {
        Error::new(Kind::Unavailable, format!("cannot pin a thread to cores {cores}: {errno}"))
            .hint("the cores this process may use have changed; run it again")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dealt(cores: &[usize], cards: usize, threads: usize) -> Vec<Vec<usize>> {
        virtual_cards(&Cores(cores.to_vec()), cards, threads).into_iter().map(|card| card.cores.0).collect()
    }

    #[test]
    fn cards_get_disjoint_contiguous_cores_while_there_are_enough() {
        assert_eq!(dealt(&[0, 1, 2, 3, 6, 7], 3, 2), [[0, 1], [2, 3], [6, 7]]);
    }

    #[test]
    fn cores_left_over_stay_free() {
        assert_eq!(dealt(&[0, 1, 2, 3], 2, 1), [[0], [1]]);
    }

    #[test]
    fn eight_cards_take_turns_on_two_cores() {
        assert_eq!(dealt(&[0, 1], 8, 1), [[0], [1], [0], [1], [0], [1], [0], [1]]);
    }

    #[test]
    fn a_card_wider_than_the_machine_gets_each_core_once() {
        assert_eq!(dealt(&[2, 5], 2, 4), [[2, 5], [2, 5]]);
    }

    #[test]
    fn hyperthreads_do_not_count_as_cards_of_their_own() {
        let siblings = |core: usize| Some(format!("{},{}", core % 4, core % 4 + 4));
        let topology = Topology::new(&Cores((0..8).collect()), siblings);
        assert_eq!(topology.physical_cores(), 4);
        assert_eq!(topology.cores_for(4), Cores(vec![0, 1, 2, 3]));
        assert_eq!(topology.cores_for(8), Cores(vec![0, 4, 1, 5, 2, 6, 3, 7]));
        assert_eq!((topology.default_cards(), topology.default_threads_per_card(2)), (4, 2));
    }

    #[test]
    fn without_a_topology_every_core_is_physical() {
        let topology = Topology::new(&Cores(vec![3, 4]), |_| None);
        assert_eq!(topology.physical_cores(), 2);
        assert_eq!(topology.default_threads_per_card(8), 1);
    }

    #[test]
    fn cores_are_written_as_ranges() {
        assert_eq!(Cores(vec![0, 1, 2, 5, 8, 9]).to_string(), "0-2,5,8-9");
    }

    #[test]
    fn pinning_narrows_this_thread_only() {
        let all = available_cores().unwrap();
        let one = Cores(all.0[..1].to_vec());
        let inside = std::thread::spawn(move || {
            pin_current_thread(&one).unwrap();
            available_cores().unwrap()
        });
        assert_eq!(inside.join().unwrap().0, all.0[..1]);
        assert_eq!(available_cores().unwrap(), all);
    }
}
