//! Our engines against PyTorch itself: the same plans, samples, weights, gradients and losses.
//!
//! Needs PyTorch (`./setup --peers`); without it every test here says that it is skipped.
#![cfg(feature = "engines")]
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking and says what it skips"
)]

mod answers;
mod faults;
mod options;
mod same;
mod support;
