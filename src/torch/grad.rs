//! Gradients: hooks that fire as each becomes ready, backward from given output gradients, functions with
//! a backward of their own, and reading and setting `.grad`.

use super::shim::{self, FunctionTable, HookTable, RawHook, RawTensor};
use crate::Result;
use crate::error::{Error, Kind};
use std::any::Any;
use std::ffi::{CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use tch::Tensor;

type Ready = Box<dyn FnMut() -> Result<()> + Send>;

/// Shared by a [`Hook`] and its C++ side; emptied when the [`Hook`] is dropped.
struct Slot(Mutex<Option<Ready>>);

/// Keeps a gradient hook alive; dropping it removes the hook, once a call that is running has ended.
///
/// Not `Send`: libtorch's list of hooks has no lock, so one thread keeps it.
pub struct Hook {
    raw: *mut RawHook,
    slot: Arc<Slot>,
}

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hook").finish_non_exhaustive()
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        // The C++ half is not taken out of libtorch's list, which a backward on another thread may be
        // walking: it is left there, empty, and dies with the accumulator.
        let closure = self.slot.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(closure);
        // SAFETY: made by `dvd_hook_add`, freed once.
        unsafe { shim::dvd_hook_free(self.raw) };
    }
}

/// Calls `ready` each time backward has accumulated into `param.grad`. On CPU that is on the thread
/// that called backward; on CUDA on the device's autograd thread. An error or panic in `ready` ends
/// that backward: [`backward`] returns that very error, tch's own one its text.
pub fn on_gradient(param: &Tensor, ready: impl FnMut() -> Result<()> + Send + 'static) -> Result<Hook> {
    let slot = Arc::new(Slot(Mutex::new(Some(Box::new(ready)))));
    let data = Arc::into_raw(Arc::clone(&slot)).cast_mut().cast::<c_void>();
    let table = HookTable { call: call_hook, release: release_hook, drop_error };
    let mut raw = null_mut();
    // SAFETY: `param` outlives the call; `data` is one count of the Arc, given to the C++ hook, which
    // gives it to `release_hook` exactly once, also when this call fails.
    unsafe { shim::check(shim::dvd_hook_add(shim::raw(param), data, table, &mut raw)) }?;
    Ok(Hook { raw, slot })
}

extern "C" fn call_hook(data: *mut c_void, text: *mut *mut c_char) -> *mut c_void {
    // SAFETY: `data` is an `Arc<Slot>` count that the C++ hook holds while it calls.
    let slot = unsafe { &*data.cast::<Slot>() };
    let result = match slot.0.try_lock() {
        // The guard is not unwound through: a panic is caught inside.
        Ok(mut guard) => match guard.as_mut() {
            Some(ready) => catch_unwind(AssertUnwindSafe(ready))
                .unwrap_or_else(|panic| Err(Error::new(Kind::Torch, panic_text(panic.as_ref())))),
            None => Ok(()),
        },
        Err(TryLockError::Poisoned(_)) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(Error::new(
            Kind::Torch,
            "a gradient hook was called while it was running: one parameter, two backward passes at once",
        )),
    };
    let Err(error) = result else { return null_mut() };
    // SAFETY: C++ passes a place for the text.
    unsafe { give_away(error, text) }
}

/// Hands an error to C++, with its text.
///
/// # Safety
/// `text` is a place for a pointer, which C++ frees.
unsafe fn give_away(error: Error, text: *mut *mut c_char) -> *mut c_void {
    let message = CString::new(error.to_string().replace('\0', "?")).unwrap_or_default();
    // SAFETY: the caller's promise, and strdup copies a valid C string.
    unsafe { *text = libc::strdup(message.as_ptr()) };
    Box::into_raw(Box::new(error)).cast()
}

extern "C" fn release_hook(data: *mut c_void) {
    // SAFETY: the count that `on_gradient` gave away, given back once.
    let slot = unsafe { Arc::from_raw(data.cast::<Slot>()) };
    // What the closure owns may panic when dropped.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(slot)));
}

extern "C" fn drop_error(error: *mut c_void) {
    // SAFETY: a box that `call_hook` made and nobody took.
    drop(unsafe { Box::from_raw(error.cast::<Error>()) });
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let message = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    format!("a gradient hook panicked: {message}")
}

type Backward = Box<dyn FnMut(&Tensor) -> Result<Vec<Tensor>> + Send>;

/// Makes `output`, which was computed outside any graph, a function of `inputs`: `backward` gives their
/// gradients, one each, for that of the output. It runs once a backward and is dropped with the graph; its
/// errors and panics arrive as those of hooks do. Without an input that needs a gradient nothing happens.
pub fn function(
    inputs: &[&Tensor],
    output: &Tensor,
    backward: impl FnMut(&Tensor) -> Result<Vec<Tensor>> + Send + 'static,
) -> Result<()> {
    if !inputs.iter().any(|input| input.requires_grad()) {
        return Ok(());
    }
    let closure: Backward = Box::new(backward);
    let data = Box::into_raw(Box::new(closure)).cast::<c_void>();
    let table = FunctionTable { backward: call_backward, release: release_function, drop_error };
    let raw_inputs = shim::raws(inputs.iter().copied());
    // SAFETY: the tensors outlive the call; `data` is a box that the C++ node owns, and gives to
    // `release_function` exactly once, also when this call fails.
    unsafe {
        shim::check(shim::dvd_function(raw_inputs.as_ptr(), raw_inputs.len(), shim::raw(output), data, table))
    }
}

extern "C" fn call_backward(
    data: *mut c_void,
    gradient: *const RawTensor,
    results: *mut *mut RawTensor,
    count: usize,
    text: *mut *mut c_char,
) -> *mut c_void {
    // SAFETY: `data` is the box that the node owns; autograd runs a node on one thread at a time.
    let backward = unsafe { &mut *data.cast::<Backward>() };
    // SAFETY: a handle of C++'s that lives through the call; the copy is ours.
    let gradient = unsafe { Tensor::clone_from_ptr(gradient.cast_mut().cast()) };
    let result = catch_unwind(AssertUnwindSafe(|| backward(&gradient)))
        .unwrap_or_else(|panic| Err(Error::new(Kind::Torch, panic_text(panic.as_ref()))))
        .and_then(|gradients| match gradients.len() {
            len if len == count => Ok(gradients),
            len => Err(Error::new(Kind::Torch, format!("{len} gradients for {count} inputs"))),
        });
    match result {
        Ok(gradients) => {
            for (place, gradient) in gradients.into_iter().enumerate() {
                // SAFETY: there are `count` places; the handle is C++'s now, so it is not dropped here.
                unsafe { *results.add(place) = gradient.as_ptr().cast_mut().cast() };
                std::mem::forget(gradient);
            }
            null_mut()
        }
        // SAFETY: C++ passes a place for the text.
        Err(error) => unsafe { give_away(error, text) },
    }
}

extern "C" fn release_function(data: *mut c_void) {
    // SAFETY: the box that `function` gave away, given back once.
    let closure = unsafe { Box::from_raw(data.cast::<Backward>()) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(closure)));
}

/// For each hook's parameter, whether the graph of `loss` reaches it. Runs nothing.
pub fn reached(loss: &Tensor, hooks: &[Hook]) -> Result<Vec<bool>> {
    let raws: Vec<_> = hooks.iter().map(|hook| hook.raw).collect();
    let mut reached = vec![false; hooks.len()];
    // SAFETY: hooks and tensor live through the call; both lists have `len` entries.
    unsafe {
        shim::check(shim::dvd_graph_reaches(shim::raw(loss), raws.as_ptr(), raws.len(), reached.as_mut_ptr()))
    }?;
    Ok(reached)
}

/// Backward from `outputs` with these gradients; `None` seeds a scalar with one. Accumulates into leaves.
pub fn backward(outputs: &[&Tensor], gradients: &[Option<&Tensor>]) -> Result<()> {
    if outputs.len() != gradients.len() {
        let (outputs, gradients) = (outputs.len(), gradients.len());
        return Err(Error::new(
            Kind::Torch,
            format!("backward: {outputs} outputs but {gradients} gradients"),
        ));
    }
    let raw_outputs = shim::raws(outputs.iter().copied());
    let raw_gradients: Vec<_> = gradients.iter().map(|g| g.map_or(null(), shim::raw)).collect();
    let mut hook_error = null_mut::<c_void>();
    // SAFETY: both lists have `len` entries that live through the call.
    let result = unsafe {
        shim::check(shim::dvd_backward(
            raw_outputs.as_ptr(),
            raw_gradients.as_ptr(),
            raw_outputs.len(),
            &mut hook_error,
        ))
    };
    if hook_error.is_null() {
        return result;
    }
    // SAFETY: a box that `call_hook` made, and that C++ has given away by filling `hook_error`.
    Err(*unsafe { Box::from_raw(hook_error.cast::<Error>()) })
}

/// `param.grad`, if it is defined. Shares storage.
pub fn grad(param: &Tensor) -> Option<Tensor> {
    let mut out = null_mut();
    // SAFETY: `param` lives through the call; `out` is null or a new tensor that becomes ours.
    unsafe {
        // Reading `.grad` cannot fail for a tensor that tch made.
        shim::check(shim::dvd_grad(shim::raw(param), &mut out)).ok()?;
        (!out.is_null()).then(|| Tensor::from_ptr(out.cast()))
    }
}

/// Sets `param.grad`; `None` makes it undefined. Shape, type and device must be the parameter's.
pub fn set_grad(param: &Tensor, gradient: Option<&Tensor>) -> Result<()> {
    // SAFETY: both tensors live through the call.
    unsafe { shim::check(shim::dvd_set_grad(shim::raw(param), gradient.map_or(null(), shim::raw))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tch::{Device, Kind as Dtype};

    fn param(values: &[f32]) -> Tensor {
        Tensor::from_slice(values).set_requires_grad(true)
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(tensor).unwrap()
    }

    #[test]
    fn a_graph_says_whom_it_reaches_without_running() {
        let (used, twice, unused) = (param(&[1.0]), param(&[2.0]), param(&[3.0]));
        let fired = Arc::new(AtomicUsize::new(0));
        let hooks: Vec<_> = [&used, &twice, &unused]
            .map(|param| {
                let fired = Arc::clone(&fired);
                on_gradient(param, move || {
                    fired.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                })
                .unwrap()
            })
            .into();
        let loss = (&used * &twice + &twice).sum(Dtype::Float);
        assert_eq!(reached(&loss, &hooks).unwrap(), [true, true, false]);
        // A leaf reaches itself, and a constant nobody.
        assert_eq!(reached(&unused, &hooks).unwrap(), [false, false, true]);
        assert_eq!(reached(&Tensor::from(1.0f32), &hooks).unwrap(), [false; 3]);
        assert_eq!(fired.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_hook_fires_once_a_backward_and_sees_the_accumulated_gradient() {
        let w = param(&[1.0, 2.0]);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let hook = {
            let (w, seen) = (w.shallow_clone(), Arc::clone(&seen));
            on_gradient(&w.shallow_clone(), move || {
                seen.lock().unwrap().push(values(&grad(&w).unwrap()));
                Ok(())
            })
            .unwrap()
        };
        for _ in 0..2 {
            let loss = (&w * 3.0).sum(Dtype::Float);
            backward(&[&loss], &[None]).unwrap();
        }
        assert_eq!(*seen.lock().unwrap(), [vec![3.0, 3.0], vec![6.0, 6.0]]);
        drop(hook);
    }

    #[test]
    fn hooks_fire_in_the_order_in_which_backward_reaches_them() {
        let (first, last) = (param(&[2.0]), param(&[3.0]));
        let order = Arc::new(Mutex::new(Vec::new()));
        let hooks: Vec<_> = [(&first, "first"), (&last, "last")]
            .into_iter()
            .map(|(w, name)| {
                let order = Arc::clone(&order);
                on_gradient(w, move || {
                    order.lock().unwrap().push(name);
                    Ok(())
                })
                .unwrap()
            })
            .collect();
        let hidden = (&first * 2.0).relu();
        backward(&[&(hidden * &last).sum(Dtype::Float)], &[None]).unwrap();
        assert_eq!(*order.lock().unwrap(), ["last", "first"]);
        drop(hooks);
    }

    #[test]
    fn a_dropped_hook_is_silent_and_lets_go_of_what_it_owned() {
        let w = param(&[1.0]);
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let hook = on_gradient(&w, move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        // A graph made while the hook was alive keeps the accumulator, and so the C++ half, alive.
        let loss = (&w * 2.0).sum(Dtype::Float);
        drop(hook);
        assert_eq!(Arc::strong_count(&calls), 1);
        backward(&[&loss], &[None]).unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_error_in_a_hook_ends_backward_and_arrives_whole() {
        let w = param(&[1.0]);
        let _hook =
            on_gradient(&w, || Err(Error::new(Kind::Worker, "rank 1: gone").hint("look at rank 1"))).unwrap();
        let error = backward(&[&(&w * 2.0).sum(Dtype::Float)], &[None]).unwrap_err();
        assert_eq!(error.kind(), Kind::Worker);
        assert_eq!(error.to_string(), "rank 1: gone");
        assert_eq!(error.advice(), Some("look at rank 1"));
        let text = (&w * 2.0).sum(Dtype::Float).f_backward().unwrap_err().to_string();
        assert!(text.contains("rank 1: gone"), "{text}");
    }

    #[test]
    fn a_panic_in_a_hook_ends_backward_as_an_error() {
        let w = param(&[1.0]);
        let _hook = on_gradient(&w, || panic!("index {} is out of range", 7)).unwrap();
        let error = backward(&[&(&w * 2.0).sum(Dtype::Float)], &[None]).unwrap_err();
        assert_eq!(error.to_string(), "a gradient hook panicked: index 7 is out of range");
    }

    #[test]
    fn a_hook_on_what_has_no_gradient_is_refused() {
        let frozen = Tensor::from_slice(&[1.0f32]);
        let owned = Arc::new(());
        let kept = Arc::clone(&owned);
        let error = on_gradient(&frozen, move || {
            let _ = &kept;
            Ok(())
        });
        assert!(error.unwrap_err().to_string().contains("leaf"));
        assert_eq!(Arc::strong_count(&owned), 1, "the closure was let go");
    }

    #[test]
    fn backward_takes_the_gradients_of_the_outputs() {
        let w = param(&[1.0, 2.0, 3.0]);
        let (a, b) = (&w * 2.0, &w * &w);
        let (ga, gb) = (Tensor::from_slice(&[1.0f32, 10.0, 100.0]), Tensor::from_slice(&[1.0f32, 0.0, 1.0]));
        backward(&[&a, &b], &[Some(&ga), Some(&gb)]).unwrap();
        // d/dw = 2 ga + 2 w gb
        assert_eq!(values(&grad(&w).unwrap()), [4.0, 20.0, 206.0]);
    }

    #[test]
    fn backward_from_a_vector_needs_its_gradient() {
        let w = param(&[1.0, 2.0]);
        assert!(backward(&[&(&w * 2.0)], &[None]).unwrap_err().to_string().contains("scalar"));
        assert!(backward(&[&w], &[]).unwrap_err().to_string().contains("1 outputs but 0 gradients"));
    }

    #[test]
    fn a_function_of_ones_own_has_the_gradient_that_it_says() {
        let (w, constant) = (param(&[1.0, 2.0]), Tensor::from_slice(&[5.0f32, 5.0]));
        let owned = Arc::new(());
        let cube = |w: &Tensor| {
            let x = w.detach();
            let y = &x * &x * &x;
            let kept = Arc::clone(&owned);
            function(&[w, &constant], &y, move |gradient| {
                let _ = &kept;
                Ok(vec![gradient * &x * &x * 3.0, Tensor::new()])
            })
            .unwrap();
            y
        };
        let loss = (cube(&w) * 2.0).sum(Dtype::Float);
        backward(&[&loss], &[None]).unwrap();
        assert_eq!(values(&grad(&w).unwrap()), [6.0, 24.0]);
        let again = backward(&[&loss], &[None]).unwrap_err().to_string();
        assert!(again.contains("freed"), "{again}");
        drop(cube(&w));
        assert_eq!(Arc::strong_count(&owned), 1, "closures go with their graphs");
        assert!(!cube(&constant).requires_grad());
    }

    #[test]
    fn an_error_in_a_function_of_ones_own_arrives_whole() {
        let w = param(&[1.0]);
        let fail = |backward: fn(&Tensor) -> Result<Vec<Tensor>>| {
            let y = w.detach().copy();
            function(&[&w], &y, backward).unwrap();
            super::backward(&[&y.sum(Dtype::Float)], &[None]).unwrap_err()
        };
        let error = fail(|_| Err(Error::new(Kind::Worker, "rank 1: gone").hint("look at rank 1")));
        assert_eq!((error.to_string().as_str(), error.advice()), ("rank 1: gone", Some("look at rank 1")));
        assert!(fail(|_| panic!("no")).to_string().contains("panicked: no"));
        assert_eq!(fail(|_| Ok(Vec::new())).to_string(), "0 gradients for 1 inputs");
    }

    #[test]
    fn gradients_can_be_read_set_and_made_undefined() {
        let w = param(&[1.0, 2.0]);
        assert!(grad(&w).is_none());
        let g = Tensor::from_slice(&[5.0f32, 6.0]);
        set_grad(&w, Some(&g)).unwrap();
        let _ = grad(&w).unwrap().fill_(9.0);
        assert_eq!(values(&g), [9.0, 9.0], "storage is shared");
        set_grad(&w, None).unwrap();
        assert!(grad(&w).is_none());
        let wrong = Tensor::zeros([3], (Dtype::Float, Device::Cpu));
        assert!(set_grad(&w, Some(&wrong)).unwrap_err().to_string().contains("[3]"));
    }
}
