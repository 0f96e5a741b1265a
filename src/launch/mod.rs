//! Processes: one worker a rank, spawned, listened to, stopped and reaped by the parent.
//!
//! The first rank that fails stops the others and is the one reported. Every wait has a deadline, no
//! process outlives the run, and a worker whose parent is gone ends by itself. What a worker computes is
//! not known here.

mod failure;
mod group;
mod memory_file;
mod protocol;
mod rank;
#[cfg(test)]
mod testing;
mod worker;

pub use group::{Group, Limits, Program};
pub use memory_file::MemoryFile;
pub use protocol::{Job, Message, Mode, StoreAddress};
pub use rank::RankEnv;
pub use worker::{Reporter, end_with_parent};
