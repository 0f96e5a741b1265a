//! Replicate: every card fetches the weights of card 0, in one copy for each element type.
//!
//! For that, parameters (and, apart from them, buffers) of every replica are moved into one flat tensor;
//! the model goes on using its own handles, which now look into it.
//!
//! Note [Buffers are snapshots]: a forward in training may write card 0's buffers (running statistics)
//! while other cards still copy them. So card 0 copies its buffers aside before any forward starts, and
//! the others copy from there. Parameters need no such copy: nothing writes them before all cards are done.

use super::scatter::fetch;
use crate::error::{Error, Kind, Result};
use crate::model::{Entry, State};
use crate::torch::no_grad;
use tch::Tensor;

/// Tensors start at multiples of this many elements, so that kernels find them aligned.
const ALIGNMENT: usize = 16;

/// One tensor of a model, as replicas must agree on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Spec {
    name: String,
    shape: Vec<i64>,
    kind: tch::Kind,
    trainable: bool,
    buffer: bool,
}

impl Spec {
    fn new(entry: &Entry) -> Self {
        let Entry { name, tensor, trainable, buffer } = entry;
        let (name, shape, kind) = (name.clone(), tensor.size(), tensor.kind());
        Self { name, shape, kind, trainable: *trainable, buffer: *buffer }
    }
}

/// What a model holds, in creation order.
pub(super) fn specs(state: &State) -> Vec<Spec> {
    state.entries().iter().map(Spec::new).collect()
}

/// Fails with the first difference between card 0's model and a replica's.
pub(super) fn check_same(first: &[Spec], replica: &[Spec]) -> Result<()> {
    let difference = match first.iter().zip(replica).find(|(first, replica)| first != replica) {
        Some((first, replica)) => format!("{replica:?} where card 0 has {first:?}"),
        None if first.len() == replica.len() => return Ok(()),
        None => format!("{} tensors where card 0 has {}", replica.len(), first.len()),
    };
    Err(Error::new(Kind::Usage, format!("its model differs from card 0's: {difference}"))
        .hint("the factory must build the same model for every card"))
}

/// The parameters and buffers of one model, each group in one tensor for each element type.
#[derive(Debug)]
pub(super) struct Flat {
    parameters: Vec<Tensor>,
    buffers: Vec<Tensor>,
}

impl Flat {
    /// Moves the model's tensors into flat ones. Values and handles stay as they are.
    pub(super) fn adopt(state: &State) -> Result<Self> {
        let (buffers, parameters): (Vec<&Entry>, Vec<_>) =
            state.entries().iter().partition(|entry| entry.buffer);
        no_grad(|| Ok(Self { parameters: flatten(&parameters)?, buffers: flatten(&buffers)? }))
    }

    /// All its tensors: parameters first.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.parameters.iter().chain(&self.buffers)
    }

    /// A copy of the buffers that replicas may read while card 0's forward writes the original.
    pub(super) fn snapshot(&self) -> Result<Vec<Tensor>> {
        self.buffers.iter().map(|buffer| fetch(buffer, buffer.device())).collect()
    }

    /// Its buffers.
    pub(super) fn buffers(&self) -> &[Tensor] {
        &self.buffers
    }

    /// What one replica copies from: handles of its own to card 0's parameters and to the snapshot.
    pub(super) fn source(&self, snapshot: &[Tensor]) -> Result<Self> {
        let handles =
            |tensors: &[Tensor]| tensors.iter().map(|tensor| Ok(tensor.f_detach()?)).collect::<Result<_>>();
        Ok(Self { parameters: handles(&self.parameters)?, buffers: handles(snapshot)? })
    }

    /// Takes over all values of `source`, which has the same layout.
    pub(super) fn copy_from(&mut self, source: &Self) -> Result<()> {
        copy_all(&mut self.parameters, &source.parameters)?;
        copy_all(&mut self.buffers, &source.buffers)
    }

    /// Brings a snapshot up to date.
    pub(super) fn update(&self, snapshot: &mut [Tensor]) -> Result<()> {
        copy_all(snapshot, &self.buffers)
    }
}

fn copy_all(to: &mut [Tensor], from: &[Tensor]) -> Result<()> {
    no_grad(|| to.iter_mut().zip(from).try_for_each(|(to, from)| Ok(to.f_copy_(from)?)))
}

/// One flat tensor for each element type among `entries`, which become views of them.
fn flatten(entries: &[&Entry]) -> Result<Vec<Tensor>> {
    let mut kinds: Vec<tch::Kind> = Vec::new();
    for entry in entries {
        if !kinds.contains(&entry.tensor.kind()) {
            kinds.push(entry.tensor.kind());
        }
    }
    kinds.into_iter().map(|kind| flatten_kind(entries, kind)).collect()
}

fn flatten_kind(entries: &[&Entry], kind: tch::Kind) -> Result<Tensor> {
    let entries: Vec<_> = entries.iter().filter(|entry| entry.tensor.kind() == kind).collect();
    let mut offsets = Vec::with_capacity(entries.len());
    let mut end = 0;
    for entry in &entries {
        offsets.push(end as i64);
        end += entry.tensor.numel().next_multiple_of(ALIGNMENT);
    }
    let device = entries.first().map_or(tch::Device::Cpu, |entry| entry.tensor.device());
    let flat = Tensor::f_zeros([end as i64], (kind, device))?;
    for (entry, offset) in entries.iter().zip(offsets) {
        let mut handle = entry.tensor.shallow_clone();
        let mut view = flat.f_narrow(0, offset, handle.numel() as i64)?.f_view(handle.size().as_slice())?;
        view.f_copy_(&handle)?;
        handle.f_set_data(&view)?;
    }
    Ok(flat)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn state(fill: f64) -> State {
        let mut state = State::default();
        let tensor = |shape: &[i64], kind| Tensor::full(shape, fill, (kind, Device::Cpu));
        let _ = state.parameter("weight", tensor(&[3, 5], tch::Kind::Float));
        let _ = state.buffer("mean", tensor(&[5], tch::Kind::Float));
        let _ = state.parameter("scale", tensor(&[], tch::Kind::Double));
        let _ = state.buffer("count", tensor(&[], tch::Kind::Int64));
        let _ = state.parameter("bias", tensor(&[7], tch::Kind::Float));
        state
    }

    fn sums(state: &State) -> Vec<f64> {
        state.entries().iter().map(|entry| entry.tensor.sum(tch::Kind::Double).double_value(&[])).collect()
    }

    #[test]
    fn handles_keep_their_values_and_look_into_flat_tensors() {
        let state = state(2.0);
        let handle = state.entries()[0].tensor.shallow_clone();
        let flat = Flat::adopt(&state).unwrap();
        assert_eq!(sums(&state), [30.0, 10.0, 2.0, 2.0, 14.0]);
        // Two floats, padded to 16 each; one double; one float buffer; one integer buffer.
        let sizes = |tensors: &[Tensor]| tensors.iter().map(|tensor| tensor.numel()).collect::<Vec<_>>();
        assert_eq!((sizes(&flat.parameters), sizes(&flat.buffers)), (vec![32, 16], vec![16, 16]));
        let _ = flat.parameters[0].shallow_clone().fill_(1.0);
        assert_eq!(handle.sum(tch::Kind::Double).double_value(&[]), 15.0);
        assert!(handle.requires_grad() && handle.is_leaf());
    }

    #[test]
    fn one_copy_brings_everything_but_later_writes_to_buffers() {
        let (first, other) = (state(2.0), state(0.0));
        let flat = Flat::adopt(&first).unwrap();
        let mut replica = Flat::adopt(&other).unwrap();
        let mut snapshot = flat.snapshot().unwrap();
        let source = flat.source(&snapshot).unwrap();
        let _ = first.entries()[1].tensor.shallow_clone().fill_(9.0);
        replica.copy_from(&source).unwrap();
        assert_eq!(sums(&other), [30.0, 10.0, 2.0, 2.0, 14.0]);
        flat.update(&mut snapshot).unwrap();
        replica.copy_from(&source).unwrap();
        assert_eq!(sums(&other), [30.0, 45.0, 2.0, 2.0, 14.0]);
    }

    #[test]
    fn a_model_without_state_has_nothing_to_copy() {
        let flat = Flat::adopt(&State::default()).unwrap();
        assert!(flat.parameters.is_empty() && flat.snapshot().unwrap().is_empty());
    }

    #[test]
    fn the_first_difference_between_models_is_named() {
        let (first, mut other) = (specs(&state(0.0)), specs(&state(1.0)));
        check_same(&first, &other).unwrap();
        let short = check_same(&first, &other[..4]).unwrap_err();
        assert!(short.to_string().contains("4 tensors where card 0 has 5"), "{short}");
        other[4].shape = vec![8];
        let error = check_same(&first, &other).unwrap_err().to_string();
        assert!(error.contains("bias") && error.contains("[8]") && error.contains("[7]"), "{error}");
    }
}
