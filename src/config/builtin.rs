//! The files of `configs/`, built into the binary.

macro_rules! configs {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../configs/", $name, ".toml")))),*]
    };
}

/// Name and text of every built-in config, by name.
pub const BUILTIN: &[(&str, &str)] = configs![
    "convnet",
    "convnet-batchnorm",
    "ddp-options",
    "digits",
    "gpt",
    "heavy-comm",
    "quick",
    "resnet18"
];

/// The text of a built-in config.
pub fn builtin(name: &str) -> Option<&'static str> {
    BUILTIN.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}
