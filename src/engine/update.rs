//! From gradients to new weights, the same way in every engine.

use super::timed;
use crate::Result;
use crate::config::{InjectPlan, OptimizerPlan, Plan, Precision};
use crate::metrics::phase::{Phase, Recorder};
use crate::torch::optim::Optimizer;
use crate::torch::precision::{self, Scaler};
use tch::{Device, Tensor};

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

impl Recipe {
    /// Runs a forward or a loss on `device` in the number format of the recipe, on the calling thread.
    pub fn autocast<T>(&self, device: Device, run: impl FnOnce() -> Result<T>) -> Result<T> {
        precision::autocast(self.precision, device, run)
    }
}

/// What updates remember from one to the next.
#[derive(Debug, Default)]
pub struct Memory {
    /// `PARAMETER.FIELD`, PyTorch's names.
    pub fields: Vec<(String, Tensor)>,
    /// float16's loss scale, and good steps since it last moved.
    pub scale: Option<(f64, u32)>,
}

/// The optimiser and what comes before it.
#[derive(Debug)]
pub struct Updater {
    optimizer: Optimizer,
    parameters: Vec<Tensor>,
    clip_norm: Option<f64>,
    scaler: Option<Scaler>,
    skipped: u64,
    inject: Option<InjectPlan>,
}

impl Updater {
    /// Over these parameters; handles are shared, not copied.
    pub fn new(recipe: Recipe, parameters: Vec<Tensor>) -> Self {
        Self {
            parameters: parameters.iter().map(Tensor::shallow_clone).collect(),
            optimizer: Optimizer::new(recipe.optimizer, parameters),
            clip_norm: recipe.clip_norm,
            scaler: (recipe.precision == Precision::Fp16).then(Scaler::default),
            skipped: 0,
            inject: recipe.inject,
        }
    }

    /// The loss that backward is to start from: scaled where float16 needs it.
    pub fn scaled(&self, loss: Tensor) -> Result<Tensor> {
        match &self.scaler {
            None => Ok(loss),
            Some(scaler) => Ok(loss.f_mul_scalar(scaler.scale())?),
        }
    }

    /// Ends a backward: the gradients are those of the loss itself again.
    pub fn unscale(&mut self) -> Result<()> {
        self.scaler.as_mut().map_or(Ok(()), |scaler| scaler.unscale(&self.parameters))
    }

    /// One update; the gradients are undefined afterwards. A step whose gradients float16 could not hold is
    /// left out.
    pub fn update(&mut self, recorder: &mut Recorder) -> Result<()> {
        let Self { optimizer, parameters, clip_norm, scaler, skipped, inject } = self;
        timed(recorder, inject.as_ref(), Phase::Update, || {
            if scaler.as_mut().is_none_or(Scaler::end_step) {
                if let Some(max_norm) = *clip_norm {
                    precision::clip_norm(parameters, max_norm)?;
                }
                optimizer.step()?;
            } else {
                *skipped += 1;
            }
            optimizer.zero_grad()
        })
    }

    /// What the optimiser remembers, by the names of its parameters, and float16's loss scale.
    pub fn memory<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Memory {
        let fields = names.into_iter().zip(self.optimizer.memory()).flat_map(|(name, fields)| {
            fields.into_iter().map(move |(field, tensor)| (format!("{name}.{field}"), tensor))
        });
        Memory { fields: fields.collect(), scale: self.scaler.as_ref().map(Scaler::state) }
    }

    /// Goes on from what [`Self::memory`] gave.
    pub fn restore<'a>(&mut self, names: impl IntoIterator<Item = &'a str>, memory: &Memory) {
        let names: Vec<&str> = names.into_iter().collect();
        let find = |index: usize, field: &str| {
            let wanted = format!("{}.{field}", names.get(index)?);
            memory.fields.iter().find(|(name, _)| *name == wanted).map(|(_, tensor)| tensor.copy())
        };
        self.optimizer.restore(find);
        if let (Some(scaler), Some(scale)) = (&mut self.scaler, memory.scale) {
            *scaler = Scaler::from_state(scale);
        }
    }

    /// Steps that were left out so far.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped
    }
}
