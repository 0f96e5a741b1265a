//! DataParallel.

/// One process, all cards.
#[derive(Debug)]
pub struct DataParallel {}
