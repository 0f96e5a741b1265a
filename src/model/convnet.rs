//! Three 3x3 convolutions (the second and third halve the image), global average pool, one linear
//! layer; BatchNorm after each convolution if wanted. Convolutions keep their bias in both forms, so
//! that the two differ in nothing else.

use super::layers::{BatchNorm, Builder, Conv, ConvShape, Linear};
use super::{Model, State, SumOverRanks};
use crate::Result;
use std::sync::Arc;
use tch::{Device, Tensor};

const WIDTHS: [(i64, i64); 3] = [(32, 1), (64, 2), (128, 2)];

pub(super) struct Convnet {
    state: State,
    stages: Vec<(Conv, Option<BatchNorm>)>,
    fc: Linear,
}

impl Convnet {
    pub(super) fn new(
        channels: i64,
        classes: i64,
        batch_norm: bool,
        device: Device,
        seed: u64,
    ) -> Result<Self> {
        let mut b = Builder::new(device, seed)?;
        let mut stages = Vec::new();
        let mut from = channels;
        for (number, (to, stride)) in (1..).zip(WIDTHS) {
            let conv = b.conv(&format!("conv{number}"), ConvShape::three(from, to, stride))?;
            let norm = batch_norm.then(|| b.batch_norm(&format!("bn{number}"), to)).transpose()?;
            stages.push((conv, norm));
            from = to;
        }
        let fc = b.linear("fc", from, classes)?;
        Ok(Self { state: b.finish(), stages, fc })
    }
}

impl Model for Convnet {
    fn forward(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let mut x = input.shallow_clone();
        for (conv, norm) in &self.stages {
            x = conv.forward(&x)?;
            if let Some(norm) = norm {
                x = norm.forward(&x, train)?;
            }
            x = x.f_relu()?;
        }
        self.fc.forward(&x.f_adaptive_avg_pool2d([1, 1])?.f_flatten(1, -1)?)
    }

    fn state(&self) -> &State {
        &self.state
    }

    fn sync_batch_norm(&mut self, group: &Arc<dyn SumOverRanks>) {
        self.stages.iter_mut().filter_map(|(_, norm)| norm.as_mut()).for_each(|norm| norm.sync(group));
    }
}
