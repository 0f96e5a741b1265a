//! `worker` in a build without libtorch: it is not there, and says so.

use super::ExitStatus;
use super::args::WorkerArgs;
use super::printer::Printer;
use crate::error::{Error, Kind, Result};

/// An error: this build cannot train.
pub(crate) fn require() -> Result<()> {
    Err(Error::new(Kind::Unavailable, "this build has no engines, so it can neither measure nor train")
        .hint("build it with the default features: `./setup && cargo build --release`"))
}

/// The libtorch that was loaded: none.
pub(crate) fn libtorch_version() -> Option<String> {
    None
}

/// Whether CUDA cards can be used: not without engines.
pub(crate) fn cuda_half() -> bool {
    false
}

/// The NCCL that `ddp` would use: none.
pub(crate) fn nccl() -> Result<String, String> {
    Err("this build has no engines".to_owned())
}

/// Weights to start from: none can be drawn.
pub(crate) fn initial_weights(_: &crate::config::Plan) -> Result<Vec<u8>> {
    require().map(|()| Vec::new())
}

/// Whether engines could start from this file: there are none.
pub(crate) fn check_weights(_: &crate::config::Plan, _: &std::path::Path) -> Result<()> {
    require()
}

/// Runs the verb.
pub(crate) fn run(_: &WorkerArgs) -> ExitStatus {
    if let Err(error) = require() {
        Printer::new().error(&error);
    }
    ExitStatus::Error
}
