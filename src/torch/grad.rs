//! Gradients: hooks that fire as each becomes ready, backward from given output gradients, and
//! reading and setting `.grad`.

use crate::Result;
use tch::Tensor;

/// Keeps a gradient hook alive; dropping it removes the hook.
#[derive(Debug)]
pub struct Hook {
    _todo: (),
}

/// Calls `ready` each time backward has accumulated into `param.grad`. On CPU that is on the thread
/// that called backward; on CUDA on the device's autograd thread. An error or panic in `ready` ends
/// that backward, which then returns it.
pub fn on_gradient(param: &Tensor, ready: impl FnMut() -> Result<()> + Send + 'static) -> Result<Hook> {
    let _ = (param, ready);
    todo!()
}

/// Backward from `outputs` with these gradients; `None` seeds a scalar with one. Accumulates into leaves.
pub fn backward(outputs: &[&Tensor], gradients: &[Option<&Tensor>]) -> Result<()> {
    let _ = (outputs, gradients);
    todo!()
}

/// `param.grad`, if it is defined. Shares storage.
pub fn grad(param: &Tensor) -> Option<Tensor> {
    let _ = param;
    todo!()
}

/// Sets `param.grad`; `None` makes it undefined.
pub fn set_grad(param: &Tensor, gradient: Option<&Tensor>) -> Result<()> {
    let _ = (param, gradient);
    todo!()
}
