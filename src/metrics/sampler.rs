//! The sampler.
