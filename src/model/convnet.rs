//! convnet.
