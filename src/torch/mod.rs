//! The one place that touches libtorch's edge: what tch does not offer, through a small C++ shim.
//!
//! A Rust panic must not cross C++, and a C++ exception must not cross Rust: both become errors here.
//! Knows nothing of engines, ranks or models.

pub mod grad;
pub mod memory;
pub mod optim;
pub mod store;
pub mod threads;

/// The libtorch that was loaded, as in `2.11.0+cu130`.
pub fn version() -> String {
    todo!()
}
