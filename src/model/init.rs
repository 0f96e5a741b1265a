//! Initial values: PyTorch's defaults, drawn from a generator that nothing else uses.
//!
//! After `torch.manual_seed(seed)` PyTorch fills a module built in the same order with the same
//! values, bit for bit (peers/ holds such twins).

use crate::Result;
use crate::torch::random::Generator;
use tch::{Device, Kind, Tensor};

/// Draws initial values on the CPU, so that they are the same on every device.
pub(super) struct Draw(Generator);

impl Draw {
    pub(super) fn new(seed: u64) -> Result<Self> {
        Ok(Self(Generator::new(seed)?))
    }

    /// The weight of a linear or convolution layer: `kaiming_uniform_(a=sqrt(5))`. All dimensions but
    /// the first make up the fan-in.
    pub(super) fn weight(&mut self, shape: &[i64]) -> Result<Tensor> {
        let bound = weight_bound(shape[1..].iter().product());
        let tensor = zeros(shape)?;
        self.0.fill_uniform(&tensor, -bound, bound)?;
        Ok(tensor)
    }

    /// The bias of a linear or convolution layer with this fan-in.
    pub(super) fn bias(&mut self, length: i64, fan_in: i64) -> Result<Tensor> {
        let bound = 1.0 / (fan_in as f64).sqrt();
        let tensor = zeros(&[length])?;
        self.0.fill_uniform(&tensor, -bound, bound)?;
        Ok(tensor)
    }

    /// Normal numbers round zero.
    pub(super) fn normal(&mut self, shape: &[i64], deviation: f64) -> Result<Tensor> {
        let tensor = zeros(shape)?;
        self.0.fill_normal(&tensor, 0.0, deviation)?;
        Ok(tensor)
    }
}

/// `gain / sqrt(fan_in) * sqrt(3)` with the gain of a leaky ReLU of slope sqrt(5). That is
/// `1 / sqrt(fan_in)`, but rounded in PyTorch's order, so that weights agree in the last bit.
fn weight_bound(fan_in: i64) -> f64 {
    let slope = 5f64.sqrt();
    let gain = (2.0 / (1.0 + slope * slope)).sqrt();
    3f64.sqrt() * (gain / (fan_in as f64).sqrt())
}

pub(super) fn zeros(shape: &[i64]) -> Result<Tensor> {
    Ok(Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?)
}

pub(super) fn ones(shape: &[i64]) -> Result<Tensor> {
    Ok(Tensor::f_ones(shape, (Kind::Float, Device::Cpu))?)
}

/// A scalar counter of zero.
pub(super) fn counter() -> Result<Tensor> {
    Ok(Tensor::f_zeros([0i64; 0], (Kind::Int64, Device::Cpu))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_one_over_the_root_of_the_fan_in() {
        assert!((weight_bound(784) - 1.0 / 28.0).abs() < 1e-15);
    }

    #[test]
    fn weights_fill_their_bounds_evenly() {
        let weight = Draw::new(1).unwrap().weight(&[300, 400]).unwrap();
        let (bound, largest) = (1.0 / 20.0, weight.abs().max().double_value(&[]));
        assert!(largest <= bound && largest > bound * 0.999, "{largest}");
        // A uniform distribution on [-b, b] deviates by b / sqrt(3).
        let deviation = weight.std(true).double_value(&[]);
        assert!((deviation - bound / 3f64.sqrt()).abs() < 1e-4, "{deviation}");
        assert!(weight.mean(Kind::Double).double_value(&[]).abs() < 5e-4);
    }

    #[test]
    fn a_convolution_counts_its_kernel_into_the_fan_in() {
        let weight = Draw::new(1).unwrap().weight(&[64, 16, 3, 3]).unwrap();
        let bound = 1.0 / 12.0;
        let largest = weight.abs().max().double_value(&[]);
        assert!(largest <= bound && largest > bound * 0.999, "{largest}");
    }
}
