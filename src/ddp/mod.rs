//! DistributedDataParallel: one process a card, each with its own replica and optimiser; gradients are
//! averaged by bucketed all-reduce while backward still runs.
//!
//! Two pure machines decide: [`bucket`] says which gradients travel together, [`reducer`] when a bucket
//! may go; a hook from [`hooks`] says how it travels. [`DistributedDataParallel`] acts on what they say; [`DdpEngine`] drives it in a measured run.
//! Must know neither the `dp` engine nor how processes come to be.

mod agree;
pub mod bucket;
mod communicator;
mod core;
mod engine;
pub mod hooks;
mod join;
mod module;
mod options;
pub mod reducer;
mod same_sampler;
mod sync;
mod wrapper;

pub use engine::DdpEngine;
pub use join::Divide;
pub use module::Module;
pub use options::{Options, Share};
pub use same_sampler::same_sampler;
pub use wrapper::DistributedDataParallel;

#[cfg(test)]
mod tests;
