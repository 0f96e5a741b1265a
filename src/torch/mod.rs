//! The one place that touches libtorch's edge: what tch does not offer, through a small C++ shim.
//!
//! A Rust panic must not cross C++, and a C++ exception must not cross Rust: both become errors here.
//! Knows nothing of engines, ranks or models.

#![allow(unsafe_code)]

pub mod cuda;
pub mod grad;
pub mod memory;
pub mod optim;
pub mod precision;
pub mod random;
pub mod seat;
mod shim;
pub mod store;
pub mod threads;
mod version;

pub use version::{BUILT_AGAINST, Loaded, loaded, version};

/// Runs `f` without recording gradients. The mode is restored however `f` ends.
pub fn no_grad<T>(f: impl FnOnce() -> T) -> T {
    let _guard = tch::no_grad_guard();
    f()
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_grad_is_restored_after_a_panic() {
        let recording = || {
            let x = tch::Tensor::ones([1], (tch::Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
            (&x * 2.0).requires_grad()
        };
        let result = std::panic::catch_unwind(|| {
            super::no_grad(|| {
                if !recording() {
                    panic!("inside")
                }
            })
        });
        assert!(result.is_err(), "the closure saw no_grad");
        assert!(recording(), "gradients are recorded again");
    }
}
