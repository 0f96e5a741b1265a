//! What NVML says of the driver and its cards, asked once.

use super::library::{self, Fault};
use super::reading;
use nvml_wrapper::enum_wrappers::device::{ComputeMode, EccCounter, MemoryError};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::{Bits, NvmlError};
use nvml_wrapper::{Device, cuda_driver_version_major, cuda_driver_version_minor};
use serde::Serialize;

/// What NVML says about the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Driver {
    /// No NVML library: no driver is installed, or it is not visible in this container.
    Missing,
    /// The library is there but does not work: `error` is NVML's own word for why.
    Broken {
        /// In few words.
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
        /// The cards, in NVML's order (which is not always CUDA's).
        cards: Vec<Gpu>,
    },
}

/// One card as NVML sees it. Every field can be missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Product name.
    pub name: Option<String>,
    /// Stable identity.
    pub uuid: Option<String>,
    /// As in `00000000:3B:00.0`.
    pub pci_bus_id: Option<String>,
    /// All of its memory.
    pub memory_bytes: Option<u64>,
    /// Whether it is cut into slices.
    pub mig: Option<bool>,
    /// The slices' identities.
    pub slices: Vec<String>,
    /// Whether its memory corrects errors.
    pub ecc: Option<bool>,
    /// Errors that could not be corrected since the driver was loaded.
    pub uncorrected_errors: Option<u64>,
    /// Whether the driver stays loaded when nobody uses the card.
    pub persistence: Option<bool>,
    /// Who may use it: `default`, `exclusive_process` or `prohibited`.
    pub compute_mode: Option<String>,
    /// Why clocks are low now.
    pub throttle: Option<String>,
    /// Who computes on it: process number and bytes.
    pub processes: Option<Vec<(u32, Option<u64>)>>,
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
    let cards =
        (0..count).map(|index| nvml.device_by_index(index).map_or_else(|_| Gpu::default(), |d| gpu(&d)));
    let cuda = nvml.sys_cuda_driver_version().ok();
    Driver::Present {
        version: nvml.sys_driver_version().ok(),
        cuda: cuda.map(|v| format!("{}.{}", cuda_driver_version_major(v), cuda_driver_version_minor(v))),
        cards: cards.collect(),
    }
}

fn gpu(device: &Device<'_>) -> Gpu {
    let slices = (0..device.mig_device_count().unwrap_or(0))
        .filter_map(|index| device.mig_device_by_index(index).ok()?.uuid().ok());
    let throttle = match device.current_throttle_reasons_strict() {
        Ok(reasons) => Some(reasons.bits()),
        Err(NvmlError::IncorrectBits(Bits::U64(bits))) => Some(bits),
        Err(_) => None,
    };
    let processes = device.running_compute_processes().ok().map(|list| {
        let bytes = |used| match used {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        list.into_iter().map(|process| (process.pid, bytes(process.used_gpu_memory))).collect()
    });
    Gpu {
        name: device.name().ok(),
        uuid: device.uuid().ok(),
        pci_bus_id: device.pci_info().ok().map(|info| info.bus_id),
        memory_bytes: device.memory_info().ok().map(|memory| memory.total).filter(|total| *total > 0),
        mig: device.mig_mode().ok().map(|mode| mode.current != 0),
        slices: slices.collect(),
        ecc: device.is_ecc_enabled().ok().map(|state| state.currently_enabled),
        uncorrected_errors: device
            .total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)
            .ok()
            .filter(|count| *count != u64::MAX),
        persistence: device.is_in_persistent_mode().ok(),
        compute_mode: device.compute_mode().ok().map(|mode| {
            match mode {
                ComputeMode::Default => "default",
                ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread => "exclusive_process",
                ComputeMode::Prohibited => "prohibited",
            }
            .to_owned()
        }),
        throttle: throttle.filter(|mask| *mask != u64::MAX).map(reading::throttle),
        processes,
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
        assert!(matches!(unloaded, Driver::Broken { mismatch: false, .. }), "{unloaded:?}");
    }

    #[test]
    fn asking_never_panics_whatever_the_machine_has() {
        if let Driver::Present { cards, .. } = driver() {
            assert!(cards.iter().all(|card| card.memory_bytes != Some(0)));
        }
    }
}
