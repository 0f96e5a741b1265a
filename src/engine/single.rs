//! One card, no communication: the reference.

/// The reference engine.
#[derive(Debug)]
pub struct Single {}
