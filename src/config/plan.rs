//! The resolved plan: every value decided, nothing optional that a run needs.
//!
//! Written whole into `plan.json` and `results.json`, and handed to every worker.

use serde::{Deserialize, Serialize};

/// A way to run one training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    /// One card, the whole global batch.
    Single,
    /// One card at the per-card batch: what weak scaling is measured against.
    SinglePerCard,
    /// DataParallel: one process, all cards.
    Dp,
    /// DistributedDataParallel: one process a card.
    Ddp,
    /// PyTorch itself on one card: the peer of `single`.
    TorchSingle,
    /// PyTorch's `nn.DataParallel`, which needs CUDA cards.
    TorchDp,
    /// PyTorch's `DistributedDataParallel`.
    TorchDdp,
}

impl EngineKind {
    /// The name used on the command line, in files and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::SinglePerCard => "single_per_card",
            Self::Dp => "dp",
            Self::Ddp => "ddp",
            Self::TorchSingle => "torch_single",
            Self::TorchDp => "torch_dp",
            Self::TorchDdp => "torch_ddp",
        }
    }

    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Single,
        Self::SinglePerCard,
        Self::Dp,
        Self::Ddp,
        Self::TorchSingle,
        Self::TorchDp,
        Self::TorchDdp,
    ];

    /// The one with this name; `None` for a row that tries options.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// How it is spread over cards.
    pub fn layout(self) -> Layout {
        match self {
            Self::Single | Self::SinglePerCard | Self::TorchSingle => Layout::OneCard,
            Self::Dp | Self::TorchDp => Layout::OneProcess,
            Self::Ddp | Self::TorchDdp => Layout::ProcessPerCard,
        }
    }

    /// Whether PyTorch runs it, in Python.
    pub fn is_peer(self) -> bool {
        matches!(self, Self::TorchSingle | Self::TorchDp | Self::TorchDdp)
    }

    /// PyTorch's engine of the same kind; `None` for peers and for `single_per_card`.
    pub fn peer(self) -> Option<Self> {
        match self {
            Self::Single => Some(Self::TorchSingle),
            Self::Dp => Some(Self::TorchDp),
            Self::Ddp => Some(Self::TorchDdp),
            Self::SinglePerCard | Self::TorchSingle | Self::TorchDp | Self::TorchDdp => None,
        }
    }
}

/// How an engine is spread over cards and processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// One process, the first card.
    OneCard,
    /// One process, all cards.
    OneProcess,
    /// A process for each card.
    ProcessPerCard,
}

impl Layout {
    /// Cards it uses of as many as there are.
    pub fn cards(self, cards: usize) -> usize {
        match self {
            Self::OneCard => cards.min(1),
            Self::OneProcess | Self::ProcessPerCard => cards,
        }
    }

    /// Processes it is made of.
    pub fn processes(self, cards: usize) -> usize {
        match self {
            Self::OneCard | Self::OneProcess => 1,
            Self::ProcessPerCard => cards,
        }
    }
}

impl std::fmt::Display for EngineKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// What kind of card the run wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceChoice {
    /// CUDA where there is a usable card, else virtual cards.
    Auto,
    /// Virtual cards: sets of CPU cores.
    Cpu,
    /// CUDA cards or nothing.
    Cuda,
}

/// Everything about a run that a file or flag can say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// How it is run.
    pub run: RunPlan,
    /// What is trained.
    pub model: ModelPlan,
    /// On what.
    pub data: DataPlan,
    /// How many samples a step sees.
    pub batch: BatchPlan,
    /// How weights are updated.
    pub optimizer: OptimizerPlan,
    /// Largest norm of all gradients together; larger ones are scaled down. `None` leaves them.
    #[serde(default)]
    pub clip_norm: Option<f64>,
    /// DataParallel's options.
    pub dp: DpPlan,
    /// DistributedDataParallel's options.
    pub ddp: DdpPlan,
    /// The sampler's options.
    pub sample: SamplePlan,
    /// A deliberate slowdown, for testing gates.
    pub inject: Option<InjectPlan>,
}

/// How the run is carried out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunPlan {
    /// What kind of card.
    pub device: DeviceChoice,
    /// CUDA cards asked for, by number or UUID, in order; `None` takes the first ones there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<String>>,
    /// Number of cards; `None` in a file means all there are, and is decided before a plan is made.
    pub cards: usize,
    /// Engines, in the order in which a round runs them.
    pub engines: Vec<EngineKind>,
    /// Fresh-process repetitions of every engine.
    pub rounds: usize,
    /// Steps before measuring, each round.
    pub warmup: usize,
    /// Measured steps, each round.
    pub steps: usize,
    /// Seeds weights, shuffling and bootstrap.
    pub seed: u64,
    /// Intra-op threads of one virtual card.
    pub threads_per_card: usize,
    /// Number format of activations.
    pub precision: Precision,
    /// Whether fp32 products on CUDA cards may be rounded to TF32.
    #[serde(default)]
    pub tf32: bool,
    /// Seconds any single wait between ranks may take before the run is stopped.
    pub deadline_s: f64,
    /// Options tried beside what the rest of the plan says, each as rows of its own.
    #[serde(default)]
    pub ab: Vec<AbPlan>,
}

/// Some options that are tried out: their engines are measured with them too, in the same rounds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbPlan {
    /// `key=value`, as `--set` takes them, with blanks between.
    pub set: String,
    /// Engines that the options mean something to.
    pub engines: Vec<EngineKind>,
}

impl AbPlan {
    /// The name of its row beside that of `engine`: `ddp[comm_hook=bf16]`.
    pub fn row(&self, engine: EngineKind) -> String {
        let short =
            |pair: &str| ["ddp.", "dp."].iter().find_map(|s| pair.strip_prefix(s)).unwrap_or(pair).to_owned();
        let pairs: Vec<String> = self.set.split_whitespace().map(short).collect();
        format!("{engine}[{}]", pairs.join(" "))
    }
}

/// Number format of activations; weights, gradients and the optimiser stay in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 32-bit floats throughout.
    Fp32,
    /// bfloat16 where PyTorch's autocast says so.
    Bf16,
    /// float16 where PyTorch's autocast says so, with a scaled loss.
    Fp16,
}

/// Which model, with its own dimensions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum ModelPlan {
    /// Linear, ReLU, Linear, ReLU, Linear.
    Mlp {
        /// Features in.
        input: i64,
        /// Width of the two hidden layers.
        hidden: i64,
        /// Classes out.
        classes: i64,
    },
    /// Three convolutions, global average pool, one linear layer.
    Convnet {
        /// Image channels in.
        channels: i64,
        /// Classes out.
        classes: i64,
        /// BatchNorm after each convolution.
        batch_norm: bool,
    },
    /// ResNet-18 with a 3x3 stride-1 stem and no max-pool, as used for 32x32 images.
    Resnet18 {
        /// Image channels in.
        channels: i64,
        /// Classes out.
        classes: i64,
    },
    /// A GPT-2 style decoder with a tied head.
    Gpt {
        /// Embedding width.
        width: i64,
        /// Attention heads.
        heads: i64,
        /// Blocks.
        layers: i64,
        /// Tokens a sample holds.
        context: i64,
        /// Distinct tokens.
        vocabulary: i64,
    },
}

impl ModelPlan {
    /// The name a config gives it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mlp { .. } => "mlp",
            Self::Convnet { .. } => "convnet",
            Self::Resnet18 { .. } => "resnet18",
            Self::Gpt { .. } => "gpt",
        }
    }

    /// Whether batch statistics make the result depend on how a batch is split.
    pub fn has_batch_norm(&self) -> bool {
        matches!(self, Self::Convnet { batch_norm: true, .. } | Self::Resnet18 { .. })
    }

    /// Trainable numbers, tied ones counted once.
    pub fn parameters(&self) -> u128 {
        let n = |size: i64| u128::from(size.unsigned_abs());
        match *self {
            Self::Mlp { input, hidden, classes } => {
                let linear = |from: i64, to: i64| (n(from) + 1) * n(to);
                linear(input, hidden) + linear(hidden, hidden) + linear(hidden, classes)
            }
            Self::Convnet { channels, classes, batch_norm } => {
                let convolution = |from: u128, to: u128| (from * 9 + 1) * to;
                let norms = if batch_norm { 2 * (32 + 64 + 128) } else { 0 };
                convolution(n(channels), 32)
                    + convolution(32, 64)
                    + convolution(64, 128)
                    + norms
                    + 129 * n(classes)
            }
            // All but the first convolution and the head is the same whatever the data.
            Self::Resnet18 { channels, classes } => 11_167_104 + 64 * 9 * n(channels) + 513 * n(classes),
            Self::Gpt { width, layers, context, vocabulary, .. } => {
                let width = n(width);
                // Per block: two LayerNorms, c_attn, attn.c_proj, c_fc, mlp.c_proj, each with its bias.
                n(layers) * (12 * width * width + 13 * width) + (n(vocabulary) + n(context) + 2) * width
            }
        }
    }
}

/// Which data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataPlan {
    /// Where samples come from.
    pub source: DataSource,
    /// New order every epoch.
    pub shuffle: bool,
    /// Leave out the tail that does not fill every rank, instead of repeating samples.
    pub drop_last: bool,
    /// Threads that prepare batches ahead; 0 prepares them in line.
    pub workers: usize,
}

/// Where samples come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum DataSource {
    /// UCI handwritten digits, 8x8, 1,797 images (every tenth is for testing).
    Digits,
    /// 9,000 + 1,000 MNIST images, 28x28.
    Mnist10k,
    /// Gaussian noise images with random labels: speed without a data set's limits.
    Synthetic {
        /// Shape of one sample.
        shape: Vec<i64>,
        /// Label range.
        classes: i64,
        /// Samples in an epoch.
        samples: usize,
    },
    /// Token sequences from a fixed random Markov chain: something a decoder can learn.
    Tokens {
        /// Tokens a sample holds.
        context: i64,
        /// Distinct tokens.
        vocabulary: i64,
        /// Sequences in an epoch.
        samples: usize,
    },
}

impl DataSource {
    /// The name a config gives it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Digits => "digits",
            Self::Mnist10k => "mnist10k",
            Self::Synthetic { .. } => "synthetic",
            Self::Tokens { .. } => "tokens",
        }
    }

    /// Shape of one sample: `[channels, height, width]` of an image, `[context]` of tokens.
    pub fn sample_shape(&self) -> Vec<i64> {
        match self {
            Self::Digits => vec![1, 8, 8],
            Self::Mnist10k => vec![1, 28, 28],
            Self::Synthetic { shape, .. } => shape.clone(),
            Self::Tokens { context, .. } => vec![*context],
        }
    }

    /// Distinct labels, or tokens.
    pub fn classes(&self) -> i64 {
        match self {
            Self::Digits | Self::Mnist10k => 10,
            Self::Synthetic { classes, .. } => *classes,
            Self::Tokens { vocabulary, .. } => *vocabulary,
        }
    }

    /// Samples for training.
    pub fn samples(&self) -> usize {
        match self {
            Self::Digits => 1618,
            Self::Mnist10k => 9000,
            Self::Synthetic { samples, .. } | Self::Tokens { samples, .. } => *samples,
        }
    }
}

/// Samples a step sees. `global = per_card * cards` holds in `compare`; `train` lets `per_card` be the
/// larger share where cards do not divide `global`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchPlan {
    /// In all.
    pub global: usize,
    /// On one card.
    pub per_card: usize,
}

/// How weights are updated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum OptimizerPlan {
    /// Stochastic gradient descent as `torch.optim.SGD`.
    Sgd {
        /// Learning rate.
        lr: f64,
        /// Momentum; 0 is plain SGD.
        momentum: f64,
        /// L2 penalty.
        weight_decay: f64,
    },
    /// Adam as `torch.optim.Adam`, betas 0.9 and 0.999, eps 1e-8.
    Adam {
        /// Learning rate.
        lr: f64,
        /// L2 penalty.
        weight_decay: f64,
    },
}

/// DataParallel's options.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DpPlan {
    /// Position in the card list of the card that gathers, reduces and updates.
    pub output_card: usize,
    /// How much of a batch each card gets, by weight; `None` splits as `tensor.chunk` does.
    #[serde(default)]
    pub chunk_weights: Option<Vec<f64>>,
}

impl DpPlan {
    /// Card numbers in DataParallel's order, the output card first, as in PyTorch's `device_ids`: what this
    /// changes is which card does what, never which rows go together.
    pub fn order<T>(&self, mut cards: Vec<T>) -> Vec<T> {
        if let Some(up_to_output) = cards.get_mut(..=self.output_card) {
            up_to_output.rotate_right(1);
        }
        cards
    }

    /// The weights of these cards, in their order.
    pub fn weights_of(&self, cards: &[usize]) -> Option<Vec<f64>> {
        let weights = self.chunk_weights.as_ref()?;
        cards.iter().map(|card| weights.get(*card).copied()).collect()
    }
}

/// DistributedDataParallel's options, PyTorch's names and defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DdpPlan {
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
    /// The graph is the same in every step: what the first one used is not looked for again.
    #[serde(default)]
    pub static_graph: bool,
    /// Rank 0's buffers go to all before each forward.
    pub broadcast_buffers: bool,
    /// Verify that ranks hold the same model, and give all of them rank 0's weights, at the start.
    #[serde(default = "yes")]
    pub init_sync: bool,
    /// What a bucket is turned into for its journey.
    #[serde(default)]
    pub comm_hook: CommHookPlan,
    /// Micro-batches of a step; only the last one's backward communicates.
    #[serde(default = "one")]
    pub accumulate: usize,
    /// Ranks may run out of samples at different times; each step asks who still has some.
    #[serde(default)]
    pub join: bool,
    /// BatchNorm over the samples of all ranks.
    #[serde(default)]
    pub sync_batch_norm: bool,
}

// What plans meant before these keys existed.
fn yes() -> bool {
    true
}

fn one() -> usize {
    1
}

/// What a bucket is turned into for its journey, as in `torch.distributed.algorithms.ddp_comm_hooks`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum CommHookPlan {
    /// It travels as it is.
    #[default]
    None,
    /// Rounded to bfloat16.
    Bf16,
    /// Rounded to float16.
    Fp16,
    /// Low-rank factors of it, with what they leave out carried into the next step.
    Powersgd {
        /// Rank of the approximation.
        rank: i64,
        /// Steps before it starts; buckets travel whole until then.
        start_step: u64,
    },
}

/// The sampler's options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplePlan {
    /// Time between two readings.
    pub period_ms: u64,
    /// Whether a run without NVML is refused.
    #[serde(default)]
    pub require_nvml: bool,
}

/// Burns time in a phase: the documented knob that tests a gate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct InjectPlan {
    /// Where.
    pub phase: InjectPhase,
    /// How much longer the phase takes.
    pub percent: f64,
    /// Only on this rank (card in `dp`); `None` burns on all.
    pub rank: Option<usize>,
}

/// Phases that can be slowed down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InjectPhase {
    /// Forward pass.
    Forward,
    /// Backward pass.
    Backward,
    /// Optimiser step.
    Update,
}
