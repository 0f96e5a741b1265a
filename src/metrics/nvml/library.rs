//! Loading NVML: once for the process, and once more for a card that was lost.

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use std::ffi::OsStr;
use std::panic::catch_unwind;

/// What drivers install, then what development packages do.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Why it cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// There is none.
    Missing,
    /// It is there, and fails.
    Broken {
        /// In few words.
        reason: String,
        /// Whether the kernel module and the library are of different versions (an upgrade without a reboot).
        mismatch: bool,
    },
}

impl Fault {
    pub(super) fn of(error: &NvmlError) -> Self {
        match error {
            NvmlError::LibloadingError(_) => Self::Missing,
            error => Self::Broken {
                reason: reason(error),
                mismatch: matches!(error, NvmlError::LibRmVersionMismatch),
            },
        }
    }
}

/// Loads and initialises it. What is loaded stays until the process ends, so that readings can outlive each
/// other; this is called a few times in a run at most.
pub(super) fn open() -> Result<&'static Nvml, Fault> {
    let load = |name: &'static str| {
        catch_unwind(|| Nvml::builder().lib_path(OsStr::new(name)).init())
            .unwrap_or_else(|_| Err(NvmlError::Unknown))
    };
    let mut opened = load(NAMES[0]);
    // Only a name that cannot be loaded has another one behind it: a library that refuses is told as it is.
    if matches!(opened, Err(NvmlError::LibloadingError(_))) {
        opened = load(NAMES[1]);
    }
    match opened {
        Ok(nvml) => Ok(Box::leak(Box::new(nvml))),
        Err(error) => Err(Fault::of(&error)),
    }
}

/// An error of NVML in few words, without a final period.
pub(super) fn reason(error: &NvmlError) -> String {
    match error {
        NvmlError::NotSupported => "not supported".to_owned(),
        NvmlError::NoPermission => "no permission".to_owned(),
        NvmlError::GpuLost => "the card is lost".to_owned(),
        NvmlError::NotFound => "the card is not there".to_owned(),
        NvmlError::Unknown => "unknown error".to_owned(),
        NvmlError::FailedToLoadSymbol(_) => "the driver is too old to tell".to_owned(),
        NvmlError::UnexpectedVariant(value) => format!("unknown({value})"),
        NvmlError::LibRmVersionMismatch => "driver and library versions do not match".to_owned(),
        other => other.to_string().trim_end_matches('.').to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Field case 089.
    #[test]
    fn a_refusal_is_not_taken_for_a_missing_library() {
        let refused = Fault::of(&NvmlError::NoPermission);
        assert_eq!(refused, Fault::Broken { reason: "no permission".into(), mismatch: false });
        assert!(matches!(Fault::of(&NvmlError::LibRmVersionMismatch), Fault::Broken { mismatch: true, .. }));
    }

    // Field case 091.
    #[test]
    fn a_value_that_nobody_knows_keeps_its_number() {
        assert_eq!(reason(&NvmlError::UnexpectedVariant(4711)), "unknown(4711)");
    }
}
