//! Processes.
