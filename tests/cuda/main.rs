//! CUDA cards, against a scripted driver: discovery, streams, events, copies, and their failures.

#![allow(unsafe_code, reason = "copies of raw memory are what is tested")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic, in its helpers too")]

mod driver;
#[path = "../scripted/mod.rs"]
mod scripted;
