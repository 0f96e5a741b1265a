//! A scripted CUDA driver: `libcuda.so.1` for tests on machines without a GPU.
//!
//! Device memory is host memory. Work is really done, in the order that streams and events ask for: every
//! created stream is a thread with a queue; the legacy default stream works in the thread that calls, as
//! libtorch's CPU kernels do, which stand for the card's own in such tests. Nothing here is lenient: what a
//! real driver refuses is refused.

#![allow(unsafe_code, missing_docs, unreachable_pub, reason = "a C interface")]
#![allow(
    non_snake_case,
    non_upper_case_globals,
    clippy::missing_safety_doc,
    clippy::not_unsafe_ptr_arg_deref
)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test's library may panic")]

#[path = "scenario.rs"]
mod scenario;

use scenario::{Card, Fail};
use serde::Deserialize;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

const SUCCESS: c_uint = 0;
const INVALID_VALUE: c_uint = 1;
const NOT_INITIALIZED: c_uint = 3;
const INVALID_DEVICE: c_uint = 101;
const INVALID_CONTEXT: c_uint = 201;
const PEER_ACCESS_UNSUPPORTED: c_uint = 217;
const INVALID_HANDLE: c_uint = 400;
const NOT_READY: c_uint = 600;
const PEER_ACCESS_ALREADY_ENABLED: c_uint = 704;

#[derive(Deserialize)]
struct Scenario {
    #[serde(default)]
    card: Vec<Card>,
    #[serde(default)]
    cuda: Section,
}

#[derive(Deserialize, Default)]
struct Section {
    /// What `cuDriverGetVersion` says.
    version: Option<c_int>,
    /// Calls that fail.
    #[serde(default)]
    fail: Vec<Fail>,
    /// Pairs of positions in `card` that cannot reach each other's memory.
    #[serde(default)]
    no_peer: Vec<(usize, usize)>,
    /// Pairs of positions, from and to, between which copies never end.
    #[serde(default)]
    hang: Vec<(usize, usize)>,
    /// File that opened contexts, copies and peers are noted in, a line each.
    log: Option<String>,
}

struct Driver {
    section: Section,
    /// Visible cards.
    cards: Vec<Visible>,
}

struct Visible {
    card: Card,
    /// In the scenario.
    position: usize,
    context: Mutex<Option<usize>>,
    holds: Mutex<usize>,
}

struct Context {
    ordinal: usize,
    peers: Mutex<Vec<usize>>,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// What tells the product that nothing can compute here.
#[unsafe(no_mangle)]
pub static dpvsddp_scripted_driver: c_int = 1;

/// Positions of visible cards: indices or unambiguous beginnings of UUIDs, up to the first that is neither.
fn visible(cards: &[Card], variable: Option<&str>) -> Vec<usize> {
    let Some(list) = variable else { return (0..cards.len()).collect() };
    let mut chosen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let found: Vec<usize> = match entry.parse::<usize>() {
            Ok(index) => (index < cards.len()).then_some(index).into_iter().collect(),
            Err(_) if entry.len() > 4 => {
                (0..cards.len()).filter(|i| name(&cards[*i]).starts_with(entry)).collect()
            }
            Err(_) => Vec::new(),
        };
        match found[..] {
            [one] if chosen.contains(&one) => return Vec::new(),
            [one] => chosen.push(one),
            _ => break,
        }
    }
    chosen
}

/// A slice is known by a name of its own.
fn name(card: &Card) -> String {
    if card.name.contains(" MIG ") { card.uuid.replacen("GPU-", "MIG-", 1) } else { card.uuid.clone() }
}

fn driver() -> Result<&'static Driver, c_uint> {
    DRIVER.get().ok_or(NOT_INITIALIZED)
}

/// The code of an injected failure of this call.
fn injected(call: &str) -> Option<c_uint> {
    static COUNTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());
    let driver = DRIVER.get()?;
    let mut counts = COUNTS.lock().unwrap();
    let count = counts.entry(call.to_owned()).or_default();
    *count += 1;
    let here = |fail: &Fail| {
        fail.card.as_ref().is_none_or(|uuid| driver.cards.iter().any(|visible| visible.card.uuid == *uuid))
    };
    driver
        .section
        .fail
        .iter()
        .find(|fail| fail.call == call && fail.at.is_none_or(|at| at == *count) && here(fail))
        .map(|fail| fail.code)
}

fn note(line: &str) {
    let Some(path) = DRIVER.get().and_then(|driver| driver.section.log.as_ref()) else { return };
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).expect("log opens");
    file.write_all(format!("{} {line}\n", std::process::id()).as_bytes()).expect("log is written");
}

/// Runs a call: its injected failure, or what it does.
fn call(name: &str, work: impl FnOnce(&'static Driver) -> Result<(), c_uint>) -> c_uint {
    match injected(name).map_or_else(|| driver().and_then(work), Err) {
        Ok(()) => SUCCESS,
        Err(code) => code,
    }
}

fn card(driver: &'static Driver, device: c_int) -> Result<&'static Visible, c_uint> {
    usize::try_from(device).ok().and_then(|device| driver.cards.get(device)).ok_or(INVALID_DEVICE)
}

fn context<'a>(raw: *mut c_void) -> Result<&'a Context, c_uint> {
    // SAFETY: contexts are leaked; handles come from us.
    unsafe { raw.cast::<Context>().as_ref() }.ok_or(INVALID_CONTEXT)
}

fn current<'a>() -> Result<&'a Context, c_uint> {
    CURRENT
        .with_borrow(|stack| stack.last().copied())
        .ok_or(INVALID_CONTEXT)
        .and_then(|raw| context(raw as *mut c_void))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_: c_uint) -> c_uint {
    DRIVER.get_or_init(|| {
        let Scenario { card, cuda } = scenario::read();
        let chosen = visible(&card, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
        let cards = chosen
            .into_iter()
            .map(|position| Visible {
                card: card[position].clone(),
                position,
                context: Mutex::new(None),
                holds: Mutex::new(0),
            })
            .collect();
        Driver { section: cuda, cards }
    });
    let nothing = driver().is_ok_and(|driver| driver.cards.is_empty());
    injected("cuInit").unwrap_or(if nothing { 100 } else { SUCCESS })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_uint {
    call("cuDriverGetVersion", |driver| {
        // SAFETY: the caller's.
        unsafe { *version = driver.section.version.unwrap_or(13000) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_uint {
    call("cuDeviceGetCount", |driver| {
        // SAFETY: the caller's.
        unsafe { *count = driver.cards.len() as c_int };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_uint {
    call("cuDeviceGet", |driver| {
        card(driver, ordinal)?;
        // SAFETY: the caller's.
        unsafe { *device = ordinal };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_uint {
    call("cuDeviceGetUuid_v2", |driver| {
        let hex: Vec<u8> =
            card(driver, device)?.card.uuid[4..].bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte =
            |i: usize| u8::from_str_radix(std::str::from_utf8(&hex[2 * i..2 * i + 2]).unwrap(), 16).unwrap();
        // SAFETY: the caller's.
        unsafe { *uuid = std::array::from_fn(byte) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_uint {
    call("cuDeviceGetName", |driver| write_text(name, len, &card(driver, device)?.card.name))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) -> c_uint {
    call("cuDeviceGetPCIBusId", |driver| write_text(id, len, &card(driver, device)?.card.pci_bus_id))
}

fn write_text(to: *mut c_char, len: c_int, text: &str) -> Result<(), c_uint> {
    if text.len() >= len as usize {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's, of `len` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len());
        *to.add(text.len()) = 0;
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_uint {
    call("cuDeviceTotalMem_v2", |driver| {
        // SAFETY: the caller's.
        unsafe { *bytes = card(driver, device)?.card.memory_bytes as usize };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) -> c_uint {
    call("cuDeviceGetAttribute", |driver| {
        let card = &card(driver, device)?.card;
        let told = match attribute {
            16 => 4,
            18 => c_int::from(card.integrated),
            75 => card.compute_capability.0 as c_int,
            76 => card.compute_capability.1 as c_int,
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: the caller's.
        unsafe { *value = told };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> c_uint {
    call("cuDeviceCanAccessPeer", |driver| {
        let (a, b) = (card(driver, device)?.position, card(driver, peer)?.position);
        // SAFETY: the caller's.
        unsafe { *can = c_int::from(a != b && reachable(driver, a, b)) };
        Ok(())
    })
}

fn reachable(driver: &Driver, a: usize, b: usize) -> bool {
    !driver.section.no_peer.iter().any(|&(x, y)| (x, y) == (a, b) || (y, x) == (a, b))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(to: *mut *mut c_void, device: c_int) -> c_uint {
    call("cuDevicePrimaryCtxRetain", |driver| {
        let visible = card(driver, device)?;
        let raw = *visible.context.lock().unwrap().get_or_insert_with(|| {
            note(&format!("open {}", visible.card.uuid));
            let context = Context { ordinal: device as usize, peers: Mutex::default() };
            Box::into_raw(Box::new(context)) as usize
        });
        *visible.holds.lock().unwrap() += 1;
        // SAFETY: the caller's.
        unsafe { *to = raw as *mut c_void };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_uint {
    call("cuDevicePrimaryCtxRelease", |driver| {
        let mut holds = card(driver, device)?.holds.lock().unwrap();
        *holds = holds.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: *mut c_uint,
    active: *mut c_int,
) -> c_uint {
    call("cuDevicePrimaryCtxGetState", |driver| {
        let holds = *card(driver, device)?.holds.lock().unwrap();
        // SAFETY: the caller's.
        unsafe { (*flags, *active) = (0, c_int::from(holds > 0)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(raw: *mut c_void) -> c_uint {
    call("cuCtxSetCurrent", |_| {
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            if !raw.is_null() {
                stack.push(raw as usize);
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(raw: *mut c_void) -> c_uint {
    call("cuCtxPushCurrent", |_| {
        context(raw)?;
        CURRENT.with_borrow_mut(|stack| stack.push(raw as usize));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(to: *mut *mut c_void) -> c_uint {
    call("cuCtxPopCurrent", |_| {
        let raw = CURRENT.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        // SAFETY: the caller's.
        unsafe { *to = raw as *mut c_void };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_uint {
    call("cuMemGetInfo", |driver| {
        let bytes = driver.cards[current()?.ordinal].card.memory_bytes as usize;
        // SAFETY: the caller's.
        unsafe { (*free, *total) = (bytes / 2, bytes) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: *mut c_int) -> c_uint {
    call("cuCtxGetDevice", |_| {
        // SAFETY: the caller's.
        unsafe { *device = current()?.ordinal as c_int };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxEnablePeerAccess(peer: *mut c_void, _: c_uint) -> c_uint {
    call("cuCtxEnablePeerAccess", |driver| {
        let (this, peer) = (current()?, context(peer)?.ordinal);
        if !reachable(driver, driver.cards[this.ordinal].position, driver.cards[peer].position) {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        let mut peers = this.peers.lock().unwrap();
        if peers.contains(&peer) {
            return Err(PEER_ACCESS_ALREADY_ENABLED);
        }
        peers.push(peer);
        note(&format!("peer {} {}", driver.cards[this.ordinal].card.uuid, driver.cards[peer].card.uuid));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_uint {
    call("cuCtxGetStreamPriorityRange", |_| {
        current()?;
        // SAFETY: the caller's.
        unsafe { (*least, *greatest) = (0, -5) };
        Ok(())
    })
}

// Streams and events.

enum Work {
    Copy { to: u64, from: u64, bytes: usize },
    Host { function: unsafe extern "C" fn(*mut c_void), data: usize },
    Record(Arc<Event>, u64),
    Wait(Arc<Event>, u64),
    Stop,
}

struct Stream {
    ordinal: usize,
    queue: Arc<(Mutex<VecDeque<Work>>, Condvar)>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Event {
    ordinal: usize,
    timed: bool,
    state: Mutex<Recorded>,
    reached: Condvar,
}

#[derive(Default)]
struct Recorded {
    /// Times it was enqueued.
    asked: u64,
    /// Times the stream came to it.
    done: u64,
    at: Option<Instant>,
}

fn perform(work: Work) {
    match work {
        // SAFETY: ranges that the caller of the copy promised; host memory here.
        Work::Copy { to, from, bytes } => unsafe {
            std::ptr::copy(from as *const u8, to as *mut u8, bytes);
        },
        // SAFETY: the caller's function, with the caller's data.
        Work::Host { function, data } => unsafe { function(data as *mut c_void) },
        Work::Record(event, turn) => {
            let mut state = event.state.lock().unwrap();
            state.done = state.done.max(turn);
            state.at = Some(Instant::now());
            event.reached.notify_all();
        }
        Work::Wait(event, turn) => {
            let mut state = event.state.lock().unwrap();
            while state.done < turn {
                state = event.reached.wait(state).unwrap();
            }
        }
        Work::Stop => {}
    }
}

fn work(queue: &(Mutex<VecDeque<Work>>, Condvar)) {
    loop {
        let mut waiting = queue.0.lock().unwrap();
        let next = loop {
            match waiting.pop_front() {
                Some(next) => break next,
                None => waiting = queue.1.wait(waiting).unwrap(),
            }
        };
        drop(waiting);
        if matches!(next, Work::Stop) {
            return;
        }
        perform(next);
    }
}

/// In the stream's thread, or at once for the default stream, which must have a context.
fn enqueue(raw: *mut c_void, work: Work) -> Result<(), c_uint> {
    // SAFETY: handles come from us.
    match unsafe { raw.cast::<Stream>().as_ref() } {
        None => {
            current()?;
            perform(work);
        }
        Some(stream) => {
            stream.queue.0.lock().unwrap().push_back(work);
            stream.queue.1.notify_one();
        }
    }
    Ok(())
}

/// The card a stream belongs to.
fn card_of(raw: *mut c_void) -> Result<usize, c_uint> {
    // SAFETY: handles come from us.
    unsafe { raw.cast::<Stream>().as_ref() }
        .map_or_else(|| Ok(current()?.ordinal), |stream| Ok(stream.ordinal))
}

fn event(raw: *mut c_void) -> Result<Arc<Event>, c_uint> {
    if raw.is_null() {
        return Err(INVALID_HANDLE);
    }
    // SAFETY: handles come from `cuEventCreate`, which leaked one count.
    unsafe {
        Arc::increment_strong_count(raw.cast::<Event>());
        Ok(Arc::from_raw(raw.cast::<Event>()))
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(to: *mut *mut c_void, flags: c_uint, priority: c_int) -> c_uint {
    call("cuStreamCreateWithPriority", |_| {
        let ordinal = current()?.ordinal;
        let queue: Arc<(Mutex<VecDeque<Work>>, Condvar)> = Arc::default();
        let theirs = Arc::clone(&queue);
        let thread = std::thread::spawn(move || work(&theirs));
        note(&format!("stream card {ordinal} flags {flags} priority {priority}"));
        let stream = Stream { ordinal, queue, thread: Mutex::new(Some(thread)) };
        // SAFETY: the caller's.
        unsafe { *to = Box::into_raw(Box::new(stream)).cast() };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(raw: *mut c_void) -> c_uint {
    call("cuStreamDestroy", |_| {
        if raw.is_null() {
            return Err(INVALID_HANDLE);
        }
        enqueue(raw, Work::Stop)?;
        // The real one returns at once and finishes behind the caller's back: so does this.
        // SAFETY: handles come from us, and this one is not used again.
        drop(unsafe { Box::from_raw(raw.cast::<Stream>()) }.thread.lock().unwrap().take());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: *mut c_void, raw: *mut c_void, _: c_uint) -> c_uint {
    call("cuStreamWaitEvent", |_| {
        let event = event(raw)?;
        let turn = event.state.lock().unwrap().asked;
        enqueue(stream, Work::Wait(event, turn))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_uint {
    call("cuStreamSynchronize", |_| {
        let end =
            Arc::new(Event { ordinal: 0, timed: false, state: Mutex::default(), reached: Condvar::new() });
        enqueue(stream, Work::Record(Arc::clone(&end), 1))?;
        perform(Work::Wait(end, 1));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(
    stream: *mut c_void,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> c_uint {
    call("cuLaunchHostFunc", |_| {
        let function = function.ok_or(INVALID_VALUE)?;
        enqueue(stream, Work::Host { function, data: data as usize })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyPeerAsync(
    to: u64,
    to_context: *mut c_void,
    from: u64,
    from_context: *mut c_void,
    bytes: usize,
    stream: *mut c_void,
) -> c_uint {
    call("cuMemcpyPeerAsync", |driver| {
        let uuid = |raw| Ok::<_, c_uint>(&driver.cards[context(raw)?.ordinal].card.uuid);
        note(&format!("copy {} {} {bytes}", uuid(from_context)?, uuid(to_context)?));
        let position = |raw| Ok::<_, c_uint>(driver.cards[context(raw)?.ordinal].position);
        if driver.section.hang.contains(&(position(from_context)?, position(to_context)?)) {
            let never = Event { ordinal: 0, timed: false, state: Mutex::default(), reached: Condvar::new() };
            enqueue(stream, Work::Wait(Arc::new(never), 1))?;
        }
        enqueue(stream, Work::Copy { to, from, bytes })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(to: *mut *mut c_void, flags: c_uint) -> c_uint {
    call("cuEventCreate", |_| {
        let timed = flags & 2 == 0;
        let event =
            Event { ordinal: current()?.ordinal, timed, state: Mutex::default(), reached: Condvar::new() };
        // SAFETY: the caller's.
        unsafe { *to = Arc::into_raw(Arc::new(event)).cast_mut().cast() };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(raw: *mut c_void) -> c_uint {
    call("cuEventDestroy", |_| {
        let event = event(raw)?;
        // SAFETY: gives back the count that `cuEventCreate` leaked.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(&event)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(raw: *mut c_void, stream: *mut c_void) -> c_uint {
    call("cuEventRecord", |_| {
        let event = event(raw)?;
        if event.ordinal != card_of(stream)? {
            return Err(INVALID_HANDLE);
        }
        let turn = {
            let mut state = event.state.lock().unwrap();
            state.asked += 1;
            state.asked
        };
        enqueue(stream, Work::Record(event, turn))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(raw: *mut c_void) -> c_uint {
    call("cuEventQuery", |_| {
        let event = event(raw)?;
        let state = event.state.lock().unwrap();
        if state.done == state.asked { Ok(()) } else { Err(NOT_READY) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(ms: *mut f32, from: *mut c_void, to: *mut c_void) -> c_uint {
    call("cuEventElapsedTime", |_| {
        let (from, to) = (event(from)?, event(to)?);
        if from.ordinal != to.ordinal || !from.timed || !to.timed {
            return Err(INVALID_HANDLE);
        }
        let at = |event: &Event| {
            let state = event.state.lock().unwrap();
            match state.at {
                _ if state.asked == 0 => Err(INVALID_HANDLE),
                Some(at) if state.done == state.asked => Ok(at),
                _ => Err(NOT_READY),
            }
        };
        let (from, to) = (at(&from)?, at(&to)?);
        let passed = to.saturating_duration_since(from).as_secs_f64()
            - from.saturating_duration_since(to).as_secs_f64();
        // SAFETY: the caller's.
        unsafe { *ms = (1e3 * passed) as f32 };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: c_uint, to: *mut *const c_char) -> c_uint {
    let name = match code {
        1 => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        3 => c"CUDA_ERROR_NOT_INITIALIZED",
        100 => c"CUDA_ERROR_NO_DEVICE",
        101 => c"CUDA_ERROR_INVALID_DEVICE",
        201 => c"CUDA_ERROR_INVALID_CONTEXT",
        400 => c"CUDA_ERROR_INVALID_HANDLE",
        600 => c"CUDA_ERROR_NOT_READY",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        803 => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        999 => c"CUDA_ERROR_UNKNOWN",
        _ => return INVALID_VALUE,
    };
    // SAFETY: the caller's.
    unsafe { *to = name.as_ptr() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(code: c_uint, to: *mut *const c_char) -> c_uint {
    let text = match code {
        2 => c"out of memory",
        100 => c"no CUDA-capable device is detected",
        700 => c"an illegal memory access was encountered",
        803 => c"system has unsupported display driver / cuda driver combination",
        999 => c"unknown error",
        _ => return INVALID_VALUE,
    };
    // SAFETY: the caller's.
    unsafe { *to = text.as_ptr() };
    SUCCESS
}
