//! Reports from made-up runs: what is written, what is said, what is refused, and that nothing from
//! outside can break a page.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

mod files;
mod fixture;
mod words;
