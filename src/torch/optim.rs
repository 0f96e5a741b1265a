//! SGD and Adam through libtorch's fused kernels: one call a step for all parameters.
//!
//! The same arithmetic as `torch.optim.SGD` and `torch.optim.Adam`. Parameters whose gradient is
//! undefined are left alone, state included, as PyTorch leaves them.

use super::{grad, no_grad, shim};
use crate::Result;
use crate::config::OptimizerPlan;
use std::ptr::null;
use tch::{Kind, Tensor};

/// `torch.optim.Adam`'s defaults.
const BETAS: (f64, f64) = (0.9, 0.999);
const EPSILON: f64 = 1e-8;

/// An optimiser over a fixed list of parameters.
#[derive(Debug)]
pub struct Optimizer {
    rule: OptimizerPlan,
    slots: Vec<Slot>,
}

/// A parameter and what its updates remember.
#[derive(Debug)]
struct Slot {
    parameter: Tensor,
    memory: Option<Memory>,
}

/// Made at a parameter's first update, not before: a parameter that never has a gradient costs nothing.
#[derive(Debug)]
enum Memory {
    /// SGD's momentum buffer.
    Momentum(Tensor),
    /// Adam's running means of the gradient and of its square, and the number of updates so far (a
    /// scalar, as the kernel wants it).
    Moments { mean: Tensor, square: Tensor, steps: Tensor },
}

impl Optimizer {
    /// Over these parameters; handles are shared, not copied.
    pub fn new(plan: OptimizerPlan, parameters: Vec<Tensor>) -> Self {
        let slots = parameters.into_iter().map(|parameter| Slot { parameter, memory: None }).collect();
        Self { rule: plan, slots }
    }

    /// Updates every parameter that has a gradient.
    pub fn step(&mut self) -> Result<()> {
        let mut updates: Vec<(&mut Slot, Tensor)> = self
            .slots
            .iter_mut()
            .filter_map(|slot| grad::grad(&slot.parameter).map(|gradient| (slot, gradient)))
            .collect();
        match self.rule {
            OptimizerPlan::Sgd { lr, momentum, weight_decay } if momentum == 0.0 => {
                sgd(&updates, &[], Sgd { lr, momentum, weight_decay, first: false })
            }
            OptimizerPlan::Sgd { lr, momentum, weight_decay } => {
                // The kernel takes one flag for its whole list, and parameters may see their first
                // gradient at different steps.
                let (mut fresh, known): (Vec<_>, Vec<_>) =
                    updates.into_iter().partition(|(slot, _)| slot.memory.is_none());
                for (slot, gradient) in &mut fresh {
                    slot.memory = Some(Memory::Momentum(no_grad(|| gradient.f_empty_like())?));
                }
                for (updates, first) in [(fresh, true), (known, false)] {
                    let buffers: Vec<_> = updates.iter().filter_map(|(slot, _)| slot.momentum()).collect();
                    sgd(&updates, &buffers, Sgd { lr, momentum, weight_decay, first })?;
                }
                Ok(())
            }
            OptimizerPlan::Adam { lr, weight_decay } => {
                for (slot, _) in &mut updates {
                    if slot.memory.is_none() {
                        slot.memory = Some(no_grad(|| Memory::moments(&slot.parameter))?);
                    }
                }
                adam(&updates, lr, weight_decay)
            }
        }
    }

    /// What updates remember, by parameter: PyTorch's names of it, without gradient history. Nothing for a
    /// parameter that was never updated.
    pub fn memory(&self) -> Vec<Vec<(&'static str, Tensor)>> {
        let of = |slot: &Slot| match &slot.memory {
            None => Vec::new(),
            Some(Memory::Momentum(buffer)) => vec![("momentum_buffer", buffer.shallow_clone())],
            Some(Memory::Moments { mean, square, steps }) => vec![
                ("exp_avg", mean.shallow_clone()),
                ("exp_avg_sq", square.shallow_clone()),
                ("step", steps.shallow_clone()),
            ],
        };
        self.slots.iter().map(of).collect()
    }

    /// Puts back what [`Self::memory`] gave. `find` gives a field of a parameter, by its position.
    pub fn restore(&mut self, find: impl Fn(usize, &str) -> Option<Tensor>) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            slot.memory = match self.rule {
                OptimizerPlan::Sgd { .. } => find(index, "momentum_buffer").map(Memory::Momentum),
                OptimizerPlan::Adam { .. } => find(index, "exp_avg")
                    .zip(find(index, "exp_avg_sq"))
                    .zip(find(index, "step"))
                    .map(|((mean, square), steps)| Memory::Moments { mean, square, steps }),
            };
        }
    }

    /// Makes every gradient undefined, as `zero_grad(set_to_none=True)`.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.slots.iter().try_for_each(|slot| grad::set_grad(&slot.parameter, None))
    }
}

impl Memory {
    fn moments(parameter: &Tensor) -> Result<Self> {
        let mean = parameter.f_zeros_like()?;
        let square = parameter.f_zeros_like()?;
        // Counted in float32 beside the parameter, as PyTorch's fused Adam keeps it.
        let steps = Tensor::f_zeros([0i64; 0], (Kind::Float, parameter.device()))?;
        Ok(Self::Moments { mean, square, steps })
    }
}

impl Slot {
    fn momentum(&self) -> Option<&Tensor> {
        match &self.memory {
            Some(Memory::Momentum(buffer)) => Some(buffer),
            _ => None,
        }
    }

    fn moments(&self) -> Option<[&Tensor; 3]> {
        match &self.memory {
            Some(Memory::Moments { mean, square, steps }) => Some([mean, square, steps]),
            _ => None,
        }
    }
}

struct Sgd {
    lr: f64,
    momentum: f64,
    weight_decay: f64,
    first: bool,
}

fn sgd(updates: &[(&mut Slot, Tensor)], buffers: &[&Tensor], rule: Sgd) -> Result<()> {
    if updates.is_empty() {
        return Ok(());
    }
    debug_assert!(buffers.is_empty() || buffers.len() == updates.len());
    let params = shim::raws(updates.iter().map(|(slot, _)| &slot.parameter));
    let grads = shim::raws(updates.iter().map(|(_, gradient)| gradient));
    let buffers = shim::raws(buffers.iter().copied());
    let momenta = if buffers.is_empty() { null() } else { buffers.as_ptr() };
    let Sgd { lr, momentum, weight_decay, first } = rule;
    // SAFETY: each list has `params.len()` tensors that live through the call, or is null.
    unsafe {
        shim::check(shim::dvd_sgd(
            params.as_ptr(),
            grads.as_ptr(),
            momenta,
            params.len(),
            lr,
            momentum,
            weight_decay,
            first,
        ))
    }
}

fn adam(updates: &[(&mut Slot, Tensor)], lr: f64, weight_decay: f64) -> Result<()> {
    if updates.is_empty() {
        return Ok(());
    }
    let params = shim::raws(updates.iter().map(|(slot, _)| &slot.parameter));
    let grads = shim::raws(updates.iter().map(|(_, gradient)| gradient));
    let moments: Vec<_> = updates.iter().filter_map(|(slot, _)| slot.moments()).collect();
    debug_assert_eq!(moments.len(), params.len());
    let [means, squares, steps] = [0, 1, 2].map(|which| shim::raws(moments.iter().map(|m| m[which])));
    // SAFETY: five lists of `params.len()` tensors that live through the call.
    unsafe {
        shim::check(shim::dvd_adam(
            params.as_ptr(),
            grads.as_ptr(),
            means.as_ptr(),
            squares.as_ptr(),
            steps.as_ptr(),
            params.len(),
            lr,
            BETAS.0,
            BETAS.1,
            weight_decay,
            EPSILON,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One parameter element, worked through `torch.optim`'s documented algorithm in f64.
    #[derive(Clone, Copy, Default)]
    struct Reference {
        value: f64,
        momentum: Option<f64>,
        mean: f64,
        square: f64,
        steps: i32,
    }

    impl Reference {
        fn update(&mut self, rule: OptimizerPlan, gradient: f64) {
            match rule {
                OptimizerPlan::Sgd { lr, momentum, weight_decay } => {
                    let g = gradient + weight_decay * self.value;
                    let step = self.momentum.map_or(g, |buffer| momentum * buffer + g);
                    self.momentum = Some(step);
                    self.value -= lr * if momentum == 0.0 { g } else { step };
                }
                OptimizerPlan::Adam { lr, weight_decay } => {
                    let g = gradient + weight_decay * self.value;
                    self.steps += 1;
                    self.mean = 0.9 * self.mean + 0.1 * g;
                    self.square = 0.999 * self.square + 0.001 * g * g;
                    let mean = self.mean / (1.0 - 0.9f64.powi(self.steps));
                    let square = self.square / (1.0 - 0.999f64.powi(self.steps));
                    self.value -= lr * mean / (square.sqrt() + 1e-8);
                }
            }
        }
    }

    /// Three parameters for six steps: one with a gradient always, one from the third step on but not
    /// in the fifth, one never. Long enough (37) that vector and tail loops of the kernels both run.
    fn follows_the_reference(rule: OptimizerPlan) {
        const LENGTH: usize = 37;
        let start = |which: usize, i: usize| ((which * LENGTH + i) as f64 * 0.7).sin();
        let gradient = |which: usize, step: usize, i: usize| {
            let present = [true, step >= 2 && step != 4, false][which];
            present.then(|| ((which + 3 * step) as f64 + i as f64 * 0.3).cos())
        };
        let parameters: Vec<Tensor> = (0..3)
            .map(|which| {
                let values: Vec<f32> = (0..LENGTH).map(|i| start(which, i) as f32).collect();
                Tensor::from_slice(&values).set_requires_grad(true)
            })
            .collect();
        let mut expected: Vec<Vec<Reference>> = (0..3)
            .map(|which| {
                (0..LENGTH)
                    .map(|i| Reference { value: f64::from(start(which, i) as f32), ..Reference::default() })
                    .collect()
            })
            .collect();
        let mut optimizer = Optimizer::new(rule, parameters.iter().map(Tensor::shallow_clone).collect());
        for step in 0..6 {
            optimizer.zero_grad().unwrap();
            for (which, parameter) in parameters.iter().enumerate() {
                let values: Option<Vec<f32>> =
                    (0..LENGTH).map(|i| gradient(which, step, i).map(|g| g as f32)).collect();
                if let Some(values) = values {
                    grad::set_grad(parameter, Some(&Tensor::from_slice(&values))).unwrap();
                    for (i, reference) in expected[which].iter_mut().enumerate() {
                        reference.update(rule, f64::from(values[i]));
                    }
                }
            }
            optimizer.step().unwrap();
            for (parameter, expected) in parameters.iter().zip(&expected) {
                let values = Vec::<f32>::try_from(parameter.detach()).unwrap();
                for (value, expected) in values.iter().zip(expected) {
                    let difference = (f64::from(*value) - expected.value).abs();
                    assert!(difference < 2e-6, "{rule:?} step {step}: {value} for {}", expected.value);
                }
            }
        }
    }

    #[test]
    fn plain_sgd_follows_pytorch() {
        follows_the_reference(OptimizerPlan::Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.0 });
    }

    #[test]
    fn sgd_with_momentum_and_weight_decay_follows_pytorch() {
        follows_the_reference(OptimizerPlan::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0 });
        follows_the_reference(OptimizerPlan::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.05 });
        follows_the_reference(OptimizerPlan::Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.05 });
    }

    #[test]
    fn adam_follows_pytorch() {
        follows_the_reference(OptimizerPlan::Adam { lr: 0.01, weight_decay: 0.0 });
        follows_the_reference(OptimizerPlan::Adam { lr: 0.01, weight_decay: 0.1 });
    }

    #[test]
    fn momentum_by_hand() {
        let w = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
        let rule = OptimizerPlan::Sgd { lr: 0.5, momentum: 0.5, weight_decay: 0.0 };
        let mut optimizer = Optimizer::new(rule, vec![w.shallow_clone()]);
        // buffer 2 -> w = 1 - 1 = 0; buffer 0.5*2 + 2 = 3 -> w = -1.5
        for expected in [0.0, -1.5] {
            grad::set_grad(&w, Some(&Tensor::from_slice(&[2.0f32]))).unwrap();
            optimizer.step().unwrap();
            assert_eq!(w.double_value(&[0]), expected);
        }
    }

    #[test]
    fn nothing_to_update_is_fine() {
        let w = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
        for rule in [
            OptimizerPlan::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.1 },
            OptimizerPlan::Adam { lr: 0.1, weight_decay: 0.1 },
        ] {
            Optimizer::new(rule, vec![w.shallow_clone()]).step().unwrap();
            Optimizer::new(rule, vec![]).step().unwrap();
        }
        assert_eq!(w.double_value(&[0]), 1.0);
    }

    #[test]
    fn a_step_leaves_the_parameter_a_leaf_without_history_and_the_gradient_as_it_was() {
        let w = Tensor::from_slice(&[1.0f32, 2.0]).set_requires_grad(true);
        let rule = OptimizerPlan::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.1 };
        let mut optimizer = Optimizer::new(rule, vec![w.shallow_clone()]);
        let gradient = Tensor::from_slice(&[3.0f32, 4.0]);
        grad::set_grad(&w, Some(&gradient)).unwrap();
        optimizer.step().unwrap();
        assert!(w.is_leaf() && w.requires_grad());
        assert_eq!(Vec::<f32>::try_from(&gradient).unwrap(), [3.0, 4.0]);
    }
}
