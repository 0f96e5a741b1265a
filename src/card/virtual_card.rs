//! Virtual cards: disjoint sets of CPU cores where there are enough, shared ones where there are not.

use crate::Result;

/// A set of core numbers, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cores(pub Vec<usize>);

/// One virtual card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualCard {
    /// Position in the card list.
    pub index: usize,
    /// Cores its threads are pinned to.
    pub cores: Cores,
}

/// Cores this process may run on (its affinity mask, not the machine's size).
pub fn available_cores() -> Result<Cores> {
    todo!()
}

/// Deals cores to cards: contiguous and disjoint while there are enough of them, else round robin
/// (then [`VirtualCard::cores`] overlap, which the caller warns about). Pure.
pub fn virtual_cards(cores: &Cores, cards: usize, threads_per_card: usize) -> Vec<VirtualCard> {
    let _ = (cores, cards, threads_per_card);
    todo!()
}

/// Pins the calling thread, and so every thread it makes from now on.
pub fn pin_current_thread(cores: &Cores) -> Result<()> {
    let _ = cores;
    todo!()
}
