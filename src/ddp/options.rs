//! The wrapper's options, and how much a rank's gradients count.

use crate::card::Meter;
use crate::config::{CommHookPlan, DdpPlan};
use crate::torch::seat::Seat;
use crate::{Error, Result};
use std::sync::Arc;

/// PyTorch's options, with PyTorch's names and defaults.
#[derive(Debug, Clone)]
pub struct Options {
    /// Largest bucket, MiB.
    pub bucket_cap_mb: f64,
    /// Largest first bucket, MiB: small, so that communication starts early.
    pub first_bucket_mb: f64,
    /// All-reduce while backward runs; `false` waits for backward to end.
    pub overlap: bool,
    /// Gradients live in the bucket from the start, instead of being copied in.
    pub gradient_as_bucket_view: bool,
    /// Tolerate parameters that take no part in the loss.
    pub find_unused_parameters: bool,
    /// The graph is the same in every step, as the first backward finds it: later ones neither search it
    /// nor ask the other ranks. In a graph that does change, an error names the parameter.
    pub static_graph: bool,
    /// How buckets travel.
    pub comm_hook: CommHookPlan,
    /// Verify that all ranks hold the same model, and give all of them rank 0's values. Without it ranks
    /// that start from different weights train different models, and nothing tells.
    pub init_sync: bool,
    /// Rank 0's buffers replace those of all ranks after each backward, so before each next forward.
    pub broadcast_buffers: bool,
    /// Card that this rank works for: names the communication thread and its spans.
    pub card: usize,
    /// Counters that waiting is charged to.
    pub meter: Option<Arc<Meter>>,
    /// Where the calling thread computes: the card on which the module was built.
    pub seat: Seat,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bucket_cap_mb: 25.0,
            first_bucket_mb: 1.0,
            overlap: true,
            gradient_as_bucket_view: false,
            find_unused_parameters: false,
            static_graph: false,
            comm_hook: CommHookPlan::None,
            init_sync: true,
            broadcast_buffers: true,
            card: 0,
            meter: None,
            seat: Seat::default(),
        }
    }
}

impl From<&DdpPlan> for Options {
    fn from(plan: &DdpPlan) -> Self {
        Self {
            bucket_cap_mb: plan.bucket_cap_mb,
            first_bucket_mb: plan.first_bucket_mb,
            overlap: plan.overlap,
            gradient_as_bucket_view: plan.gradient_as_bucket_view,
            find_unused_parameters: plan.find_unused_parameters,
            static_graph: plan.static_graph,
            comm_hook: plan.comm_hook,
            init_sync: plan.init_sync,
            broadcast_buffers: plan.broadcast_buffers,
            ..Self::default()
        }
    }
}

impl Options {
    /// Bucket limits in bytes.
    pub(super) fn limits(&self) -> [usize; 2] {
        // A limit of zero would be PyTorch's "a bucket a tensor", which one byte is too.
        [self.first_bucket_mb, self.bucket_cap_mb].map(|mib| ((mib * f64::from(1 << 20)) as usize).max(1))
    }
}

/// How much this rank's gradients count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// As much as any other rank's, whatever it holds: PyTorch's rule. With mean losses over uneven
    /// batches this is not the gradient of the global mean.
    Equal,
    /// By samples: with mean losses the sum over ranks is the gradient of the mean over all samples.
    Samples {
        /// Samples behind this rank's loss.
        mine: usize,
        /// Samples of all ranks.
        global: usize,
    },
    /// Not at all: losses are weighted already, so that their sum over ranks is what is minimised.
    Weighted,
}

impl Share {
    /// What this rank's gradients are multiplied with before they are summed over ranks.
    pub(super) fn scale(self, world_size: usize) -> Result<f64> {
        match self {
            Self::Equal => Ok(1.0 / world_size as f64),
            Self::Weighted => Ok(1.0),
            Self::Samples { mine, global } if global > 0 && mine <= global => Ok(mine as f64 / global as f64),
            Self::Samples { mine, global } => {
                Err(Error::usage(format!("a share of {mine} of {global} samples makes no sense"))
                    .hint("`global` counts the samples of all ranks"))
            }
        }
    }
}
