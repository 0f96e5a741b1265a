//! A scripted NCCL: `libnccl.so` for tests on machines without a GPU.
//!
//! Ranks are processes or threads of one host that meet in a shared file named by the unique id.
//! Collectives are enqueued on the streams of the scripted CUDA driver, as real ones are, and really reduce
//! host memory there. What real NCCL leaves hanging hangs here, until it is aborted.

#![allow(unsafe_code, missing_docs, unreachable_pub, reason = "a C interface")]
#![allow(non_snake_case, clippy::missing_safety_doc, clippy::not_unsafe_ptr_arg_deref)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test's library may panic")]

#[path = "scenario.rs"]
mod scenario;

use half::{bf16, f16};
use scenario::Fail;
use serde::Deserialize;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

const SUCCESS: u32 = 0;
const SYSTEM_ERROR: u32 = 2;
const INVALID_ARGUMENT: u32 = 4;
const INVALID_USAGE: u32 = 5;
const IN_PROGRESS: u32 = 7;

#[derive(Deserialize)]
struct Scenario {
    #[serde(default)]
    nccl: Section,
}

#[derive(Deserialize, Default)]
struct Section {
    /// What `ncclGetVersion` says.
    version: Option<c_int>,
    /// Calls that fail. `at` counts calls of a process.
    #[serde(default)]
    fail: Vec<Fail>,
    /// Collectives that go wrong behind the caller's back.
    #[serde(default)]
    wrong: Vec<Wrong>,
    /// File that calls are noted in.
    log: Option<String>,
}

/// A rank's collective that does not do what it should.
#[derive(Deserialize)]
struct Wrong {
    rank: usize,
    /// From 1; 0 is the joining of the group.
    collective: u64,
    /// This asynchronous error; without it, it hangs.
    code: Option<u32>,
}

fn section() -> &'static Section {
    static SECTION: OnceLock<Section> = OnceLock::new();
    SECTION.get_or_init(|| scenario::read::<Scenario>().nccl)
}

fn note(line: &str) {
    let Some(path) = &section().log else { return };
    let mut file = File::options().create(true).append(true).open(path).expect("log opens");
    // Not std's name: that is known to the program's std, not to this library's.
    let thread = std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default();
    let thread = thread.trim();
    file.write_all(format!("{} {thread} {line}\n", std::process::id()).as_bytes()).expect("log is written");
}

/// The code of an injected failure of this call.
fn injected(call: &str) -> Option<u32> {
    static COUNTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());
    let mut counts = COUNTS.lock().unwrap();
    let count = counts.entry(call.to_owned()).or_default();
    *count += 1;
    let here = |fail: &&Fail| fail.call == call && fail.at.is_none_or(|at| at == *count);
    section().fail.iter().find(here).map(|fail| fail.code)
}

thread_local! {
    static LAST_ERROR: RefCell<std::ffi::CString> = RefCell::default();
    static GROUP: RefCell<Option<Vec<Asked>>> = const { RefCell::new(None) };
}

fn say(text: &str) {
    LAST_ERROR.with_borrow_mut(|last| *last = std::ffi::CString::new(text).unwrap());
}

/// Runs a call: its injected failure, or what it does.
fn call(name: &str, work: impl FnOnce() -> Result<(), u32>) -> u32 {
    let result = match injected(name) {
        Some(code) => {
            say(&format!("injected into {name}"));
            Err(code)
        }
        None => work(),
    };
    result.map_or_else(|code| code, |()| SUCCESS)
}

/// What ranks share: a file with a header, and a slot for each rank.
struct Shared {
    file: File,
    world: usize,
}

/// Slots are this far apart: the longest message, and its length before it.
const SLOT: u64 = 64 << 20;
/// Joined, aborted, and for each rank: collectives arrived at, collectives left.
const HEADER: u64 = 4096;

impl Shared {
    fn open(id: &[u8], world: usize) -> std::io::Result<Self> {
        let path = path(id);
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        Ok(Self { file, world })
    }

    fn word(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        let read = self.file.read_at(&mut bytes, at).unwrap_or(0);
        if read == 8 { u64::from_le_bytes(bytes) } else { 0 }
    }

    fn set(&self, at: u64, value: u64) {
        self.file.write_all_at(&value.to_le_bytes(), at).expect("shared file is written");
    }

    fn arrived(rank: usize) -> u64 {
        64 + 16 * rank as u64
    }

    fn left(rank: usize) -> u64 {
        72 + 16 * rank as u64
    }

    /// Waits until all ranks have come to `turn` of this word; `false` when aborted.
    fn wait(&self, word: impl Fn(usize) -> u64, turn: u64, aborted: &AtomicU32) -> bool {
        loop {
            if aborted.load(SeqCst) != 0 {
                return false;
            }
            if (0..self.world).all(|rank| self.word(word(rank)) >= turn) {
                return true;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn put(&self, rank: usize, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= SLOT, "longer than a slot of the scripted NCCL");
        self.file.write_all_at(bytes, HEADER + SLOT * rank as u64).expect("shared file is written");
    }

    fn take(&self, rank: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, HEADER + SLOT * rank as u64).expect("shared file is read");
        bytes
    }
}

/// Where the ranks of a group meet: beside the scenario.
fn path(id: &[u8]) -> PathBuf {
    let scenario = PathBuf::from(std::env::var_os(scenario::VARIABLE).expect("a scenario"));
    let name: String = id[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    scenario.with_file_name(format!("nccl-{name}"))
}

pub struct Comm {
    rank: usize,
    world: usize,
    shared: Arc<Shared>,
    /// Collectives asked for.
    asked: u64,
    aborted: Arc<AtomicU32>,
    /// An error behind the caller's back.
    trouble: Arc<AtomicU32>,
    /// Whether it is still connecting.
    joining: Arc<AtomicU32>,
    finalized: bool,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId {
    internal: [c_char; 128],
}

impl UniqueId {
    fn bytes(&self) -> Vec<u8> {
        self.internal.iter().map(|byte| *byte as u8).collect()
    }
}

#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetVersion(version: *mut c_int) -> u32 {
    call("ncclGetVersion", || {
        // SAFETY: the caller's.
        unsafe { *version = section().version.unwrap_or(22809) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> u32 {
    call("ncclGetUniqueId", || {
        let mut random = [0u8; 16];
        File::open("/dev/urandom")
            .and_then(|mut file| file.read_exact(&mut random))
            .map_err(|_| SYSTEM_ERROR)?;
        let mut internal = [0; 128];
        internal.iter_mut().zip(random).for_each(|(to, from)| *to = from as c_char);
        // SAFETY: the caller's.
        unsafe { *id = UniqueId { internal } };
        Ok(())
    })
}

fn join(world: c_int, id: &[u8], rank: c_int, blocking: bool) -> Result<*mut Comm, u32> {
    let (rank, world) = (rank as usize, world as usize);
    if rank >= world {
        say("rank is not below the number of ranks");
        return Err(INVALID_ARGUMENT);
    }
    let shared = Arc::new(Shared::open(id, world).map_err(|_| SYSTEM_ERROR)?);
    let comm = Comm {
        rank,
        world,
        shared: Arc::clone(&shared),
        asked: 0,
        aborted: Arc::default(),
        trouble: Arc::default(),
        joining: Arc::new(AtomicU32::new(1)),
        finalized: false,
    };
    note(&format!("join {rank}/{world}"));
    let (aborted, joining) = (Arc::clone(&comm.aborted), Arc::clone(&comm.joining));
    let hangs = section().wrong.iter().any(|wrong| wrong.rank == rank && wrong.collective == 0);
    let work = move || {
        if hangs {
            while aborted.load(SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        // One step further than a group that used this file before could have come.
        shared.set(Shared::arrived(rank), 1);
        if shared.wait(Shared::arrived, 1, &aborted) {
            joining.store(0, SeqCst);
        }
    };
    if blocking {
        work();
    } else {
        std::thread::spawn(work);
    }
    Ok(Box::into_raw(Box::new(comm)))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRank(to: *mut *mut Comm, world: c_int, id: UniqueId, rank: c_int) -> u32 {
    call("ncclCommInitRank", || {
        let comm = join(world, &id.bytes(), rank, true)?;
        // SAFETY: the caller's.
        unsafe { *to = comm };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRankConfig(
    to: *mut *mut Comm,
    world: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> u32 {
    // SAFETY: the caller's.
    let config = unsafe { &*config };
    if config.magic != 0xcafe_beef || config.size < size_of::<Config>() {
        say("the config is not initialised");
        return INVALID_ARGUMENT;
    }
    let blocking = config.blocking != 0;
    let result = call("ncclCommInitRankConfig", || {
        let comm = join(world, &id.bytes(), rank, blocking)?;
        // SAFETY: the caller's.
        unsafe { *to = comm };
        Ok(())
    });
    if result == SUCCESS && !blocking { IN_PROGRESS } else { result }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitAll(to: *mut *mut Comm, count: c_int, _: *const c_int) -> u32 {
    call("ncclCommInitAll", || {
        let mut id = UniqueId { internal: [0; 128] };
        ncclGetUniqueId(&mut id);
        for rank in 0..count {
            let comm = join(count, &id.bytes(), rank, false)?;
            // SAFETY: the caller's, with room for as many.
            unsafe { *to.add(rank as usize) = comm };
        }
        // It returns once all are there, as it does not take a config that says otherwise.
        for rank in 0..count {
            // SAFETY: just written.
            let comm = unsafe { &**to.add(rank as usize) };
            while comm.joining.load(SeqCst) != 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    })
}

fn comm<'a>(raw: *mut Comm) -> Result<&'a mut Comm, u32> {
    // SAFETY: handles come from us.
    unsafe { raw.as_mut() }.ok_or_else(|| {
        say("no communicator");
        INVALID_ARGUMENT
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommGetAsyncError(raw: *mut Comm, to: *mut u32) -> u32 {
    call("ncclCommGetAsyncError", || {
        let comm = comm(raw)?;
        let state = match comm.trouble.load(SeqCst) {
            0 if comm.joining.load(SeqCst) != 0 => IN_PROGRESS,
            code => code,
        };
        // SAFETY: the caller's.
        unsafe { *to = state };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(raw: *mut Comm) -> u32 {
    call("ncclCommAbort", || {
        let comm = comm(raw)?;
        note(&format!("abort {}", comm.rank));
        comm.aborted.store(1, SeqCst);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(raw: *mut Comm) -> u32 {
    call("ncclCommFinalize", || {
        let comm = comm(raw)?;
        note(&format!("finalize {}", comm.rank));
        comm.finalized = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(raw: *mut Comm) -> u32 {
    call("ncclCommDestroy", || {
        let comm = comm(raw)?;
        if comm.aborted.load(SeqCst) != 0 {
            say("destroyed after it was aborted");
            return Err(INVALID_USAGE);
        }
        note(&format!("destroy {}{}", comm.rank, if comm.finalized { "" } else { " unfinalized" }));
        // Its memory stays: a collective may be on its way out.
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCount(raw: *mut Comm, to: *mut c_int) -> u32 {
    // SAFETY: the caller's.
    call("ncclCommCount", || comm(raw).map(|comm| unsafe { *to = comm.world as c_int }))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommUserRank(raw: *mut Comm, to: *mut c_int) -> u32 {
    // SAFETY: the caller's.
    call("ncclCommUserRank", || comm(raw).map(|comm| unsafe { *to = comm.rank as c_int }))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: u32) -> *const c_char {
    match code {
        0 => c"no error",
        1 => c"unhandled cuda error",
        _ => c"another error",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_: *mut Comm) -> *const c_char {
    LAST_ERROR.with_borrow(|last| last.as_ptr())
}

// Collectives.

#[derive(Clone, Copy, PartialEq)]
enum Operation {
    AllReduce { operation: c_int },
    Reduce { operation: c_int, root: usize },
    Broadcast { root: usize },
}

struct Asked {
    from: usize,
    to: usize,
    count: usize,
    kind: u32,
    operation: Operation,
    rank: usize,
    number: u64,
    shared: Arc<Shared>,
    aborted: Arc<AtomicU32>,
    trouble: Arc<AtomicU32>,
    stream: usize,
}

fn width(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 => Some(1),
        6 | 9 => Some(2),
        2 | 3 | 7 => Some(4),
        4 | 5 | 8 => Some(8),
        _ => None,
    }
}

#[allow(clippy::too_many_arguments, reason = "a C interface")]
fn ask(
    name: &str,
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: u32,
    operation: Operation,
    raw: *mut Comm,
    stream: *mut c_void,
) -> u32 {
    call(name, || {
        let comm = comm(raw)?;
        if width(kind).is_none() || from.is_null() {
            say("a type or a pointer that is none");
            return Err(INVALID_ARGUMENT);
        }
        if comm.finalized || comm.aborted.load(SeqCst) != 0 {
            say("the communicator has ended");
            return Err(INVALID_USAGE);
        }
        comm.asked += 1;
        note(&format!("{name} {} {count}", comm.rank));
        let asked = Asked {
            from: from as usize,
            to: to as usize,
            count,
            kind,
            operation,
            rank: comm.rank,
            // Joining was the first thing that ranks did together.
            number: comm.asked,
            shared: Arc::clone(&comm.shared),
            aborted: Arc::clone(&comm.aborted),
            trouble: Arc::clone(&comm.trouble),
            stream: stream as usize,
        };
        let grouped = GROUP.with_borrow_mut(|group| match group {
            Some(group) => {
                group.push(asked);
                None
            }
            None => Some(asked),
        });
        match grouped {
            Some(asked) => enqueue(asked),
            None => Ok(()),
        }
    })
}

/// On the caller's stream, as a function of the host's.
fn enqueue(asked: Asked) -> Result<(), u32> {
    type Launch = extern "C" fn(*mut c_void, extern "C" fn(*mut c_void), *mut c_void) -> u32;
    static LAUNCH: OnceLock<Launch> = OnceLock::new();
    let launch = LAUNCH.get_or_init(|| {
        // SAFETY: the driver is loaded, and its function has this type.
        unsafe {
            let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            let function = libc::dlsym(driver, c"cuLaunchHostFunc".as_ptr());
            assert!(!function.is_null(), "the scripted NCCL needs the scripted driver");
            std::mem::transmute::<*mut c_void, Launch>(function)
        }
    });
    let stream = asked.stream as *mut c_void;
    match launch(stream, run, Box::into_raw(Box::new(asked)).cast()) {
        0 => Ok(()),
        code => {
            say(&format!("cuLaunchHostFunc failed with {code}"));
            Err(1)
        }
    }
}

extern "C" fn run(data: *mut c_void) {
    // SAFETY: boxed by `enqueue`.
    let asked = unsafe { Box::from_raw(data.cast::<Asked>()) };
    let wrong = section().wrong.iter().find(|w| w.rank == asked.rank && w.collective == asked.number);
    if let Some(wrong) = wrong {
        asked.trouble.store(wrong.code.unwrap_or(0), SeqCst);
        // Either way its kernel never ends by itself.
        while asked.aborted.load(SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        return;
    }
    asked.meet();
}

impl Asked {
    fn meet(&self) {
        let Self { shared, rank, number, aborted, .. } = self;
        let len = self.count * width(self.kind).unwrap();
        // SAFETY: the caller's buffers, which live until the stream has come past this.
        let (from, to) = unsafe {
            (
                std::slice::from_raw_parts(self.from as *const u8, len),
                std::slice::from_raw_parts_mut(self.to as *mut u8, len),
            )
        };
        // Nobody may write over what another still reads.
        if !shared.wait(Shared::left, number - 1, aborted) {
            return;
        }
        shared.put(*rank, from);
        shared.set(Shared::arrived(*rank), number + 1);
        if !shared.wait(Shared::arrived, number + 1, aborted) {
            return;
        }
        let all = || (0..shared.world).map(|rank| shared.take(rank, len));
        match self.operation {
            Operation::Broadcast { root } => to.copy_from_slice(&shared.take(root, len)),
            Operation::AllReduce { operation } => to.copy_from_slice(&self.reduced(all(), operation)),
            Operation::Reduce { operation, root } if root == *rank => {
                to.copy_from_slice(&self.reduced(all(), operation));
            }
            Operation::Reduce { .. } => {}
        }
        shared.set(Shared::left(*rank), *number);
    }

    fn reduced(&self, all: impl Iterator<Item = Vec<u8>>, operation: c_int) -> Vec<u8> {
        let all: Vec<Vec<u8>> = all.collect();
        macro_rules! reduce {
            ($type:ty, $read:expr, $write:expr) => {{
                const WIDTH: usize = size_of::<$type>();
                let mut result = Vec::with_capacity(all[0].len());
                for at in (0..all[0].len()).step_by(WIDTH) {
                    let values = all.iter().map(|rank| {
                        let bytes: [u8; WIDTH] = rank[at..at + WIDTH].try_into().unwrap();
                        $read(<$type>::from_le_bytes(bytes))
                    });
                    let value = combine(values, operation, all.len());
                    result.extend($write(value).to_le_bytes());
                }
                result
            }};
        }
        match self.kind {
            7 => reduce!(f32, |x: f32| f64::from(x), |x: f64| x as f32),
            8 => reduce!(f64, |x: f64| x, |x: f64| x),
            6 => reduce!(f16, |x: f16| f64::from(x), |x: f64| f16::from_f64(x)),
            9 => reduce!(bf16, |x: bf16| f64::from(x), |x: f64| bf16::from_f64(x)),
            2 => reduce!(i32, |x: i32| f64::from(x), |x: f64| x as i32),
            4 => reduce!(i64, |x: i64| x as f64, |x: f64| x as i64),
            _ => reduce!(u8, |x: u8| f64::from(x), |x: f64| x as u8),
        }
    }
}

fn combine(mut values: impl Iterator<Item = f64>, operation: c_int, ranks: usize) -> f64 {
    let first = values.next().unwrap();
    match operation {
        0 => values.fold(first, |a, b| a + b),
        1 => values.fold(first, |a, b| a * b),
        2 => values.fold(first, f64::max),
        3 => values.fold(first, f64::min),
        4 => values.fold(first, |a, b| a + b) / ranks as f64,
        _ => panic!("an operation that is none"),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: u32,
    operation: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> u32 {
    ask("ncclAllReduce", from, to, count, kind, Operation::AllReduce { operation }, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: u32,
    operation: c_int,
    root: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> u32 {
    let operation = Operation::Reduce { operation, root: root as usize };
    ask("ncclReduce", from, to, count, kind, operation, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: u32,
    root: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> u32 {
    ask("ncclBroadcast", from, to, count, kind, Operation::Broadcast { root: root as usize }, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> u32 {
    call("ncclGroupStart", || {
        GROUP.with_borrow_mut(|group| {
            group.get_or_insert_default();
        });
        Ok(())
    })
}

/// All of a group at once: the default streams of several cards are one thread here, which must not wait for
/// the second card while it works for the first.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> u32 {
    call("ncclGroupEnd", || {
        let group = GROUP.with_borrow_mut(Option::take).ok_or(INVALID_USAGE)?;
        std::thread::scope(|scope| {
            for asked in &group {
                scope.spawn(|| asked.meet());
            }
        });
        Ok(())
    })
}
