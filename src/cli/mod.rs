//! The command line.

#[allow(dead_code)]
mod doctor;
