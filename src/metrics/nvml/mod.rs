//! The door to NVML, NVIDIA's management library: loaded at run time, where there is one.
//!
//! Every answer can be missing, each for itself. A missing library is an ordinary machine without a GPU,
//! not an error. Nothing here opens a CUDA context.

mod driver;
mod ledger;
mod library;
mod reading;
mod topology;
mod watch;

pub use driver::{Driver, Gpu, driver};
pub use ledger::{Field, Ledger};
pub use reading::Reading;
pub use topology::links;
pub use watch::Watch;
