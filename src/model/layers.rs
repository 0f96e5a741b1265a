//! The layers that the models are made of, and the builder that draws, names and registers their state.
//!
//! A layer holds handles to the tensors that [`State`] holds: there is one copy of everything, and
//! what is written into the state is what the next forward uses.

use super::State;
use super::init::{self, Draw};
use super::sync_norm::{Norm, SumOverRanks, sync_batch_norm};
use crate::Result;
use crate::error::{Error, Kind};
use crate::torch::no_grad;
use std::sync::Arc;
use tch::{Device, Tensor};

/// Builds state in PyTorch's order of registration, under names that grow with [`Builder::inside`].
pub(super) struct Builder {
    draw: Draw,
    device: Device,
    path: Vec<String>,
    state: State,
}

impl Builder {
    pub(super) fn new(device: Device, seed: u64) -> Result<Self> {
        Ok(Self { draw: Draw::new(seed)?, device, path: Vec::new(), state: State::default() })
    }

    pub(super) fn finish(self) -> State {
        self.state
    }

    /// Builds under `name.`: what PyTorch does for a submodule.
    pub(super) fn inside<T>(
        &mut self,
        name: impl Into<String>,
        build: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        self.path.push(name.into());
        let built = build(self);
        self.path.pop();
        built
    }

    fn name(&self, leaf: &str) -> String {
        let mut name = self.path.join(".");
        name.push('.');
        name.push_str(leaf);
        name
    }

    fn parameter(&mut self, leaf: &str, tensor: &Tensor) -> Result<Tensor> {
        let tensor = tensor.f_to_device(self.device)?;
        Ok(self.state.parameter(self.name(leaf), tensor))
    }

    fn buffer(&mut self, leaf: &str, tensor: &Tensor) -> Result<Tensor> {
        let tensor = tensor.f_to_device(self.device)?;
        Ok(self.state.buffer(self.name(leaf), tensor))
    }

    pub(super) fn linear(&mut self, name: &str, from: i64, to: i64) -> Result<Linear> {
        let weight = self.draw.weight(&[to, from])?;
        let bias = self.draw.bias(to, from)?;
        self.register_linear(name, &weight, &bias)
    }

    /// A linear layer as GPT-2 starts it: normal weights, no bias yet.
    pub(super) fn normal_linear(&mut self, name: &str, from: i64, to: i64, deviation: f64) -> Result<Linear> {
        let weight = self.draw.normal(&[to, from], deviation)?;
        self.register_linear(name, &weight, &init::zeros(&[to])?)
    }

    fn register_linear(&mut self, name: &str, weight: &Tensor, bias: &Tensor) -> Result<Linear> {
        self.inside(name, |b| {
            Ok(Linear { weight: b.parameter("weight", weight)?, bias: b.parameter("bias", bias)? })
        })
    }

    pub(super) fn conv(&mut self, name: &str, shape: ConvShape) -> Result<Conv> {
        let weight = self.draw_conv(shape)?;
        let bias = self.draw.bias(shape.to, shape.from * shape.kernel * shape.kernel)?;
        self.inside(name, |b| {
            Ok(Conv {
                weight: b.parameter("weight", &weight)?,
                bias: Some(b.parameter("bias", &bias)?),
                shape,
            })
        })
    }

    /// Draws a convolution's weight without registering it: PyTorch's `resnet18` draws a shortcut
    /// before the block whose last child it becomes.
    pub(super) fn draw_conv(&mut self, shape: ConvShape) -> Result<Tensor> {
        self.draw.weight(&[shape.to, shape.from, shape.kernel, shape.kernel])
    }

    pub(super) fn register_conv(&mut self, name: &str, shape: ConvShape, weight: &Tensor) -> Result<Conv> {
        self.inside(name, |b| Ok(Conv { weight: b.parameter("weight", weight)?, bias: None, shape }))
    }

    pub(super) fn batch_norm(&mut self, name: &str, channels: i64) -> Result<BatchNorm> {
        self.inside(name, |b| {
            Ok(BatchNorm {
                weight: b.parameter("weight", &init::ones(&[channels])?)?,
                bias: b.parameter("bias", &init::zeros(&[channels])?)?,
                running_mean: b.buffer("running_mean", &init::zeros(&[channels])?)?,
                running_var: b.buffer("running_var", &init::ones(&[channels])?)?,
                batches: b.buffer("num_batches_tracked", &init::counter()?)?,
                group: None,
            })
        })
    }

    pub(super) fn layer_norm(&mut self, name: &str, width: i64) -> Result<LayerNorm> {
        self.inside(name, |b| {
            Ok(LayerNorm {
                weight: b.parameter("weight", &init::ones(&[width])?)?,
                bias: b.parameter("bias", &init::zeros(&[width])?)?,
                width,
            })
        })
    }

    /// A table of `rows` vectors.
    pub(super) fn embedding(&mut self, name: &str, rows: i64, width: i64, deviation: f64) -> Result<Tensor> {
        let table = self.draw.normal(&[rows, width], deviation)?;
        self.inside(name, |b| b.parameter("weight", &table))
    }

    /// Gives a tensor that is already there a second full name.
    pub(super) fn tie(&mut self, alias: &str, name: &str) {
        self.state.tie(alias, name);
    }
}

/// `y = x W^T + b`, weight `[out, in]`.
#[derive(Debug)]
pub(super) struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_linear(&self.weight, Some(&self.bias))?)
    }
}

/// A square convolution.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConvShape {
    pub(super) from: i64,
    pub(super) to: i64,
    pub(super) kernel: i64,
    pub(super) stride: i64,
    pub(super) padding: i64,
}

impl ConvShape {
    /// 3x3, padded so that stride 1 keeps the size.
    pub(super) fn three(from: i64, to: i64, stride: i64) -> Self {
        Self { from, to, kernel: 3, stride, padding: 1 }
    }

    /// 1x1.
    pub(super) fn one(from: i64, to: i64, stride: i64) -> Self {
        Self { from, to, kernel: 1, stride, padding: 0 }
    }
}

#[derive(Debug)]
pub(super) struct Conv {
    weight: Tensor,
    bias: Option<Tensor>,
    shape: ConvShape,
}

impl Conv {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ConvShape { stride, padding, .. } = self.shape;
        Ok(x.f_conv2d(&self.weight, self.bias.as_ref(), [stride, stride], [padding, padding], [1, 1], 1)?)
    }
}

/// Batch normalisation over `[batch, channels, ...]`, eps 1e-5, momentum 0.1.
pub(super) struct BatchNorm {
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    /// Whose samples are normalised together with this rank's, if anybody's.
    group: Option<Arc<dyn SumOverRanks>>,
}

impl BatchNorm {
    /// From now on training normalises by the samples of all ranks.
    pub(super) fn sync(&mut self, group: &Arc<dyn SumOverRanks>) {
        self.group = Some(Arc::clone(group));
    }

    /// Training normalises by the batch and moves the running statistics in place.
    pub(super) fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        const MOMENTUM: f64 = 0.1;
        const EPSILON: f64 = 1e-5;
        if train && let Some(group) = &self.group {
            let _ = no_grad(|| self.batches.shallow_clone().f_add_scalar_(1))?;
            let norm = Norm {
                weight: &self.weight,
                bias: &self.bias,
                running_mean: &self.running_mean,
                running_var: &self.running_var,
                momentum: MOMENTUM,
                epsilon: EPSILON,
            };
            return sync_batch_norm(x, norm, group);
        }
        if train {
            let values = x.numel() as i64 / self.weight.size1()?.max(1);
            if values == 1 {
                return Err(Error::new(
                    Kind::Torch,
                    format!(
                        "batch norm saw one value a channel in training (input {:?}), which has no variance",
                        x.size()
                    ),
                )
                .hint("use a larger batch on each card"));
            }
            let _ = no_grad(|| self.batches.shallow_clone().f_add_scalar_(1))?;
        }
        Ok(x.f_batch_norm(
            Some(&self.weight),
            Some(&self.bias),
            Some(&self.running_mean),
            Some(&self.running_var),
            train,
            MOMENTUM,
            EPSILON,
            true,
        )?)
    }
}

/// Layer normalisation over the last dimension, eps 1e-5.
#[derive(Debug)]
pub(super) struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    width: i64,
}

impl LayerNorm {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_layer_norm([self.width], Some(&self.weight), Some(&self.bias), 1e-5, true)?)
    }
}
