//! From gradients to new weights, the same way in every engine.

use super::timed;
use crate::Result;
use crate::config::{InjectPlan, OptimizerPlan, Plan, Precision};
use crate::metrics::phase::{Phase, Recorder};
use crate::torch::optim::Optimizer;
use tch::Tensor;

/// How a step is done, whatever the engine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    /// How weights are updated.
    pub optimizer: OptimizerPlan,
    /// Largest norm of all gradients together.
    pub clip_norm: Option<f64>,
    /// Number format of activations.
    pub precision: Precision,
    /// A deliberate slowdown.
    pub inject: Option<InjectPlan>,
}

impl From<&Plan> for Recipe {
    fn from(plan: &Plan) -> Self {
        Self {
            optimizer: plan.optimizer,
            clip_norm: plan.clip_norm,
            precision: plan.run.precision,
            inject: plan.inject,
        }
    }
}

impl From<OptimizerPlan> for Recipe {
    /// In fp32, without clipping.
    fn from(optimizer: OptimizerPlan) -> Self {
        Self { optimizer, clip_norm: None, precision: Precision::Fp32, inject: None }
    }
}

/// The optimiser and what comes before it.
#[derive(Debug)]
pub struct Updater {
    optimizer: Optimizer,
    inject: Option<InjectPlan>,
}

impl Updater {
    /// Over these parameters; handles are shared, not copied.
    pub fn new(recipe: Recipe, parameters: Vec<Tensor>) -> Self {
        Self { optimizer: Optimizer::new(recipe.optimizer, parameters), inject: recipe.inject }
    }

    /// One update; the gradients are undefined afterwards.
    pub fn update(&mut self, recorder: &mut Recorder) -> Result<()> {
        let Self { optimizer, inject } = self;
        timed(recorder, inject.as_ref(), Phase::Update, || {
            optimizer.step()?;
            optimizer.zero_grad()
        })
    }
}
