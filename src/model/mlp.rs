//! mlp.
