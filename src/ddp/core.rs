//! What gradient hooks work on: every parameter's place in a bucket, and the reducer that counts them in.
//!
//! Launches buckets when the reducer says so; never waits.

use super::agree;
use super::bucket::Item;
use super::communicator::Communicator;
use super::options::Share;
use super::reducer::{MarkedTwice, Reducer};
use crate::metrics::phase::Phase;
use crate::torch::grad;
use crate::torch::no_grad;
use crate::{Error, Result};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::Tensor;

/// One trained parameter.
pub(super) struct Slot {
    pub(super) name: String,
    pub(super) parameter: Tensor,
    /// Its part of a bucket, in its shape.
    pub(super) view: Tensor,
    /// Whether it had no gradient before this backward.
    pub(super) was_undefined: bool,
}

impl Slot {
    pub(super) fn item(&self) -> Item {
        Item {
            bytes: self.parameter.numel() * self.parameter.kind().elt_size_in_bytes(),
            kind: self.parameter.kind(),
            device: self.parameter.device(),
        }
    }

    /// Whether this gradient already lies in the bucket.
    pub(super) fn is_in_bucket(&self, gradient: &Tensor) -> bool {
        // A sparse gradient has no address to ask for.
        !gradient.is_sparse() && gradient.numel() > 0 && gradient.data_ptr() == self.view.data_ptr()
    }

    /// Puts the scaled gradient into the bucket, zeros where there is none. Whatever strides the gradient
    /// has, the bucket holds the values in the parameter's order.
    pub(super) fn fill(&mut self, scale: f64) -> Result<()> {
        let Some(gradient) = grad::grad(&self.parameter) else {
            let _ = self.view.f_zero_()?;
            return Ok(());
        };
        if gradient.is_sparse() {
            return Err(Error::usage(format!(
                "`{}` has a sparse gradient, which cannot be all-reduced",
                self.name
            ))
            .hint("make the embedding with `sparse: false`"));
        }
        if scale == 1.0 && !self.is_in_bucket(&gradient) {
            no_grad(|| self.view.f_copy_(&gradient))?;
            return Ok(());
        }
        // Scaled while copied, in one pass; in place where the gradient lies in the bucket already. The
        // factor is a tensor because the form with a number goes through a temporary of the gradient's size.
        let _ = no_grad(|| gradient.f_mul_out(&self.view, &Tensor::from(scale)))?;
        Ok(())
    }
}

/// Elements and type of every bucket.
pub(super) fn sizes(plan: &[Vec<usize>], slots: &[Slot]) -> Vec<(usize, tch::Kind)> {
    plan.iter()
        .map(|bucket| {
            let members: Vec<&Tensor> = bucket.iter().map(|&member| &slots[member].parameter).collect();
            (agree::elements(&members), members[0].kind())
        })
        .collect()
}

/// The shapes of the parameters of every bucket.
pub(super) fn shapes(plan: &[Vec<usize>], slots: &[Slot]) -> Vec<Vec<Vec<i64>>> {
    let of = |bucket: &Vec<usize>| bucket.iter().map(|&member| slots[member].parameter.size()).collect();
    plan.iter().map(of).collect()
}

/// Gives every parameter its view of its bucket's memory.
pub(super) fn place<'a>(
    plan: &[Vec<usize>],
    slots: &mut [Slot],
    flats: impl Iterator<Item = &'a Tensor>,
) -> Result<()> {
    for (bucket, flat) in plan.iter().zip(flats) {
        let views = agree::views(flat, bucket.iter().map(|&member| slots[member].parameter.size()))?;
        for (&member, view) in bucket.iter().zip(views) {
            slots[member].view = view;
        }
    }
    Ok(())
}

/// What gradients that become ready are for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Mode {
    /// No backward of ours runs.
    Idle,
    /// They are left alone: a later backward reduces what has come together (PyTorch's `no_sync`).
    Accumulate,
    /// They are scaled and reduced.
    Reduce {
        /// What this rank's gradients are multiplied with.
        scale: f64,
    },
}

/// What is known of the graph before a backward runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Graph {
    /// Nothing: it may be another in every step.
    Dynamic,
    /// It stays as the first backward finds it: gradients wait for that one's end.
    Learning,
    /// How often each parameter's gradient becomes ready.
    Static(Vec<u32>),
}

/// What hooks work on. On CPU they run on the thread that called backward, so the lock is never waited for.
pub(super) struct Core {
    pub(super) rank: usize,
    pub(super) step: u64,
    pub(super) mode: Mode,
    pub(super) overlap: bool,
    pub(super) reducer: Reducer,
    pub(super) slots: Vec<Slot>,
    /// Complete buckets that wait for the end of backward, without overlap.
    pub(super) held: Range<usize>,
    pub(super) communicator: Arc<Communicator>,
    pub(super) graph: Graph,
    /// How often each gradient became ready in this backward.
    hits: Vec<u32>,
    /// Parameters in the order in which their gradients first did.
    order: Vec<usize>,
    /// Parameters that took part since gradients were last reduced.
    used: Vec<bool>,
    /// Whether gradients that are there already were left by a backward without reduction.
    accumulated: bool,
}

impl Core {
    pub(super) fn new(
        rank: usize,
        overlap: bool,
        graph: Graph,
        plan: &[Vec<usize>],
        slots: Vec<Slot>,
        communicator: Arc<Communicator>,
    ) -> Self {
        Self {
            rank,
            step: 0,
            mode: Mode::Idle,
            overlap,
            reducer: Reducer::new(plan, slots.len()),
            held: 0..0,
            communicator,
            graph,
            hits: vec![0; slots.len()],
            order: Vec::new(),
            used: vec![false; slots.len()],
            accumulated: false,
            slots,
        }
    }

    /// Gradients of the next backward stay with this rank.
    pub(super) fn prepare_without_reduction(&mut self) {
        self.accumulated = true;
        self.mode = Mode::Accumulate;
    }

    pub(super) fn prepare(
        &mut self,
        scale: f64,
        share: Share,
        step: u64,
        as_bucket_view: bool,
    ) -> Result<()> {
        self.step = step;
        self.held = 0..0;
        self.reducer.prepare();
        self.hits.fill(0);
        self.order.clear();
        if !self.accumulated {
            self.used.fill(false);
        }
        let by_samples = share != Share::Equal;
        for slot in &mut self.slots {
            let gradient = grad::grad(&slot.parameter);
            slot.was_undefined = gradient.is_none();
            match gradient {
                Some(_) if by_samples && !self.accumulated => {
                    return Err(Error::usage(format!(
                        "rank {}: `{}` already has a gradient, which weighting by samples would scale again",
                        self.rank, slot.name
                    ))
                    .hint("call zero_grad before backward"));
                }
                None if as_bucket_view => {
                    let _ = slot.view.f_zero_()?;
                    grad::set_grad(&slot.parameter, Some(&slot.view))?;
                }
                Some(gradient) if as_bucket_view && !slot.is_in_bucket(&gradient) => {
                    slot.view.f_copy_(&gradient)?;
                    grad::set_grad(&slot.parameter, Some(&slot.view))?;
                }
                _ => {}
            }
        }
        self.mode = Mode::Reduce { scale };
        Ok(())
    }

    /// A hook fired.
    pub(super) fn gradient_ready(&mut self, index: usize) -> Result<()> {
        self.used[index] = true;
        let Mode::Reduce { scale } = self.mode else {
            if self.mode == Mode::Accumulate {
                return Ok(());
            }
            let what = format!(
                "rank {}: backward reached `{}` outside DistributedDataParallel::backward, so nothing would be averaged",
                self.rank, self.slots[index].name
            );
            return Err(Error::usage(what).hint("call `ddp.backward(&loss)` in place of `loss.backward()`"));
        };
        self.hits[index] += 1;
        match &self.graph {
            Graph::Dynamic => {}
            Graph::Learning => {
                if self.hits[index] == 1 {
                    self.order.push(index);
                }
                return Ok(());
            }
            Graph::Static(expected) if self.hits[index] > expected[index] => {
                let how = if expected[index] == 0 {
                    "took part, which it did not"
                } else {
                    "took part more often than"
                };
                return Err(self.changed(&[index], how));
            }
            Graph::Static(expected) if self.hits[index] < expected[index] => return Ok(()),
            Graph::Static(_) => {}
        }
        let slot = &mut self.slots[index];
        slot.fill(scale).map_err(|error| error.context(format_args!("rank {}", self.rank)))?;
        // At once, not after the reduction: it frees the gradient that backward made.
        grad::set_grad(&slot.parameter, Some(&slot.view))?;
        self.count_in(index)
    }

    fn count_in(&mut self, index: usize) -> Result<()> {
        let complete = self.reducer.mark_ready(index).map_err(|MarkedTwice(index)| {
            Error::usage(format!(
                "rank {}: the gradient of `{}` became ready twice in step {}",
                self.rank, self.slots[index].name, self.step
            ))
            .hint(
                "use every parameter in one backward only: no second backward inside a hook or a checkpoint",
            )
        })?;
        if self.overlap {
            self.launch(complete)
        } else {
            self.held.end = complete.end;
            Ok(())
        }
    }

    /// Takes these for ready as they are: parameters that this backward does not reach.
    pub(super) fn take_as_ready(&mut self, parameters: &[usize]) -> Result<()> {
        let Mode::Reduce { scale } = self.mode else { return Ok(()) };
        parameters.iter().try_for_each(|&index| {
            self.slots[index].fill(scale)?;
            self.count_in(index)
        })
    }

    /// Takes what is not ready at the end of backward for ready, then launches what was held back.
    pub(super) fn complete(&mut self, unready: &[usize]) -> Result<()> {
        self.take_as_ready(unready)?;
        let held = std::mem::replace(&mut self.held, 0..0);
        self.launch(held)
    }

    fn launch(&self, buckets: Range<usize>) -> Result<()> {
        let step = self.step;
        buckets.into_iter().try_for_each(|bucket| {
            self.communicator.post(move |desk| desk.timed(Phase::AllReduce, step, |desk| desk.reduce(bucket)))
        })
    }

    /// Parameters without which a backward of the graph that was learnt runs.
    pub(super) fn never_used(&self) -> Vec<usize> {
        match &self.graph {
            Graph::Static(expected) => (0..expected.len()).filter(|&index| expected[index] == 0).collect(),
            Graph::Dynamic | Graph::Learning => Vec::new(),
        }
    }

    /// All parameters, those first whose gradients came, in the order in which they did; from now on the
    /// graph is known.
    pub(super) fn learn(&mut self) -> Vec<usize> {
        self.graph = Graph::Static(self.hits.clone());
        let rest = (0..self.hits.len()).filter(|&index| self.hits[index] == 0);
        self.order.iter().copied().chain(rest).collect()
    }

    /// The gradients that were left are part of a reduction now.
    pub(super) fn end(&mut self) {
        self.mode = Mode::Idle;
        self.accumulated = false;
    }

    /// Asks all ranks which parameters they used; the answer is there after the wait.
    pub(super) fn agree_on_used(&self) -> Result<Arc<Mutex<Vec<bool>>>> {
        let mine: Vec<u8> = self.used.iter().map(|used| u8::from(*used)).collect();
        let used = Arc::new(Mutex::new(Vec::new()));
        let answer = Arc::clone(&used);
        self.communicator.post(move |desk| {
            let all = desk.collective.exchange(&mine)?;
            *lock(&answer) =
                (0..mine.len()).map(|index| all.iter().any(|rank| rank.get(index) == Some(&1))).collect();
            Ok(())
        })?;
        Ok(used)
    }

    fn names(&self, parameters: &[usize]) -> String {
        let names: Vec<String> =
            parameters.iter().map(|&index| format!("`{}`", self.slots[index].name)).collect();
        names.join(", ")
    }

    /// The graph is not the one that the first backward found.
    pub(super) fn changed(&self, parameters: &[usize], how: &str) -> Error {
        Error::usage(format!(
            "rank {}: static_graph is on, but in step {} {} {how} in step 0",
            self.rank,
            self.step,
            self.names(parameters)
        ))
        .hint("leave `ddp.static_graph` off for a model whose graph changes; `ddp.find_unused_parameters` suits it")
    }

    pub(super) fn unused(&self, unready: &[usize]) -> Error {
        let what = format!(
            "rank {}: {} of {} parameters took no part in the loss of step {}: {}; find_unused_parameters is off",
            self.rank,
            unready.len(),
            self.slots.len(),
            self.step,
            self.names(unready)
        );
        Error::usage(what).hint(
            "use the output of every parameter in the loss, freeze them, or set `ddp.find_unused_parameters`",
        )
    }

    /// Copies weights to where their gradients travel.
    pub(super) fn stage_parameters(&mut self) -> Result<()> {
        no_grad(|| self.slots.iter_mut().try_for_each(|slot| Ok(slot.view.f_copy_(&slot.parameter)?)))
    }

    /// Copies weights back from there, in place.
    pub(super) fn unstage_parameters(&mut self) -> Result<()> {
        no_grad(|| self.slots.iter_mut().try_for_each(|slot| Ok(slot.parameter.f_copy_(&slot.view)?)))
    }

    /// Copies gradients that lie in buckets out of them, before the buckets go.
    pub(super) fn detach_gradients(&mut self) -> Result<()> {
        for slot in &self.slots {
            if let Some(gradient) = grad::grad(&slot.parameter).filter(|gradient| slot.is_in_bucket(gradient))
            {
                grad::set_grad(&slot.parameter, Some(&gradient.f_detach_copy()?))?;
            }
        }
        Ok(())
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in a hook is an error of that backward; what the core holds is reset by the next.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
