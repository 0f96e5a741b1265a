//! A scripted NVML: `libnvidia-ml.so.1` for tests on machines without a GPU.
//!
//! Plays each card's `nvml` table: every field a value, or a list of values, one a reading, the last of which
//! stays. A value is a number; `"error N"`, which fails the reading; `"max"`, the largest there is; or
//! `"rate N"`, which grows by N a second. Fields that are not told are not supported.

#![allow(unsafe_code, missing_docs, unreachable_pub, reason = "a C interface")]
#![allow(non_snake_case, clippy::missing_safety_doc, clippy::not_unsafe_ptr_arg_deref)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test's library may panic")]

#[path = "scenario.rs"]
mod scenario;

use nvml_wrapper_sys::bindings::*;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

const SUCCESS: c_uint = 0;
const INVALID_ARGUMENT: c_uint = 2;
const NOT_SUPPORTED: c_uint = 3;
const NOT_FOUND: c_uint = 6;
const INSUFFICIENT_SIZE: c_uint = 7;

#[derive(Deserialize)]
struct Scenario {
    #[serde(default)]
    card: Vec<CardTable>,
    #[serde(default)]
    nvml: Section,
}

#[derive(Deserialize)]
struct CardTable {
    #[serde(flatten)]
    card: scenario::Card,
    #[serde(default)]
    nvml: BTreeMap<String, Series>,
    /// Slices.
    #[serde(default)]
    mig: Vec<Slice>,
    /// What the kernel's driver reads: pid, memory, and SM utilisation of each process, as lists.
    #[serde(default)]
    processes: Vec<Process>,
}

#[derive(Deserialize)]
struct Slice {
    uuid: String,
    #[serde(default)]
    nvml: BTreeMap<String, Series>,
}

#[derive(Deserialize, Clone)]
struct Process {
    pid: i64,
    #[serde(default)]
    memory: Option<Item>,
    #[serde(default)]
    sm: Option<Item>,
}

#[derive(Deserialize, Default)]
struct Section {
    /// What `nvmlInit_v2` answers.
    #[serde(default)]
    init: Option<Series>,
    driver_version: Option<String>,
    cuda_version: Option<c_int>,
    /// From this reading of any card on, every reading fails so.
    lost: Option<Lost>,
    /// Ancestors of pairs, by positions: 0 internal, 10 single, 20 multiple, 30 host bridge, 40 node, 50 system.
    #[serde(default)]
    topology: Vec<(usize, usize, c_uint)>,
    /// NVLinks between pairs, by positions: how many.
    #[serde(default)]
    nvlinks: Vec<(usize, usize, u32)>,
}

#[derive(Deserialize)]
struct Lost {
    from: u64,
    code: c_uint,
    card: usize,
    /// Whether a second `nvmlInit_v2` brings it back.
    #[serde(default)]
    comes_back: bool,
}

#[derive(Deserialize, Clone)]
#[serde(untagged)]
enum Series {
    Many(Vec<Item>),
    One(Item),
}

#[derive(Deserialize, Clone)]
#[serde(untagged)]
enum Item {
    Number(i64),
    Text(String),
}

impl Item {
    fn value(&self) -> Result<u64, c_uint> {
        static START: OnceLock<Instant> = OnceLock::new();
        let text = match self {
            Self::Number(number) => return Ok(*number as u64),
            Self::Text(text) => text,
        };
        match text.split_once(' ') {
            Some(("error", code)) => Err(code.parse().expect("an error's number")),
            Some(("rate", rate)) => {
                let rate: f64 = rate.parse().expect("a rate");
                // Not from zero: a counter has counted since the driver was loaded.
                Ok(1_000_000 + (rate * START.get_or_init(Instant::now).elapsed().as_secs_f64()) as u64)
            }
            _ if text == "max" => Ok(u64::MAX),
            _ => Ok(text.parse().expect("a number")),
        }
    }
}

/// A card or a slice of one.
#[derive(Clone, Copy)]
struct Handle {
    card: usize,
    slice: Option<usize>,
}

struct State {
    scenario: Scenario,
    /// Every handle there is; a device is the address of one.
    handles: Vec<Handle>,
}

static STATE: OnceLock<State> = OnceLock::new();

fn state() -> &'static State {
    STATE.get_or_init(|| {
        let scenario: Scenario = scenario::read();
        let mut handles = Vec::new();
        for (card, table) in scenario.card.iter().enumerate() {
            handles.push(Handle { card, slice: None });
            handles.extend((0..table.mig.len()).map(|slice| Handle { card, slice: Some(slice) }));
        }
        State { scenario, handles }
    })
}

fn handle(device: nvmlDevice_t) -> Result<Handle, c_uint> {
    let known = state().handles.iter().find(|handle| std::ptr::eq(*handle, device.cast()));
    known.copied().ok_or(INVALID_ARGUMENT)
}

fn device_of(wanted: impl Fn(&Handle) -> bool) -> Option<nvmlDevice_t> {
    state()
        .handles
        .iter()
        .find(|handle| wanted(handle))
        .map(|handle| std::ptr::from_ref(handle).cast_mut().cast())
}

fn table(handle: Handle) -> &'static CardTable {
    &state().scenario.card[handle.card]
}

/// Calls of a kind so far, this one included.
fn count(what: String) -> u64 {
    static COUNTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());
    let mut counts = COUNTS.lock().unwrap();
    let count = counts.entry(what).or_default();
    *count += 1;
    *count
}

fn play(series: &Series, turn: u64) -> Result<u64, c_uint> {
    match series {
        Series::One(item) => item.value(),
        Series::Many(items) => items[(turn as usize - 1).min(items.len() - 1)].value(),
    }
}

/// The next reading of a field.
fn read(device: nvmlDevice_t, field: &str) -> Result<u64, c_uint> {
    let handle = handle(device)?;
    lost(handle)?;
    let table = table(handle);
    let fields = handle.slice.map_or(&table.nvml, |slice| &table.mig[slice].nvml);
    let turn = count(format!("{}/{:?}/{field}", handle.card, handle.slice));
    fields.get(field).map_or(Err(NOT_SUPPORTED), |series| play(series, turn))
}

/// Whether a field is told at all; asking counts for nothing.
fn told(device: nvmlDevice_t, field: &str) -> bool {
    handle(device).is_ok_and(|handle| {
        let table = table(handle);
        handle.slice.map_or(&table.nvml, |slice| &table.mig[slice].nvml).contains_key(field)
    })
}

fn lost(handle: Handle) -> Result<(), c_uint> {
    let Some(lost) = state().scenario.nvml.lost.as_ref().filter(|lost| lost.card == handle.card) else {
        return Ok(());
    };
    let readings = count(format!("readings/{}", handle.card));
    let inits = *INITS.lock().unwrap();
    let back = lost.comes_back && inits > 1;
    if readings >= lost.from && !back { Err(lost.code) } else { Ok(()) }
}

static INITS: Mutex<u64> = Mutex::new(0);

fn answer(result: Result<(), c_uint>) -> c_uint {
    result.map_or_else(|code| code, |()| SUCCESS)
}

fn put<T>(to: *mut T, value: Result<T, c_uint>) -> c_uint {
    // SAFETY: the caller's.
    answer(value.map(|value| unsafe { to.write(value) }))
}

fn put_text(to: *mut c_char, len: c_uint, text: &str) -> c_uint {
    if text.len() >= len as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the caller's, of `len` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len());
        to.add(text.len()).write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_uint {
    let mut inits = INITS.lock().unwrap();
    *inits += 1;
    let turn = *inits;
    answer(state().scenario.nvml.init.as_ref().map_or(Ok(0), |series| play(series, turn)).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_: c_uint) -> c_uint {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_uint {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(_: c_uint) -> *const c_char {
    c"scripted".as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetDriverVersion(to: *mut c_char, len: c_uint) -> c_uint {
    put_text(to, len, state().scenario.nvml.driver_version.as_deref().unwrap_or("580.65.06"))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetNVMLVersion(to: *mut c_char, len: c_uint) -> c_uint {
    put_text(to, len, "13.580.65.06")
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetCudaDriverVersion_v2(to: *mut c_int) -> c_uint {
    put(to, Ok(state().scenario.nvml.cuda_version.unwrap_or(13000)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(to: *mut c_uint) -> c_uint {
    put(to, Ok(state().scenario.card.len() as c_uint))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, to: *mut nvmlDevice_t) -> c_uint {
    let found = device_of(|handle| handle.card == index as usize && handle.slice.is_none());
    put(to, found.ok_or(INVALID_ARGUMENT))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut nvmlDevice_t) -> c_uint {
    // SAFETY: the caller's.
    let uuid = unsafe { CStr::from_ptr(uuid) }.to_string_lossy();
    let found = device_of(|handle| self::uuid(*handle) == uuid);
    put(to, found.ok_or(NOT_FOUND))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, to: *mut nvmlDevice_t) -> c_uint {
    // SAFETY: the caller's.
    let id = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_ascii_lowercase();
    let found = device_of(|handle| {
        handle.slice.is_none() && id.ends_with(&table(*handle).card.pci_bus_id.to_ascii_lowercase())
    });
    put(to, found.ok_or(NOT_FOUND))
}

fn uuid(handle: Handle) -> &'static str {
    let table = table(handle);
    handle.slice.map_or(&table.card.uuid, |slice| &table.mig[slice].uuid)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(device: nvmlDevice_t, to: *mut c_char, len: c_uint) -> c_uint {
    handle(device).map_or_else(|code| code, |handle| put_text(to, len, uuid(handle)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetName(device: nvmlDevice_t, to: *mut c_char, len: c_uint) -> c_uint {
    handle(device).map_or_else(|code| code, |handle| put_text(to, len, &table(handle).card.name))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, to: *mut nvmlPciInfo_t) -> c_uint {
    put(to, handle(device).map(|handle| pci_info(handle.card)))
}

fn pci_info(card: usize) -> nvmlPciInfo_t {
    let id = format!("0000{}", state().scenario.card[card].card.pci_bus_id.to_ascii_uppercase());
    let hex = |text: &str| u32::from_str_radix(text, 16).unwrap_or(0);
    // SAFETY: numbers and characters only, for which zero is valid.
    let mut info: nvmlPciInfo_t = unsafe { std::mem::zeroed() };
    (info.domain, info.bus, info.device) = (hex(&id[..8]), hex(&id[9..11]), hex(&id[12..14]));
    info.busId.iter_mut().zip(id.bytes()).for_each(|(to, from)| *to = from as c_char);
    info
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, to: *mut nvmlMemory_v2_t) -> c_uint {
    let info = || {
        let total = match read(device, "memory_total") {
            Err(NOT_SUPPORTED) if !told(device, "memory_total") => table(handle(device)?).card.memory_bytes,
            other => other?,
        };
        let used = read(device, "memory_used")?;
        Ok(nvmlMemory_v2_t { version: 0, total, reserved: 0, free: total.wrapping_sub(used), used })
    };
    put(to, info())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, to: *mut nvmlUtilization_t) -> c_uint {
    let rates = || {
        let gpu = read(device, "utilisation")? as c_uint;
        Ok(nvmlUtilization_t { gpu, memory: read(device, "memory_utilisation").unwrap_or(0) as c_uint })
    };
    put(to, rates())
}

/// One buffered reading a call, a sixth of a second after the last one.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetSamples(
    device: nvmlDevice_t,
    _: c_uint,
    last: c_ulonglong,
    kind: *mut c_uint,
    len: *mut c_uint,
    to: *mut nvmlSample_t,
) -> c_uint {
    if !told(device, "samples") {
        return NOT_SUPPORTED;
    }
    // SAFETY: the caller's.
    unsafe {
        kind.write(nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT);
        if to.is_null() {
            len.write(1);
            return SUCCESS;
        }
        len.write(1);
    }
    let sample = read(device, "samples").map(|value| nvmlSample_t {
        timeStamp: last + 166_000,
        sampleValue: nvmlValue_t { uiVal: value as c_uint },
    });
    put(to, sample)
}

macro_rules! plain {
    ($($name:ident $field:literal $type:ty)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(device: nvmlDevice_t, to: *mut $type) -> c_uint {
            put(to, read(device, $field).map(|value| value as $type))
        }
    )*};
}

plain! {
    nvmlDeviceGetPowerUsage "power_mw" c_uint
    nvmlDeviceGetTotalEnergyConsumption "energy_mj" c_ulonglong
    nvmlDeviceGetCurrentClocksThrottleReasons "throttle" c_ulonglong
    nvmlDeviceGetArchitecture "architecture" c_uint
    nvmlDeviceGetPersistenceMode "persistence" c_uint
    nvmlDeviceGetComputeMode "compute_mode" c_uint
    nvmlDeviceGetBrand "brand" c_uint
    nvmlDeviceGetIndex "index" c_uint
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperature(device: nvmlDevice_t, _: c_uint, to: *mut c_uint) -> c_uint {
    put(to, read(device, "temperature").map(|value| value as c_uint))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetClockInfo(device: nvmlDevice_t, kind: c_uint, to: *mut c_uint) -> c_uint {
    let field = if kind == 2 { "memory_clock" } else { "sm_clock" };
    put(to, read(device, field).map(|value| value as c_uint))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPcieThroughput(
    device: nvmlDevice_t,
    counter: c_uint,
    to: *mut c_uint,
) -> c_uint {
    let field = if counter == 0 { "pcie_tx" } else { "pcie_rx" };
    put(to, read(device, field).map(|value| value as c_uint))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: nvmlDevice_t,
    major: *mut c_int,
    minor: *mut c_int,
) -> c_uint {
    let capability = || {
        lost(handle(device)?)?;
        Ok(table(handle(device)?).card.compute_capability)
    };
    match capability() {
        Ok((a, b)) => put(major, Ok(a as c_int)) | put(minor, Ok(b as c_int)),
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetFieldValues(
    device: nvmlDevice_t,
    count: c_int,
    values: *mut nvmlFieldValue_t,
) -> c_uint {
    // SAFETY: the caller's.
    let values = unsafe { std::slice::from_raw_parts_mut(values, count as usize) };
    for value in values {
        let field = match value.fieldId {
            138 => "nvlink_tx",
            139 => "nvlink_rx",
            _ => "unknown",
        };
        value.valueType = nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        match read(device, field) {
            Ok(number) => {
                value.nvmlReturn = SUCCESS;
                value.value = nvmlValue_t { ullVal: number };
            }
            Err(code) => value.nvmlReturn = code,
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: nvmlDevice_t,
    len: *mut c_uint,
    to: *mut nvmlProcessInfo_t,
) -> c_uint {
    let processes = match handle(device).and_then(|handle| lost(handle).map(|()| handle)) {
        Ok(handle) => table(handle).processes.clone(),
        Err(code) => return code,
    };
    // SAFETY: the caller's.
    unsafe {
        if (*len as usize) < processes.len() {
            len.write(processes.len() as c_uint);
            return INSUFFICIENT_SIZE;
        }
        len.write(processes.len() as c_uint);
        for (i, process) in processes.iter().enumerate() {
            to.add(i).write(nvmlProcessInfo_t {
                pid: pid(process),
                usedGpuMemory: process
                    .memory
                    .as_ref()
                    .map_or(u64::MAX, |item| item.value().unwrap_or(u64::MAX)),
                gpuInstanceId: u32::MAX,
                computeInstanceId: u32::MAX,
            });
        }
    }
    SUCCESS
}

/// -1 is some process of the program under test: the youngest child of this one.
fn pid(process: &Process) -> c_uint {
    if process.pid >= 0 {
        return process.pid as c_uint;
    }
    let me = std::process::id();
    let children = format!("/proc/{me}/task/{me}/children");
    let text = std::fs::read_to_string(children).unwrap_or_default();
    text.split_whitespace().last().and_then(|pid| pid.parse().ok()).unwrap_or(me)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetProcessUtilization(
    device: nvmlDevice_t,
    to: *mut nvmlProcessUtilizationSample_t,
    len: *mut c_uint,
    last: c_ulonglong,
) -> c_uint {
    let processes: Vec<Process> = match handle(device) {
        Ok(handle) => {
            table(handle).processes.iter().filter(|process| process.sm.is_some()).cloned().collect()
        }
        Err(code) => return code,
    };
    if processes.is_empty() {
        return NOT_SUPPORTED;
    }
    // SAFETY: the caller's.
    unsafe {
        if to.is_null() || (*len as usize) < processes.len() {
            len.write(processes.len() as c_uint);
            return INSUFFICIENT_SIZE;
        }
        len.write(processes.len() as c_uint);
        for (i, process) in processes.iter().enumerate() {
            to.add(i).write(nvmlProcessUtilizationSample_t {
                pid: pid(process),
                timeStamp: last + 166_000,
                smUtil: process.sm.as_ref().map_or(0, |item| item.value().unwrap_or(0) as c_uint),
                memUtil: 0,
                encUtil: 0,
                decUtil: 0,
            });
        }
    }
    SUCCESS
}

// Slices.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(device: nvmlDevice_t, now: *mut c_uint, next: *mut c_uint) -> c_uint {
    match handle(device) {
        Ok(handle) if handle.slice.is_none() => {
            let on = c_uint::from(!table(handle).mig.is_empty());
            put(now, Ok(on)) | put(next, Ok(on))
        }
        _ => NOT_SUPPORTED,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, to: *mut c_uint) -> c_uint {
    put(to, handle(device).map(|handle| table(handle).mig.len() as c_uint))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: nvmlDevice_t,
    index: c_uint,
    to: *mut nvmlDevice_t,
) -> c_uint {
    let slice = |parent: Handle| {
        device_of(|handle| handle.card == parent.card && handle.slice == Some(index as usize))
            .ok_or(NOT_FOUND)
    };
    put(to, handle(device).and_then(slice))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceIsMigDeviceHandle(device: nvmlDevice_t, to: *mut c_uint) -> c_uint {
    put(to, handle(device).map(|handle| c_uint::from(handle.slice.is_some())))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    device: nvmlDevice_t,
    to: *mut nvmlDevice_t,
) -> c_uint {
    let parent = |slice: Handle| {
        device_of(|handle| handle.card == slice.card && handle.slice.is_none()).ok_or(NOT_FOUND)
    };
    put(to, handle(device).and_then(parent))
}

// Links, modes and errors.

fn pair(list: &[(usize, usize, u32)], a: usize, b: usize) -> Option<u32> {
    list.iter().find(|(x, y, _)| (*x, *y) == (a, b) || (*x, *y) == (b, a)).map(|(.., value)| *value)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTopologyCommonAncestor(
    a: nvmlDevice_t,
    b: nvmlDevice_t,
    to: *mut c_uint,
) -> c_uint {
    let level =
        || pair(&state().scenario.nvml.topology, handle(a)?.card, handle(b)?.card).ok_or(NOT_SUPPORTED);
    put(to, level())
}

/// The other end of each link of a card, links of a pair one after another.
fn links(card: usize) -> Vec<usize> {
    let ends = state().scenario.nvml.nvlinks.iter().filter_map(|&(a, b, count)| match card {
        card if card == a => Some((b, count)),
        card if card == b => Some((a, count)),
        _ => None,
    });
    ends.flat_map(|(other, count)| std::iter::repeat_n(other, count as usize)).collect()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkState(device: nvmlDevice_t, link: c_uint, to: *mut c_uint) -> c_uint {
    let state = || {
        let links = links(handle(device)?.card);
        if links.is_empty() { Err(NOT_SUPPORTED) } else { Ok(c_uint::from((link as usize) < links.len())) }
    };
    put(to, state())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: nvmlDevice_t,
    link: c_uint,
    to: *mut nvmlPciInfo_t,
) -> c_uint {
    let other = || links(handle(device)?.card).get(link as usize).copied().ok_or(NOT_SUPPORTED);
    put(to, other().map(pci_info))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetEccMode(device: nvmlDevice_t, now: *mut c_uint, next: *mut c_uint) -> c_uint {
    match read(device, "ecc") {
        Ok(on) => put(now, Ok(on as c_uint)) | put(next, Ok(on as c_uint)),
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: nvmlDevice_t,
    _: c_uint,
    _: c_uint,
    to: *mut c_ulonglong,
) -> c_uint {
    put(to, read(device, "ecc_errors"))
}

// Performance monitoring: a sample is a moment; a metric is the scenario's value.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmQueryDeviceSupport(device: nvmlDevice_t, to: *mut nvmlGpmSupport_t) -> c_uint {
    // SAFETY: the caller's.
    answer(
        handle(device)
            .map(|_| unsafe { (*to).isSupportedDevice = c_uint::from(told(device, "sm_activity")) }),
    )
}

struct Moment(Mutex<usize>);

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmSampleAlloc(to: *mut nvmlGpmSample_t) -> c_uint {
    put(to, Ok(Box::into_raw(Box::new(Moment(Mutex::new(0)))).cast()))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmSampleFree(sample: nvmlGpmSample_t) -> c_uint {
    // SAFETY: made by `nvmlGpmSampleAlloc`.
    drop(unsafe { Box::from_raw(sample.cast::<Moment>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmSampleGet(device: nvmlDevice_t, sample: nvmlGpmSample_t) -> c_uint {
    if let Err(code) = handle(device).and_then(lost) {
        return code;
    }
    // SAFETY: made by `nvmlGpmSampleAlloc`.
    *unsafe { &*sample.cast::<Moment>() }.0.lock().unwrap() = device as usize;
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmMetricsGet(request: *mut nvmlGpmMetricsGet_t) -> c_uint {
    // SAFETY: the caller's; its second sample is one of ours.
    let (request, device) = unsafe {
        let request = &mut *request;
        (request as *mut nvmlGpmMetricsGet_t, *(*request.sample2.cast::<Moment>()).0.lock().unwrap())
    };
    // SAFETY: as above.
    let request = unsafe { &mut *request };
    for metric in &mut request.metrics[..request.numMetrics as usize] {
        let field = match metric.metricId {
            2 => "sm_activity",
            3 => "sm_occupancy",
            _ => "unknown",
        };
        match read(device as nvmlDevice_t, field) {
            Ok(value) => (metric.nvmlReturn, metric.value) = (SUCCESS, value as f64),
            Err(code) => metric.nvmlReturn = code,
        }
    }
    SUCCESS
}
