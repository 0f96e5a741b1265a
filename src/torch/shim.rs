//! The C side of `shim.cpp`, and the one place that turns its texts into errors.
//!
//! Every function that can fail returns null, or the text of the C++ exception, to be freed here.

use crate::error::Error;
use std::ffi::{CStr, c_char, c_void};
use tch::Tensor;

/// `at::Tensor` behind tch's handle.
#[repr(C)]
pub(super) struct RawTensor(c_void);
/// A registered gradient hook with its accumulator.
#[repr(C)]
pub(super) struct RawHook(c_void);
/// `at::Generator`.
#[repr(C)]
pub(super) struct RawGenerator(c_void);
/// `c10d::Store`.
#[repr(C)]
pub(super) struct RawStore(c_void);

/// What a C++ hook calls. `call` returns null, or an error it gives away, with a malloc'd text of it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct HookTable {
    pub(super) call: extern "C" fn(data: *mut c_void, text: *mut *mut c_char) -> *mut c_void,
    pub(super) release: extern "C" fn(data: *mut c_void),
    pub(super) drop_error: extern "C" fn(error: *mut c_void),
}

/// What a step of the graph calls. `backward` fills `results` with new tensors, null where there is no
/// gradient, and returns what [`HookTable::call`] does.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct FunctionTable {
    pub(super) backward: extern "C" fn(
        data: *mut c_void,
        gradient: *const RawTensor,
        results: *mut *mut RawTensor,
        count: usize,
        text: *mut *mut c_char,
    ) -> *mut c_void,
    pub(super) release: extern "C" fn(data: *mut c_void),
    pub(super) drop_error: extern "C" fn(error: *mut c_void),
}

/// Where one card's bytes are counted.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Counters {
    pub(super) live: *const std::sync::atomic::AtomicU64,
    pub(super) peak: *const std::sync::atomic::AtomicU64,
}

type Text = *mut c_char;
type Tensors = *const *const RawTensor;

/// Autocast of a thread as it was before.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SavedAutocast {
    cuda: bool,
    enabled: bool,
    cache: bool,
    kind: i8,
}

unsafe extern "C" {
    pub(super) fn dvd_hook_add(
        param: *const RawTensor,
        data: *mut c_void,
        table: HookTable,
        out: *mut *mut RawHook,
    ) -> Text;
    pub(super) fn dvd_hook_free(hook: *mut RawHook);
    pub(super) fn dvd_graph_reaches(
        loss: *const RawTensor,
        hooks: *const *mut RawHook,
        count: usize,
        reached: *mut bool,
    ) -> Text;
    pub(super) fn dvd_backward(
        outputs: Tensors,
        gradients: Tensors,
        count: usize,
        hook_error: *mut *mut c_void,
    ) -> Text;
    pub(super) fn dvd_autocast_enter(cuda: bool, half: bool, saved: *mut SavedAutocast) -> Text;
    pub(super) fn dvd_autocast_exit(saved: SavedAutocast);
    pub(super) fn dvd_unscale(gradients: Tensors, count: usize, factor: f64, finite: *mut bool) -> Text;
    pub(super) fn dvd_cuda_enter(device: i64, default_stream: *mut bool) -> Text;
    pub(super) fn dvd_cuda_work_in(device: i64, stream: *mut c_void) -> Text;
    pub(super) fn dvd_cuda_memory(device: i64, live: *mut u64, peak: *mut u64) -> Text;
    pub(super) fn dvd_cuda_reset_peak(device: i64) -> Text;
    pub(super) fn dvd_set_tf32(allow: bool);
    pub(super) fn dvd_tf32(allowed: *mut bool);

    pub(super) fn dvd_function(
        inputs: Tensors,
        count: usize,
        output: *const RawTensor,
        data: *mut c_void,
        table: FunctionTable,
    ) -> Text;
    pub(super) fn dvd_grad(param: *const RawTensor, out: *mut *mut RawTensor) -> Text;
    pub(super) fn dvd_set_grad(param: *const RawTensor, gradient: *const RawTensor) -> Text;

    pub(super) fn dvd_sgd(
        params: Tensors,
        grads: Tensors,
        momenta: Tensors,
        count: usize,
        lr: f64,
        momentum: f64,
        weight_decay: f64,
        first_step: bool,
    ) -> Text;
    pub(super) fn dvd_adam(
        params: Tensors,
        grads: Tensors,
        means: Tensors,
        squares: Tensors,
        steps: Tensors,
        count: usize,
        lr: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        eps: f64,
    ) -> Text;

    pub(super) fn dvd_memory_install(cards: *const Counters, count: usize) -> Text;
    pub(super) fn dvd_memory_set_process_card(card: i64);
    pub(super) fn dvd_memory_set_thread_card(card: i64);

    pub(super) fn dvd_generator_new(seed: u64, out: *mut *mut RawGenerator) -> Text;
    pub(super) fn dvd_generator_free(generator: *mut RawGenerator);
    pub(super) fn dvd_uniform(
        tensor: *const RawTensor,
        from: f64,
        to: f64,
        generator: *mut RawGenerator,
    ) -> Text;
    pub(super) fn dvd_normal(
        tensor: *const RawTensor,
        mean: f64,
        deviation: f64,
        generator: *mut RawGenerator,
    ) -> Text;

    pub(super) fn dvd_store_file(
        path: *const c_char,
        world_size: i64,
        timeout_ms: i64,
        out: *mut *mut RawStore,
    ) -> Text;
    pub(super) fn dvd_store_tcp(
        host: *const c_char,
        port: u16,
        world_size: i64,
        serve: bool,
        timeout_ms: i64,
        out: *mut *mut RawStore,
        bound_port: *mut u16,
    ) -> Text;
    pub(super) fn dvd_store_set_timeout(store: *mut RawStore, timeout_ms: i64);
    pub(super) fn dvd_store_free(store: *mut RawStore);
    pub(super) fn dvd_store_set(
        store: *mut RawStore,
        key: *const c_char,
        value: *const u8,
        length: usize,
    ) -> Text;
    pub(super) fn dvd_store_get(
        store: *mut RawStore,
        key: *const c_char,
        value: *mut *mut u8,
        length: *mut usize,
    ) -> Text;
    pub(super) fn dvd_store_add(store: *mut RawStore, key: *const c_char, amount: i64, sum: *mut i64)
    -> Text;

    pub(super) fn dvd_library(config: *mut *mut c_char, path: *mut *mut c_char) -> Text;
}

/// A tensor as the shim takes it; valid while `tensor` is.
pub(super) fn raw(tensor: &Tensor) -> *const RawTensor {
    tensor.as_ptr().cast()
}

/// A list of tensors as the shim takes it; valid while the tensors are.
pub(super) fn raws<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<*const RawTensor> {
    tensors.into_iter().map(raw).collect()
}

/// Copies and frees a string of the shim's; `None` for null.
///
/// # Safety
/// `text` is null, or a malloc'd C string that nobody else owns.
pub(super) unsafe fn take_text(text: *mut c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, so by the contract a C string.
    let copy = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: malloc'd, owned by us, and not used after this.
    unsafe { libc::free(text.cast()) };
    Some(copy)
}

/// What a shim function returned, as a result. libtorch's "out of memory" keeps its kind.
///
/// # Safety
/// As for [`take_text`].
pub(super) unsafe fn check(text: *mut c_char) -> Result<(), Error> {
    // SAFETY: the caller's promise.
    let Some(text) = (unsafe { take_text(text) }) else { return Ok(()) };
    Err(crate::error::from_libtorch(&text))
}
