//! A model's parameters and buffers by name, in creation order: what ranks must agree on.

use crate::Result;
use std::path::Path;
use tch::Tensor;

/// One named tensor.
#[derive(Debug)]
pub struct Entry {
    /// PyTorch's name, as in `layer1.0.conv1.weight`.
    pub name: String,
    /// Shared handle.
    pub tensor: Tensor,
    /// A parameter that is trained (`true`), or a buffer / frozen parameter.
    pub trainable: bool,
    /// Registered as a buffer (running statistics), not as a parameter.
    pub buffer: bool,
}

/// Parameters and buffers in creation order.
#[derive(Debug, Default)]
pub struct State {
    entries: Vec<Entry>,
    /// Second names of tied parameters: (alias, name). One tensor in memory, both keys in a file.
    aliases: Vec<(String, String)>,
}

impl State {
    /// Registers a parameter that is trained, and hands its handle back.
    pub fn parameter(&mut self, name: impl Into<String>, tensor: Tensor) -> Tensor {
        let tensor = tensor.set_requires_grad(true);
        self.entries.push(Entry {
            name: name.into(),
            tensor: tensor.shallow_clone(),
            trainable: true,
            buffer: false,
        });
        tensor
    }

    /// Registers a buffer, and hands its handle back.
    pub fn buffer(&mut self, name: impl Into<String>, tensor: Tensor) -> Tensor {
        self.entries.push(Entry {
            name: name.into(),
            tensor: tensor.shallow_clone(),
            trainable: false,
            buffer: true,
        });
        tensor
    }

    /// Gives a registered tensor a second name in files.
    pub fn tie(&mut self, alias: impl Into<String>, name: impl Into<String>) {
        self.aliases.push((alias.into(), name.into()));
    }

    /// Everything, in creation order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Trainable parameters, in creation order.
    pub fn parameters(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.trainable)
    }

    /// Buffers, in creation order.
    pub fn buffers(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.buffer)
    }

    /// Copies values in by name, without gradient history. Names, shapes and dtypes must match one to
    /// one; the first difference is named.
    pub fn copy_from(&self, other: &[(String, Tensor)]) -> Result<()> {
        let _ = other;
        todo!()
    }

    /// Reads a safetensors file (with or without one leading `module.`) into this state.
    pub fn load(&self, path: &Path) -> Result<()> {
        let _ = path;
        todo!()
    }

    /// Writes a safetensors file, atomically.
    pub fn save(&self, path: &Path) -> Result<()> {
        let _ = path;
        todo!()
    }

    /// SHA-256 over names, shapes, dtypes and bytes: equal exactly when the weights are bit-equal.
    pub fn digest(&self) -> Result<String> {
        todo!()
    }
}
