//! DistributedDataParallel.

/// One process a card.
#[derive(Debug)]
pub struct DistributedDataParallel {}
