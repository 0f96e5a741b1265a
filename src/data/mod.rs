//! Data sets, the order in which ranks see them, and the loader that prepares batches ahead.
//!
//! Sample order is PyTorch's: the index lists equal `DistributedSampler`'s for the same seed and epoch.

mod dataset;
mod generated;
mod loader;
mod sampler;

pub use dataset::{Batch, Dataset, open};
pub use loader::{Cut, Loader, LoaderOptions, Part};
pub use sampler::{DistributedSampler, Shares, batches, chunks, randperm};
