//! What the wrapper can wrap, and how it finds names in what tch offers.

use super::agree::Named;
use tch::Tensor;

/// What can be wrapped: something with named parameters and buffers.
pub trait Module {
    /// Parameters in creation order, the same on every rank. Those that require no gradient are frozen:
    /// rank 0's values are copied to all at the start, and that is all.
    fn named_parameters(&self) -> Vec<(String, Tensor)>;

    /// Buffers, as running statistics are: the same names in the same order on every rank. Looked up
    /// anew each time, so a module may put a new tensor in place of an old one.
    fn named_buffers(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }
}

impl Module for Box<dyn crate::model::Model> {
    fn named_parameters(&self) -> Vec<(String, Tensor)> {
        let entries = self.state().entries().iter().filter(|entry| !entry.buffer);
        entries.map(|entry| (entry.name.clone(), entry.tensor.shallow_clone())).collect()
    }

    fn named_buffers(&self) -> Vec<(String, Tensor)> {
        self.state().buffers().map(|entry| (entry.name.clone(), entry.tensor.shallow_clone())).collect()
    }
}

/// Whatever was made with the store: its trainable variables in creation order are the parameters, the
/// rest, by name, the buffers. The network itself stays with the caller.
impl Module for tch::nn::VarStore {
    fn named_parameters(&self) -> Vec<(String, Tensor)> {
        let names = self.variables();
        let trainable = self.trainable_variables();
        // The store knows names in hash order and creation order without names; storage ties the two.
        let name_of = |tensor: &Tensor| {
            let mut found: Vec<&String> = names
                .iter()
                .filter(|(_, named)| named.data_ptr() == tensor.data_ptr() && named.size() == tensor.size())
                .map(|(name, _)| name)
                .collect();
            found.sort();
            found.first().map_or_else(String::new, |name| (*name).clone())
        };
        trainable.iter().map(|tensor| (name_of(tensor), tensor.shallow_clone())).collect()
    }

    fn named_buffers(&self) -> Vec<(String, Tensor)> {
        let trainable: Vec<_> = self.trainable_variables().iter().map(Tensor::data_ptr).collect();
        let mut buffers: Vec<Named> = self
            .variables()
            .into_iter()
            .filter(|(_, tensor)| !trainable.contains(&tensor.data_ptr()))
            .collect();
        buffers.sort_by(|(left, _), (right, _)| left.cmp(right));
        buffers
    }
}
