//! Linear, ReLU, Linear, ReLU, Linear: heavy weights, light compute. Named as
//! `nn.Sequential(Linear, ReLU, Linear, ReLU, Linear)` names it.

use super::layers::{Builder, Linear};
use super::{Model, State};
use crate::Result;
use tch::{Device, Tensor};

pub(super) struct Mlp {
    state: State,
    layers: [Linear; 3],
}

impl Mlp {
    pub(super) fn new(input: i64, hidden: i64, classes: i64, device: Device, seed: u64) -> Result<Self> {
        let mut b = Builder::new(device, seed)?;
        let layers =
            [b.linear("0", input, hidden)?, b.linear("2", hidden, hidden)?, b.linear("4", hidden, classes)?];
        Ok(Self { state: b.finish(), layers })
    }
}

impl Model for Mlp {
    /// Takes anything of `[batch, ...]` with the right number of features: images need no reshaping.
    fn forward(&self, input: &Tensor, _train: bool) -> Result<Tensor> {
        let [first, second, last] = &self.layers;
        let x = first.forward(&input.f_flatten(1, -1)?)?.f_relu()?;
        last.forward(&second.forward(&x)?.f_relu()?)
    }

    fn state(&self) -> &State {
        &self.state
    }
}
