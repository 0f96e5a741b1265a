//! The single definition of each model, used by every engine.
//!
//! Names, shapes and initialisation are PyTorch's own, so that a PyTorch twin can load the weights.
//! Knows nothing of cards or engines: a replica is just a second value built on another device.

mod convnet;
mod gpt;
mod init;
mod mlp;
mod resnet;
mod state;

pub use state::{Entry, State};

use crate::Result;
use crate::config::ModelPlan;
use tch::{Device, Tensor};

/// A network with named state.
pub trait Model: Send {
    /// Outputs for a batch of inputs: logits `[batch, classes]`, for gpt `[batch, context, vocabulary]`.
    fn forward(&self, input: &Tensor, train: bool) -> Result<Tensor>;

    /// Parameters and buffers, in creation order.
    fn state(&self) -> &State;
}

/// Builds a model with PyTorch's default initialisation, drawn from `seed` alone: the same seed gives
/// the same weights in every process, whatever was drawn before.
pub fn build(plan: &ModelPlan, device: Device, seed: u64) -> Result<Box<dyn Model>> {
    let _ = (plan, device, seed);
    todo!()
}

/// Mean cross-entropy of logits against targets (`[batch]` labels, or `[batch, context]` next tokens).
pub fn loss(output: &Tensor, target: &Tensor) -> Result<Tensor> {
    let _ = (output, target);
    todo!()
}

/// How many predictions are right, out of how many.
pub fn correct(output: &Tensor, target: &Tensor) -> Result<(u64, u64)> {
    let _ = (output, target);
    todo!()
}
