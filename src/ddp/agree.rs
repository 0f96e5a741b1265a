//! What ranks make sure of before they train: that they hold the same model, and the same weights.

use super::bucket::{Item, assign};
use super::communicator::Communicator;
use super::{Module, Options};
use crate::comm::{Buffer, Collective};
use crate::error::Kind;
use crate::torch::no_grad;
use crate::{Error, Result};
use sha2::{Digest, Sha256};
use tch::{Device, Tensor};

/// Most bytes that are copied to the other ranks at a time.
const PIECE: usize = 25 << 20;

/// A tensor with its name.
pub(super) type Named = (String, Tensor);

/// One line a tensor, and the options that decide which collectives are called.
fn description<M: Module>(module: &M, options: &Options) -> Vec<String> {
    let tensor = |sort: &str, (name, tensor): &Named| {
        let frozen = if sort == "parameter" && !tensor.requires_grad() { " frozen" } else { "" };
        format!("{sort} `{name}` {:?} {:?}{frozen}", tensor.size(), tensor.kind())
    };
    let parameters = module.named_parameters();
    let buffers = module.named_buffers();
    let mut lines: Vec<String> = parameters.iter().map(|entry| tensor("parameter", entry)).collect();
    lines.extend(buffers.iter().map(|entry| tensor("buffer", entry)));
    lines.push(format!("option bucket_cap_mb = {}", options.bucket_cap_mb));
    lines.push(format!("option first_bucket_mb = {}", options.first_bucket_mb));
    lines.push(format!("option find_unused_parameters = {}", options.find_unused_parameters));
    lines.push(format!("option static_graph = {}", options.static_graph));
    lines.push(format!("option comm_hook = {:?}", options.comm_hook));
    lines.push(format!("option broadcast_buffers = {}", options.broadcast_buffers));
    lines
}

/// An error on every rank, naming the first difference, unless all ranks hold the same names, shapes
/// and types in the same order, and the same options.
pub(super) fn same_model<M: Module>(
    collective: &mut dyn Collective,
    module: &M,
    options: &Options,
) -> Result<()> {
    let text = description(module, options).join("\n");
    let digests = collective.exchange(&Sha256::digest(&text))?;
    // All ranks see the same digests, so all take the same way here.
    if digests.iter().all(|digest| *digest == digests[0]) {
        return Ok(());
    }
    let texts = collective.exchange(text.as_bytes())?;
    let all: Vec<Vec<String>> =
        texts.iter().map(|text| String::from_utf8_lossy(text).lines().map(str::to_owned).collect()).collect();
    let what = first_difference(&all).unwrap_or_else(|| "their descriptions differ".to_owned());
    Err(Error::new(Kind::Worker, format!("rank {}: ranks built different models: {what}", collective.rank()))
        .hint("build the model from the same code, config and options on every rank"))
}

/// The first line in which a rank differs from rank 0. Pure.
fn first_difference(all: &[Vec<String>]) -> Option<String> {
    let longest = all.iter().map(Vec::len).max()?;
    (0..longest).find_map(|line| {
        let of = |rank: usize| all[rank].get(line).map_or("nothing", String::as_str);
        let other = (1..all.len()).find(|&rank| of(rank) != of(0))?;
        Some(format!("entry {line} is {} on rank 0 and {} on rank {other}", of(0), of(other)))
    })
}

/// What the plan needs to know of tensors; refuses those that do not lie where the collective works.
pub(super) fn items<'a>(entries: impl IntoIterator<Item = &'a Named>, on: Device) -> Result<Vec<Item>> {
    entries
        .into_iter()
        .map(|(name, tensor)| match tensor.device() {
            device if device == on => Ok(Item {
                bytes: tensor.numel() * tensor.kind().elt_size_in_bytes(),
                kind: tensor.kind(),
                device,
            }),
            device => {
                Err(Error::usage(format!("`{name}` lies on {device:?}, this collective works on {on:?}"))
                    .hint(format!("build the model on {on:?}, or use another collective")))
            }
        })
        .collect()
}

/// A flat tensor cut into the shapes of others, in order. Each piece is a tensor of its own, and none is a
/// view to autograd: tch's `Tensor::zero_grad` detaches gradients in place, which views refuse.
pub(super) fn views(flat: &Tensor, shapes: impl IntoIterator<Item = Vec<i64>>) -> Result<Vec<Tensor>> {
    let mut offset = 0;
    shapes
        .into_iter()
        .map(|shape| {
            let len = shape.iter().product();
            let view = flat.f_narrow(0, offset, len)?.f_view(shape.as_slice())?.f_detach()?;
            offset += len;
            Ok(view)
        })
        .collect()
}

/// Elements of these tensors together.
pub(super) fn elements(tensors: &[&Tensor]) -> usize {
    tensors.iter().map(|tensor| tensor.numel()).sum()
}

/// Rank 0's values of all parameters, frozen ones too, and all buffers, to every rank.
pub(super) fn same_values<M: Module>(communicator: &Communicator, rank: usize, module: &M) -> Result<()> {
    let device = communicator.call(|desk| Ok(desk.collective.device()))?;
    let mut entries = module.named_parameters();
    entries.extend(module.named_buffers());
    let order: Vec<usize> = (0..entries.len()).collect();
    for group in assign(&items(&entries, device)?, &order, &[PIECE]) {
        let members: Vec<&Tensor> = group.iter().map(|&entry| &entries[entry].1).collect();
        let (len, kind) = (elements(&members), members[0].kind());
        let (buffer, flat) = communicator.call(move |desk| {
            let buffer = desk.collective.allocate(len, kind)?;
            // Note [One thread a tensor]: a view, not a second handle.
            let flat = buffer.tensor.f_narrow(0, 0, len as i64)?;
            Ok((buffer, flat))
        })?;
        let mut staged = views(&flat, members.iter().map(|tensor| tensor.size()))?;
        if rank == 0 {
            gather(&mut staged, &members)?;
        }
        // Given back, because its memory goes with it.
        let _memory = communicator.call(move |desk| {
            desk.collective.broadcast(&buffer, 0)?;
            Ok(buffer)
        })?;
        if rank != 0 {
            spread(&staged, &members)?;
        }
    }
    Ok(())
}

/// Copies values into their staging views.
pub(super) fn gather(staged: &mut [Tensor], members: &[&Tensor]) -> Result<()> {
    no_grad(|| staged.iter_mut().zip(members).try_for_each(|(view, tensor)| Ok(view.f_copy_(tensor)?)))
}

/// Copies staged values back, in place and outside any graph.
pub(super) fn spread(staged: &[Tensor], members: &[&Tensor]) -> Result<()> {
    no_grad(|| {
        staged.iter().zip(members).try_for_each(|(view, tensor)| Ok(tensor.shallow_clone().f_copy_(view)?))
    })
}

/// The module's buffers on their way from rank 0 to all, after each backward.
pub(super) struct BufferSync {
    /// Position, name, shape and type at construction, by group: one group a type.
    groups: Vec<Vec<usize>>,
    described: Vec<(String, Vec<i64>, tch::Kind)>,
    staged: Vec<Vec<Tensor>>,
}

impl BufferSync {
    /// Staging memory for these buffers; `None` where there are none.
    pub(super) fn new(
        collective: &mut dyn Collective,
        buffers: &[Named],
    ) -> Result<Option<(Self, Vec<Buffer>)>> {
        let order: Vec<usize> = (0..buffers.len()).collect();
        let groups = assign(&items(buffers, collective.device())?, &order, &[]);
        let mut memory = Vec::new();
        let mut staged = Vec::new();
        for group in &groups {
            let members: Vec<&Tensor> = group.iter().map(|&buffer| &buffers[buffer].1).collect();
            let buffer = collective.allocate(elements(&members), members[0].kind())?;
            staged.push(views(&buffer.tensor, members.iter().map(|tensor| tensor.size()))?);
            memory.push(buffer);
        }
        let described =
            buffers.iter().map(|(name, tensor)| (name.clone(), tensor.size(), tensor.kind())).collect();
        Ok((!groups.is_empty()).then_some((Self { groups, described, staged }, memory)))
    }

    /// Fills the staging memory; rank 0 does.
    pub(super) fn fill(&mut self, buffers: &[Named]) -> Result<()> {
        self.check(buffers)?;
        for (group, staged) in self.groups.iter().zip(&mut self.staged) {
            gather(staged, &members(group, buffers))?;
        }
        Ok(())
    }

    /// Writes what arrived into the buffers; all but rank 0 do.
    pub(super) fn apply(&self, buffers: &[Named]) -> Result<()> {
        self.check(buffers)?;
        for (group, staged) in self.groups.iter().zip(&self.staged) {
            spread(staged, &members(group, buffers))?;
        }
        Ok(())
    }

    /// A module may put new tensors in place of its buffers, but not other ones.
    fn check(&self, buffers: &[Named]) -> Result<()> {
        let now = buffers.iter().map(|(name, tensor)| (name.clone(), tensor.size(), tensor.kind()));
        if now.eq(self.described.iter().cloned()) {
            return Ok(());
        }
        Err(Error::usage("the names, shapes or types of the module's buffers changed since it was wrapped")
            .hint("wrap the module again after such a change, on all ranks"))
    }
}

fn members<'a>(group: &[usize], buffers: &'a [Named]) -> Vec<&'a Tensor> {
    group.iter().map(|&buffer| &buffers[buffer].1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &[&str]) -> Vec<String> {
        text.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn the_first_difference_is_told_with_both_sides() {
        let rank_0 = lines(&["a [64]", "b [10]"]);
        assert_eq!(first_difference(&[rank_0.clone(), rank_0.clone()]), None);
        assert_eq!(
            first_difference(&[rank_0.clone(), rank_0.clone(), lines(&["a [65]", "b [10]"])]).unwrap(),
            "entry 0 is a [64] on rank 0 and a [65] on rank 2"
        );
        assert_eq!(
            first_difference(&[rank_0, lines(&["a [64]", "b [10]", "c [1]"])]).unwrap(),
            "entry 2 is nothing on rank 0 and c [1] on rank 1"
        );
    }

    #[test]
    fn views_cut_a_flat_tensor_without_copying() {
        let flat = Tensor::arange(10, (tch::Kind::Float, Device::Cpu));
        let mut cut = views(&flat, [vec![2, 3], vec![], vec![3]]).unwrap();
        assert_eq!(cut[0].size(), [2, 3]);
        assert_eq!(cut[1].double_value(&[]), 6.0);
        let _ = cut[2].f_fill_(0.0).unwrap();
        assert_eq!(flat.double_value(&[8]), 0.0);
    }
}
