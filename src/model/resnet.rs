//! ResNet-18 for small images: torchvision's names, with a 3x3 stride-1 `conv1` and no max-pool.
//!
//! Convolutions start at PyTorch's default, not at torchvision's `kaiming_normal_(fan_out)`.

use super::layers::{BatchNorm, Builder, Conv, ConvShape, Linear};
use super::{Model, State, SumOverRanks};
use crate::Result;
use std::sync::Arc;
use tch::{Device, Tensor};

const STEM: i64 = 64;
/// Width and first stride of the four layers, of two blocks each.
const LAYERS: [(i64, i64); 4] = [(64, 1), (128, 2), (256, 2), (512, 2)];

pub(super) struct Resnet18 {
    state: State,
    conv1: Conv,
    bn1: BatchNorm,
    blocks: Vec<Block>,
    fc: Linear,
}

impl Resnet18 {
    pub(super) fn new(channels: i64, classes: i64, device: Device, seed: u64) -> Result<Self> {
        let mut b = Builder::new(device, seed)?;
        let stem = ConvShape::three(channels, STEM, 1);
        let weight = b.draw_conv(stem)?;
        let conv1 = b.register_conv("conv1", stem, &weight)?;
        let bn1 = b.batch_norm("bn1", STEM)?;
        let mut blocks = Vec::new();
        let mut from = STEM;
        for (number, (to, stride)) in (1..).zip(LAYERS) {
            b.inside(format!("layer{number}"), |b| {
                blocks.push(b.inside("0", |b| Block::new(b, from, to, stride))?);
                blocks.push(b.inside("1", |b| Block::new(b, to, to, 1))?);
                Ok(())
            })?;
            from = to;
        }
        let fc = b.linear("fc", from, classes)?;
        Ok(Self { state: b.finish(), conv1, bn1, blocks, fc })
    }
}

impl Model for Resnet18 {
    fn forward(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let mut x = self.bn1.forward(&self.conv1.forward(input)?, train)?.f_relu()?;
        for block in &self.blocks {
            x = block.forward(&x, train)?;
        }
        self.fc.forward(&x.f_adaptive_avg_pool2d([1, 1])?.f_flatten(1, -1)?)
    }

    fn state(&self) -> &State {
        &self.state
    }

    fn sync_batch_norm(&mut self, group: &Arc<dyn SumOverRanks>) {
        self.bn1.sync(group);
        self.blocks.iter_mut().for_each(|block| block.sync_batch_norm(group));
    }
}

/// Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes.
struct Block {
    conv1: Conv,
    bn1: BatchNorm,
    conv2: Conv,
    bn2: BatchNorm,
    downsample: Option<(Conv, BatchNorm)>,
}

impl Block {
    fn new(b: &mut Builder, from: i64, to: i64, stride: i64) -> Result<Self> {
        let shapes = [ConvShape::three(from, to, stride), ConvShape::three(to, to, 1)];
        let shortcut = (stride != 1 || from != to).then(|| ConvShape::one(from, to, stride));
        let shortcut =
            shortcut.map(|shape| Ok::<_, crate::Error>((shape, b.draw_conv(shape)?))).transpose()?;
        let weights = [b.draw_conv(shapes[0])?, b.draw_conv(shapes[1])?];
        Ok(Self {
            conv1: b.register_conv("conv1", shapes[0], &weights[0])?,
            bn1: b.batch_norm("bn1", to)?,
            conv2: b.register_conv("conv2", shapes[1], &weights[1])?,
            bn2: b.batch_norm("bn2", to)?,
            downsample: shortcut
                .map(|(shape, weight)| {
                    b.inside("downsample", |b| {
                        Ok((b.register_conv("0", shape, &weight)?, b.batch_norm("1", to)?))
                    })
                })
                .transpose()?,
        })
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let y = self.bn1.forward(&self.conv1.forward(x)?, train)?.f_relu()?;
        let y = self.bn2.forward(&self.conv2.forward(&y)?, train)?;
        let shortcut = match &self.downsample {
            Some((conv, norm)) => norm.forward(&conv.forward(x)?, train)?,
            None => x.shallow_clone(),
        };
        Ok(y.f_add(&shortcut)?.f_relu()?)
    }

    fn sync_batch_norm(&mut self, group: &Arc<dyn SumOverRanks>) {
        let shortcut = self.downsample.as_mut().map(|(_, norm)| norm);
        [&mut self.bn1, &mut self.bn2].into_iter().chain(shortcut).for_each(|norm| norm.sync(group));
    }
}
