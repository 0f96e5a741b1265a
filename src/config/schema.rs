//! The TOML as typed.
