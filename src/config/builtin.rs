//! The files of `configs/`, built into the binary.

/// Name and text of every built-in config.
pub const BUILTIN: &[(&str, &str)] = &[("quick", include_str!("../../configs/quick.toml"))];

/// The text of a built-in config.
pub fn builtin(name: &str) -> Option<&'static str> {
    BUILTIN.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}
