//! What NVML says of the driver and its cards, asked once.

use super::library::{self, Fault};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{cuda_driver_version_major, cuda_driver_version_minor};
use serde::Serialize;

/// What NVML says about the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Driver {
    /// No NVML library: no driver is installed, or it is not visible in this container.
    Missing,
    /// The library is there but does not work: `error` is NVML's own word for why.
    Broken {
        /// In NVML's words.
        error: String,
        /// Whether the kernel module and the library are of different versions (an upgrade without a reboot).
        mismatch: bool,
    },
    /// It works.
    Present {
        /// As in `580.65.06`.
        version: Option<String>,
        /// Newest CUDA it supports, as in `13.0`.
        cuda: Option<String>,
        /// The cards, in NVML's order (which is not CUDA's).
        cards: Vec<Gpu>,
    },
}

/// One card as NVML sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Product name.
    pub name: Option<String>,
    /// Stable identity.
    pub uuid: Option<String>,
    /// All of its memory.
    pub memory_bytes: Option<u64>,
}

/// Asks the driver. Takes some tenths of a second where there is one.
pub fn driver() -> Driver {
    let nvml = match library::open() {
        Ok(nvml) => nvml,
        Err(Fault::Missing) => return Driver::Missing,
        Err(Fault::Broken { reason, mismatch }) => return Driver::Broken { error: reason, mismatch },
    };
    let count = match nvml.device_count() {
        Ok(count) => count,
        Err(error) => return broken(&error),
    };
    let cards = (0..count)
        .map(|index| {
            let device = nvml.device_by_index(index).ok();
            Gpu {
                name: device.as_ref().and_then(|device| device.name().ok()),
                uuid: device.as_ref().and_then(|device| device.uuid().ok()),
                memory_bytes: device
                    .as_ref()
                    .and_then(|device| device.memory_info().ok())
                    .map(|memory| memory.total),
            }
        })
        .collect();
    let cuda = nvml.sys_cuda_driver_version().ok();
    Driver::Present {
        version: nvml.sys_driver_version().ok(),
        cuda: cuda.map(|v| format!("{}.{}", cuda_driver_version_major(v), cuda_driver_version_minor(v))),
        cards,
    }
}

fn broken(error: &NvmlError) -> Driver {
    match Fault::of(error) {
        Fault::Missing => Driver::Missing,
        Fault::Broken { reason, mismatch } => Driver::Broken { error: reason, mismatch },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_mismatch_is_told_apart() {
        let mismatch = broken(&NvmlError::LibRmVersionMismatch);
        assert!(matches!(mismatch, Driver::Broken { mismatch: true, .. }), "{mismatch:?}");
        let unloaded = broken(&NvmlError::DriverNotLoaded);
        assert_eq!(
            unloaded,
            Driver::Broken { error: NvmlError::DriverNotLoaded.to_string(), mismatch: false }
        );
    }

    #[test]
    fn asking_never_panics_whatever_the_machine_has() {
        if let Driver::Present { cards, .. } = driver() {
            assert!(cards.iter().all(|card| card.memory_bytes != Some(0)));
        }
    }
}
