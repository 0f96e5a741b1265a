//! Batches prepared ahead by worker threads, delivered in order.

/// Iterates over the batches of all epochs.
#[derive(Debug)]
pub struct Loader {
    _todo: (),
}
