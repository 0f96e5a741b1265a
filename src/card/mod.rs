//! What cards there are, and the counters that belong to a card.
//!
//! A card is one unit that holds a replica: a CUDA device, or a virtual card (a set of CPU cores with
//! its own accounting). This module knows no engine and no libtorch.

mod cpu_clock;
pub mod cuda;
mod meter;
mod shared;
mod virtual_card;

pub use cpu_clock::thread_cpu_clock;
pub use meter::{CardMeter, Meter};
pub use shared::SharedMemory;
pub use virtual_card::{Cores, Topology, VirtualCard, available_cores, pin_current_thread, virtual_cards};

/// One unit that holds a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Card {
    /// A set of CPU cores.
    Virtual(VirtualCard),
    /// A CUDA device.
    Cuda {
        /// Position in the card list.
        index: usize,
        /// The `i` of `cuda:i` in this process.
        ordinal: usize,
    },
}

impl Card {
    /// Position in the card list.
    pub fn index(&self) -> usize {
        match self {
            Self::Virtual(card) => card.index,
            Self::Cuda { index, .. } => *index,
        }
    }
}

impl From<VirtualCard> for Card {
    fn from(card: VirtualCard) -> Self {
        Self::Virtual(card)
    }
}
