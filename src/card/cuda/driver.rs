//! The door to the CUDA driver: loaded once, checked for every function that is used, never panicking.
//!
//! cudarc panics at the first call of a function that the loaded library lacks, so all of them are looked
//! up before the first call.

#![allow(unsafe_code)]

use crate::error::{Error, Kind};
use cudarc::driver::sys;
use std::ffi::{CStr, c_char};
use std::panic::catch_unwind;
use std::sync::OnceLock;

/// The functions that this crate calls. A driver that lacks one of them is too old.
const FUNCTIONS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDeviceCanAccessPeer",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxGetState",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxEnablePeerAccess",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuEventDestroy_v2",
    "cuMemcpyPeerAsync",
    "cuMemGetInfo_v2",
    "cuGetErrorName",
    "cuGetErrorString",
];

/// A symbol that no vendor's driver has: scripted ones, which compute nothing, are known by it.
const SCRIPTED: &str = "dpvsddp_scripted_driver";

/// Why a driver could not be used, or a call of it failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What was called.
    pub call: &'static str,
    /// The driver's number for what went wrong; `None` where there was no driver to give one.
    pub code: Option<u32>,
    /// In the driver's words, or ours.
    pub reason: String,
}

impl Fault {
    /// Whether there is no driver at all: an ordinary machine without a GPU.
    pub fn is_missing(&self) -> bool {
        self.call == "dlopen"
    }

    /// What people can do about it.
    fn hint(&self) -> &'static str {
        match self.code {
            None if self.is_missing() => {
                "install the NVIDIA driver; in a container, start it with GPUs (`docker run --gpus all`)"
            }
            None => "update the NVIDIA driver",
            Some(2) => "another process holds the card's memory: `nvidia-smi` shows which",
            Some(34) => "a CUDA toolkit's stub is found first: take its stubs folder out of LD_LIBRARY_PATH",
            Some(46) => "another process holds the card alone (exclusive compute mode): `nvidia-smi -c 0`",
            Some(100) => "check CUDA_VISIBLE_DEVICES, and `nvidia-smi`",
            Some(802) => "wait for the fabric manager: `systemctl status nvidia-fabricmanager`",
            Some(803 | 804) => {
                "kernel module and driver library are of different versions: reboot, or reload the module"
            }
            Some(999) => "look for Xid errors in `dmesg`; a reboot may be needed",
            Some(_) => "`dp-vs-ddp doctor` says what this machine has",
        }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.code {
            None => f.write_str(&self.reason),
            Some(code) => write!(f, "{} failed: {} (CUDA error {code})", self.call, self.reason),
        }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        let kind = if fault.code == Some(2) { Kind::OutOfMemory } else { Kind::Unavailable };
        Self::new(kind, fault.to_string()).hint(fault.hint())
    }
}

/// The driver, loaded and initialised. Its cards do not change while the process lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// Newest CUDA it supports: 1000 x major + 10 x minor.
    pub cuda_version: u32,
    /// Whether it is a test's: device memory is host memory, and nothing can compute there.
    pub scripted: bool,
    cards: Vec<CudaCard>,
}

/// A card as the driver enumerates it: `CUDA_VISIBLE_DEVICES` has been applied.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct CudaCard {
    /// The `i` of `cuda:i`.
    pub ordinal: usize,
    /// `GPU-...`, or `MIG-...` for a slice: what NVML knows it by, too.
    pub uuid: String,
    /// As in `0000:3b:00.0`.
    pub pci_bus_id: Option<String>,
    /// Product name.
    pub name: Option<String>,
    /// All of its memory; missing where the driver gives none.
    pub memory_bytes: Option<u64>,
    /// As in `(9, 0)`.
    pub compute_capability: Option<(u32, u32)>,
    /// Whether it shares the host's memory.
    pub integrated: Option<bool>,
}

impl Driver {
    /// One with these cards, for deciding what to do with it.
    #[cfg(test)]
    pub(crate) fn of(cards: Vec<CudaCard>) -> Self {
        Self { cuda_version: 13000, scripted: false, cards }
    }

    /// Its cards, in the order of their ordinals.
    pub fn cards(&self) -> &[CudaCard] {
        &self.cards
    }

    /// As in `13.0`.
    pub fn cuda(&self) -> String {
        format!("{}.{}", self.cuda_version / 1000, self.cuda_version % 1000 / 10)
    }

    /// Whether the first card can read the second one's memory; `None` where the driver does not say.
    pub fn can_access_peer(&self, card: usize, peer: usize) -> Option<bool> {
        let mut can = 0;
        // SAFETY: `can` outlives the call; numbers that are no device are refused by the driver.
        let result = unsafe { sys::cuDeviceCanAccessPeer(&mut can, card as i32, peer as i32) };
        (result as u32 == 0).then_some(can != 0)
    }

    /// Whether some process part of this one holds the card's primary context; `None` where unknown.
    pub fn has_context(&self, card: usize) -> Option<bool> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: both outlive the call.
        let result = unsafe { sys::cuDevicePrimaryCtxGetState(card as i32, &mut flags, &mut active) };
        (result as u32 == 0).then_some(active != 0)
    }
}

/// The driver, loaded at the first call; afterwards always the same answer.
pub fn driver() -> Result<&'static Driver, Fault> {
    static DRIVER: OnceLock<Result<Driver, Fault>> = OnceLock::new();
    DRIVER.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// An error unless the driver is content.
pub(super) fn check(call: &'static str, result: sys::CUresult) -> Result<(), Fault> {
    // A number, not an enumeration: newer drivers have newer errors.
    let code = result as u32;
    if code == 0 { Ok(()) } else { Err(Fault { call, code: Some(code), reason: reason(result) }) }
}

/// The driver's name for an error, and what it says of it.
fn reason(result: sys::CUresult) -> String {
    let (mut name, mut text): (*const c_char, *const c_char) = (std::ptr::null(), std::ptr::null());
    // SAFETY: the driver points both at strings that live for ever, or leaves them null.
    unsafe {
        let _ = sys::cuGetErrorName(result, &mut name);
        let _ = sys::cuGetErrorString(result, &mut text);
        let read = |text: *const c_char| {
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        match (read(name), read(text)) {
            (Some(name), Some(text)) => format!("{name}, {text}"),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => "an error that this driver has no name for".to_owned(),
        }
    }
}

fn load() -> Result<Driver, Fault> {
    let broken = |call, reason: &str| Fault { call, code: None, reason: reason.to_owned() };
    // Present, but its loading may still go wrong inside cudarc: nothing of that may reach the user.
    catch_unwind(|| {
        // SAFETY: loading a library runs its initialisers; that is what a driver is for.
        if !unsafe { sys::is_culib_present() } {
            return Err(broken("dlopen", "there is no CUDA driver (libcuda.so.1) here"));
        }
        if let Some(missing) = FUNCTIONS.iter().find(|name| !has(name)) {
            return Err(broken("dlsym", &format!("the CUDA driver has no function `{missing}`")));
        }
        // SAFETY: the function takes no pointer.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        let mut version = 0;
        // SAFETY: `version` outlives the call.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        Ok(Driver {
            cuda_version: version.unsigned_abs(),
            scripted: has(SCRIPTED),
            cards: (0..count).map(card).collect::<Result<_, _>>()?,
        })
    })
    .unwrap_or_else(|_| Err(broken("dlopen", "loading the CUDA driver panicked")))
}

/// Whether the loaded driver exports this name.
fn has(name: &str) -> bool {
    // SAFETY: only looked up, never called through this type.
    unsafe { sys::culib().get::<*const ()>(name.as_bytes()).is_ok() }
}

/// All that is known of one card. Only its identity is indispensable.
fn card(ordinal: i32) -> Result<CudaCard, Fault> {
    let mut device = 0;
    // SAFETY: `device` outlives the call.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` outlives the call.
    check("cuDeviceGetUuid_v2", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) })?;
    let name = text(|buffer, len| {
        // SAFETY: the driver writes at most `len` bytes, with a zero at their end.
        unsafe { sys::cuDeviceGetName(buffer, len, device) }
    });
    let pci_bus_id = text(|buffer, len| {
        // SAFETY: as above.
        unsafe { sys::cuDeviceGetPCIBusId(buffer, len, device) }
    });
    let mut memory = 0;
    // SAFETY: `memory` outlives the call.
    let told = unsafe { sys::cuDeviceTotalMem_v2(&mut memory, device) } as u32 == 0;
    use sys::CUdevice_attribute::*;
    let capability = |attribute| attribute_of(device, attribute).and_then(|value| u32::try_from(value).ok());
    Ok(CudaCard {
        ordinal: ordinal.unsigned_abs() as usize,
        uuid: uuid_text(&uuid.bytes.map(|byte| byte as u8), name.as_deref()),
        pci_bus_id: pci_bus_id.map(|id| id.to_ascii_lowercase()),
        memory_bytes: Some(memory as u64).filter(|bytes| told && *bytes > 0),
        compute_capability: capability(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
            .zip(capability(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)),
        integrated: attribute_of(device, CU_DEVICE_ATTRIBUTE_INTEGRATED).map(|value| value != 0),
        name,
    })
}

fn attribute_of(device: i32, attribute: sys::CUdevice_attribute) -> Option<i32> {
    let mut value = 0;
    // SAFETY: `value` outlives the call.
    let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
    (result as u32 == 0).then_some(value)
}

fn text(fill: impl FnOnce(*mut c_char, i32) -> sys::CUresult) -> Option<String> {
    let mut buffer = [0u8; 256];
    let told = fill(buffer.as_mut_ptr().cast(), buffer.len() as i32) as u32 == 0;
    let text = CStr::from_bytes_until_nul(&buffer).ok()?.to_string_lossy().trim().to_owned();
    Some(text).filter(|text| told && !text.is_empty())
}

/// As NVML and `nvidia-smi` write it. The driver gives 16 bytes alike for whole cards and slices, but a
/// slice's name says that it is one.
fn uuid_text(bytes: &[u8; 16], name: Option<&str>) -> String {
    let kind = if name.is_some_and(|name| name.contains(" MIG ")) { "MIG" } else { "GPU" };
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{kind}-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_written_as_nvml_writes_them() {
        let bytes =
            [0x89, 0x32, 0xf9, 0x37, 0xd7, 0x2c, 0x41, 0x06, 0xc1, 0x2f, 0x20, 0xbd, 0x9f, 0xae, 0xd9, 0xf6];
        let whole = uuid_text(&bytes, Some("NVIDIA H200"));
        assert_eq!(whole, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6");
        let slice = uuid_text(&bytes, Some("NVIDIA A100-SXM4-40GB MIG 1g.5gb"));
        assert_eq!(slice, "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6");
    }

    #[test]
    fn a_fault_says_what_was_called_and_what_to_do() {
        let fault = Fault { call: "cuInit", code: Some(803), reason: "SYSTEM_DRIVER_MISMATCH".into() };
        let error = Error::from(fault);
        assert_eq!(error.to_string(), "cuInit failed: SYSTEM_DRIVER_MISMATCH (CUDA error 803)");
        assert!(error.advice().unwrap().contains("reboot"));
    }

    #[test]
    fn asking_never_panics_whatever_the_machine_has() {
        match driver() {
            Ok(driver) => assert!(driver.cards().iter().all(|card| card.memory_bytes != Some(0))),
            Err(fault) => assert!(!fault.to_string().is_empty()),
        }
    }
}
