//! DataParallel and DistributedDataParallel side by side on one model, measured.
//!
//! The two engines can be used alone: [`dp::DataParallel`] and [`ddp::DistributedDataParallel`]
//! bring to tch what `torch.nn.parallel` has. The rest of the crate measures them: [`metrics`]
//! samples cards, [`report`] draws what was recorded, [`cli`] is the program.
//!
//! Which module may import which is listed in ARCHITECTURE.md and checked by `tests/architecture.rs`.

pub mod card;
pub mod cli;
pub mod config;
pub mod error;
pub mod metrics;
pub mod report;
pub mod units;

#[cfg(feature = "engines")]
pub mod comm;
#[cfg(feature = "engines")]
pub mod data;
#[cfg(feature = "engines")]
pub mod ddp;
#[cfg(feature = "engines")]
pub mod dp;
#[cfg(feature = "engines")]
pub mod engine;
pub mod launch;
#[cfg(feature = "engines")]
pub mod model;
#[cfg(feature = "engines")]
pub mod torch;

pub use error::{Error, Result};
