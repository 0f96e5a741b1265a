//! Measuring: the clock and phases inside a worker, the sampler outside it, statistics over both, and
//! the on-disk schema that everything downstream is rebuilt from.
//!
//! Must not know how an engine works, nor how a report looks.

pub mod nvml;
pub mod phase;
pub mod proc;
pub mod record;
pub mod round;
pub mod sampler;
pub mod stats;
pub mod watched;
