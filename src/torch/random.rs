//! Random numbers from a generator of one's own, never libtorch's global one: what one part of a
//! program draws cannot change what another part gets.

use super::shim::{self, RawGenerator};
use crate::Result;
use std::ptr::null_mut;
use tch::Tensor;

/// A CPU generator: the one that `torch.manual_seed(seed)` leaves behind, so the same draws in the
/// same order give PyTorch's values.
#[derive(Debug)]
pub struct Generator {
    raw: *mut RawGenerator,
}

impl Generator {
    /// Seeded with this and nothing else.
    pub fn new(seed: u64) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: `raw` is filled on success only.
        unsafe { shim::check(shim::dvd_generator_new(seed, &mut raw)) }?;
        Ok(Self { raw })
    }

    /// Fills a CPU tensor with uniform numbers from `[from, to)`, without gradient history.
    pub fn fill_uniform(&mut self, tensor: &Tensor, from: f64, to: f64) -> Result<()> {
        // SAFETY: the tensor and the generator live through the call; `&mut` keeps it to one thread.
        unsafe { shim::check(shim::dvd_uniform(shim::raw(tensor), from, to, self.raw)) }
    }

    /// Fills a CPU tensor with normal numbers, without gradient history.
    pub fn fill_normal(&mut self, tensor: &Tensor, mean: f64, deviation: f64) -> Result<()> {
        // SAFETY: as above.
        unsafe { shim::check(shim::dvd_normal(shim::raw(tensor), mean, deviation, self.raw)) }
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        // SAFETY: made by `dvd_generator_new`, freed once.
        unsafe { shim::dvd_generator_free(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    fn drawn(seed: u64, fill: impl FnOnce(&mut Generator, &Tensor)) -> Vec<f32> {
        let tensor = Tensor::zeros([3], (Kind::Float, Device::Cpu));
        fill(&mut Generator::new(seed).unwrap(), &tensor);
        Vec::try_from(tensor).unwrap()
    }

    fn close(values: &[f32], expected: [f32; 3]) {
        assert!(
            values.iter().zip(expected).all(|(a, b)| (a - b).abs() < 5e-5),
            "{values:?} for {expected:?}"
        );
    }

    #[test]
    fn draws_are_those_of_pytorch_after_manual_seed() {
        // torch.manual_seed(0); torch.rand(3) / torch.randn(3)
        close(&drawn(0, |g, t| g.fill_uniform(t, 0.0, 1.0).unwrap()), [0.4963, 0.7682, 0.0885]);
        close(&drawn(0, |g, t| g.fill_normal(t, 0.0, 1.0).unwrap()), [1.5410, -0.2934, -2.1788]);
    }

    #[test]
    fn the_global_generator_neither_matters_nor_moves() {
        let before = drawn(7, |g, t| g.fill_uniform(t, -1.0, 1.0).unwrap());
        let _ = Tensor::rand([5], (Kind::Float, Device::Cpu));
        assert_eq!(before, drawn(7, |g, t| g.fill_uniform(t, -1.0, 1.0).unwrap()));
        assert_ne!(before, drawn(8, |g, t| g.fill_uniform(t, -1.0, 1.0).unwrap()));
    }
}
