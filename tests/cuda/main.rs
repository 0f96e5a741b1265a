//! CUDA cards, against scripted vendor libraries: the driver's interface, whole comparisons on played cards,
//! and which cards a run is on.

#![allow(unsafe_code, reason = "copies of raw memory are what is tested")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic, in its helpers too")]

mod driver;
#[cfg(feature = "engines")]
mod runs;
#[path = "../scripted/mod.rs"]
mod scripted;
