//! The program from outside: exit statuses, messages, files, and what happens when things are killed.
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking and says what it skips"
)]

mod faults;
mod options;
mod records;
mod refusals;
mod support;
mod training;
mod workers;
