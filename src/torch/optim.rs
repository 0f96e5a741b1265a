//! SGD and Adam through libtorch's fused kernels: one call a step for all parameters.
//!
//! The same arithmetic as `torch.optim.SGD` and `torch.optim.Adam`. Parameters whose gradient is
//! undefined are left alone, state included, as PyTorch leaves them.

use crate::Result;
use crate::config::OptimizerPlan;
use tch::Tensor;

/// An optimiser over a fixed list of parameters.
#[derive(Debug)]
pub struct Optimizer {
    _todo: (),
}

impl Optimizer {
    /// Over these parameters; handles are shared, not copied.
    pub fn new(plan: OptimizerPlan, parameters: Vec<Tensor>) -> Self {
        let _ = (plan, parameters);
        todo!()
    }

    /// Updates every parameter that has a gradient.
    pub fn step(&mut self) -> Result<()> {
        todo!()
    }

    /// Makes every gradient undefined, as `zero_grad(set_to_none=True)`.
    pub fn zero_grad(&mut self) -> Result<()> {
        todo!()
    }
}
