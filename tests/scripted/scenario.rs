//! The scenario that the scripted vendor libraries play: one TOML file, named by `SCRIPTED_GPU`.
//!
//! Cards are told once, for all libraries; each library has a section of its own besides.

use serde::Deserialize;

/// The variable that names the file.
pub const VARIABLE: &str = "SCRIPTED_GPU";

/// A card, as all libraries see it.
#[derive(Debug, Clone, Deserialize)]
#[allow(dead_code, reason = "each library reads what it needs")]
pub struct Card {
    pub uuid: String,
    #[serde(default = "name")]
    pub name: String,
    pub pci_bus_id: String,
    #[serde(default = "memory_bytes")]
    pub memory_bytes: u64,
    #[serde(default = "compute_capability")]
    pub compute_capability: (u32, u32),
    #[serde(default)]
    pub integrated: bool,
}

fn name() -> String {
    "NVIDIA Scripted".to_owned()
}

fn memory_bytes() -> u64 {
    80 << 30
}

fn compute_capability() -> (u32, u32) {
    (9, 0)
}

/// Reads the scenario as `T`, which has a `card: Vec<Card>` and its library's section.
///
/// A library whose scenario is missing or wrong must not go on as if it were another one.
pub fn read<T: for<'a> Deserialize<'a>>() -> T {
    let complain = |what: String| -> ! {
        #[allow(clippy::print_stderr, reason = "there is nobody else to tell")]
        {
            eprintln!("scripted library: {what}");
        }
        std::process::abort()
    };
    let path = std::env::var_os(VARIABLE).unwrap_or_else(|| complain(format!("{VARIABLE} is not set")));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| complain(format!("{path:?}: {error}")));
    toml::from_str(&text).unwrap_or_else(|error| complain(format!("{path:?}: {error}")))
}

/// A call that fails: the `at`th of this name in a process, counted from 1; for good where `at` is missing.
#[derive(Debug, Clone, Deserialize)]
#[allow(dead_code, reason = "each library reads what it needs")]
pub struct Fail {
    pub call: String,
    pub at: Option<u64>,
    pub code: u32,
    /// Only in processes that see the card of this UUID.
    pub card: Option<String>,
}
