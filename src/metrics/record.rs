//! The on-disk schema of a run (`results.json`, `steps.csv`, `samples.csv`), and nothing else.
//!
//! Reports and gates are rebuilt from these types alone. A value that could not be had is `None`:
//! `null` in JSON, an empty cell in CSV; never zero, never NaN. A new key here is a promise to readers.

use crate::config::Plan;
use crate::metrics::phase::Phase;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The schema this build writes.
pub const SCHEMA: &str = "dp-vs-ddp/results/1";

/// `results.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: String,
    /// The command line, program name included.
    pub argv: Vec<String>,
    /// RFC 3339, UTC.
    pub started_at: String,
    /// RFC 3339, UTC; `None` while the run goes on.
    pub finished_at: Option<String>,
    /// Whether all of it was measured.
    pub status: Status,
    /// What it ran on.
    pub environment: Environment,
    /// What was run.
    pub plan: Plan,
    /// What was measured, by engine name (`single`, `single_per_card`, `dp`, `ddp`; peers `torch_*`),
    /// with options that were tried beside it in brackets: `ddp[comm_hook=bf16]`.
    pub engines: BTreeMap<String, EngineRecord>,
    /// The engines against each other.
    pub comparison: Comparison,
    /// How the cards were sampled; `None` before the first reading.
    #[serde(default)]
    pub sampling: Option<Sampling>,
    /// What came of watching CUDA cards; `None` on virtual cards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitoring: Option<Monitoring>,
    /// What the reader should know.
    pub warnings: Vec<Warning>,
}

/// The sampler's own account of a run, all rounds together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Time between two readings.
    pub period_ms: u64,
    /// Readings taken.
    pub ticks: u64,
    /// Readings that came too late and were left out.
    pub missed: u64,
    /// Values that could not be true (outside -5 to 105 %) and are missing in `samples.csv`.
    pub rejected: u64,
    /// CPU time the sampler itself took, of one core.
    pub cpu_percent: Option<f64>,
}

/// What came of watching CUDA cards, all rounds together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Monitoring {
    /// Why nothing was watched, if nothing was.
    pub unavailable: Option<String>,
    /// By card.
    pub cards: Vec<CardMonitoring>,
}

/// One card's account.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CardMonitoring {
    /// Position in the run's card list.
    pub index: usize,
    /// What identifies it.
    pub uuid: String,
    /// What its power readings are; `None` where the driver does not tell the chip.
    pub power: Option<PowerKind>,
    /// What its utilisation readings are; `None` where there was none.
    pub utilisation: Option<UtilisationKind>,
    /// Whether it has no memory of its own.
    pub unified_memory: bool,
    /// When it stopped to answer, CLOCK_MONOTONIC; `None` if it did not.
    pub lost_since_ns: Option<u64>,
    /// Most bytes that other processes used; `None` where the driver does not tell processes apart.
    #[serde(default)]
    pub foreign_memory_peak_bytes: Option<u64>,
    /// Readings in which clocks were lower than they could be, by reason.
    #[serde(default)]
    pub throttle: BTreeMap<String, u64>,
    /// By column of `samples.csv`.
    pub fields: BTreeMap<String, FieldAccount>,
}

/// What came of asking for one field.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldAccount {
    /// Values.
    pub samples: u64,
    /// Of them, zeros.
    pub zeros: u64,
    /// Refusals.
    pub errors: u64,
    /// Values that could not be true.
    pub rejected: u64,
    /// The first refusal or rejection, in few words.
    pub first_error: Option<String>,
}

/// What a power reading is: two cards whose kinds differ cannot be compared by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PowerKind {
    /// Over about a second.
    Average,
    /// Of a moment.
    Instant,
}

/// What a utilisation reading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UtilisationKind {
    /// The mean of what the driver sampled since the last reading.
    Buffered,
    /// The driver's last average, over a sixth of a second to a second.
    Point,
}

impl Monitoring {
    /// Takes another round's account in.
    pub fn absorb(&mut self, other: Self) {
        self.unavailable = self.unavailable.take().or(other.unavailable);
        for card in other.cards {
            match self.cards.iter_mut().find(|known| known.index == card.index) {
                None => self.cards.push(card),
                Some(known) => known.absorb(card),
            }
        }
        self.cards.sort_by_key(|card| card.index);
    }
}

impl CardMonitoring {
    fn absorb(&mut self, other: Self) {
        self.power = self.power.or(other.power);
        self.utilisation = self.utilisation.or(other.utilisation);
        self.unified_memory |= other.unified_memory;
        self.lost_since_ns = self.lost_since_ns.or(other.lost_since_ns);
        self.foreign_memory_peak_bytes =
            self.foreign_memory_peak_bytes.into_iter().chain(other.foreign_memory_peak_bytes).max();
        for (reason, count) in other.throttle {
            *self.throttle.entry(reason).or_default() += count;
        }
        for (name, account) in other.fields {
            let known = self.fields.entry(name).or_default();
            known.samples += account.samples;
            known.zeros += account.zeros;
            known.errors += account.errors;
            known.rejected += account.rejected;
            known.first_error = known.first_error.take().or(account.first_error);
        }
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Every cell was measured, or is a record of why it could not be.
    Complete,
    /// Stopped from outside; what is here is whole rounds.
    Interrupted,
    /// A rank died or the machinery failed.
    Failed,
}

/// The machine and its software.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Hash of hardware facts only: cards, links, CPU model, cores.
    pub fingerprint: String,
    /// The cards used, in rank order.
    pub cards: Vec<CardInfo>,
    /// The way between each two of them, as `nvidia-smi topo -m` names it; `None` on virtual cards and without NVML.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<Vec<Vec<Option<String>>>>,
    /// Versions.
    pub software: Software,
    /// CPU model name.
    pub cpu: Option<String>,
    /// Cores this process may run on.
    pub cores: usize,
    /// Operating system.
    pub os: Option<String>,
    /// `CUDA_VISIBLE_DEVICES` as found.
    pub visible_devices: Option<String>,
}

/// One card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CardInfo {
    /// Position in the run's card list.
    pub index: usize,
    /// `virtual` or `cuda`.
    pub kind: CardKind,
    /// For people.
    pub name: String,
    /// What identifies it; for a virtual card its core set, as in `cores:0-1`.
    pub uuid: String,
    /// Its own memory; `None` for a virtual card, which shares the host's.
    pub memory_bytes: Option<u64>,
    /// Cores a virtual card's threads are pinned to.
    pub cores: Option<Vec<usize>>,
}

/// What a card is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CardKind {
    /// A set of CPU cores with its own accounting.
    Virtual,
    /// A CUDA device.
    Cuda,
}

/// Versions of what can change under a benchmark.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Software {
    /// This program.
    pub version: String,
    /// libtorch, as loaded.
    pub libtorch: Option<String>,
    /// NCCL, as loaded.
    pub nccl: Option<String>,
    /// NVIDIA driver.
    pub driver: Option<String>,
    /// CUDA runtime.
    pub cuda: Option<String>,
}

/// Options that one row has and its base has not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// Row without them.
    pub base: String,
    /// `key=value` each.
    pub options: Vec<String>,
}

/// One engine: its rounds and what follows from them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineRecord {
    /// What is tried in this row; `None` for an engine as the plan has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tried: Option<Tried>,
    /// Cards it ran on.
    pub cards: usize,
    /// Samples a step sees in all.
    pub global_batch: usize,
    /// Samples a step sees on one card.
    pub batch_per_card: usize,
    /// In order of measuring.
    pub rounds: Vec<Round>,
    /// Over the rounds that are ok; `None` where there is none.
    pub summary: Option<Summary>,
}

/// One engine's warm-up and measured steps in fresh processes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Whether it was measured.
    pub status: RoundStatus,
    /// Why not.
    pub error: Option<String>,
    /// Real samples over the wall time of the measured steps.
    pub samples_per_second: Option<f64>,
    /// Wall time of a step.
    pub step_ms: Option<Spread>,
    /// By phase: the largest over cards in each step, then the median over steps.
    pub phases_ms: BTreeMap<Phase, f64>,
    /// Likewise, how long the host took to ask a CUDA card for each phase: where that is as long as the phase
    /// itself, the host is what limits. Empty on virtual cards, whose phases the host does itself.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub issue_ms: BTreeMap<Phase, f64>,
    /// Loss of every step, warm-up included.
    pub losses: Vec<f64>,
    /// Mean a step and card of time in communication; `None` for one card.
    pub communication_ms: Option<f64>,
    /// Its part that nothing hid.
    pub exposed_communication_ms: Option<f64>,
    /// Bytes of gradients that a rank gives to the others in a step; `None` where nobody counts them.
    #[serde(default)]
    pub gradient_bytes: Option<f64>,
    /// 1 - exposed / communication; `None` where there is no communication.
    pub overlap: Option<f64>,
    /// By card.
    pub cards: Vec<CardRound>,
    /// Hash of each rank's weights after the last step; equal for all ranks of `ddp`.
    pub weights_digests: Vec<String>,
    /// How weights and gradients travelled between the cards: `shm` or `host` between virtual ones, `nccl` or `peer`
    /// (copies from card to card) between CUDA cards; `None` for a single card and for PyTorch's engines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
    /// Energy of all cards of the engine for one real sample; `None` unless all of them have a counter.
    #[serde(default)]
    pub joules_per_sample: Option<f64>,
    /// Updates that were left out because float16 could not hold their gradients, warm-up included.
    #[serde(default)]
    pub skipped_steps: u64,
    /// From the start of the processes until all ranks were ready to train: libtorch, data, model,
    /// connections, and the weights that rank 0 gives to all.
    #[serde(default)]
    pub start_ms: Option<f64>,
}

/// Whether a round was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoundStatus {
    /// Measured.
    Ok,
    /// Not measured; the error says why.
    Failed,
}

/// How values spread.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Middle value.
    pub median: f64,
    /// 5th percentile.
    pub p5: f64,
    /// 95th percentile.
    pub p95: f64,
    /// Arithmetic mean.
    pub mean: f64,
}

/// One card in one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CardRound {
    /// Position in the run's card list.
    pub index: usize,
    /// Busy over wall during the measured steps, per core of the card.
    pub utilisation_percent_mean: Option<f64>,
    /// Per step: phases that are not communication, less their waiting.
    pub compute_ms: Option<f64>,
    /// Per step.
    pub communication_ms: Option<f64>,
    /// Per step.
    pub wait_ms: Option<f64>,
    /// Most bytes alive at once during the measured steps.
    pub memory_peak_bytes: Option<u64>,
    /// Energy of the measured steps, the card's waiting included; `None` without a counter.
    pub energy_joules: Option<f64>,
    /// Where that is from.
    #[serde(default)]
    pub energy_source: Option<EnergySource>,
    /// Most bytes of the card in use at once during the measured steps, by all processes, as NVML sees it:
    /// beside what tensors need, contexts, kernels and what the allocator keeps.
    #[serde(default)]
    pub memory_used_peak_bytes: Option<u64>,
}

/// How energy was come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnergySource {
    /// The card counts it.
    Counter,
    /// Power readings, added up: what lies between them is not seen.
    Power,
}

/// Over the ok rounds of one engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Throughput.
    pub samples_per_second: Estimate,
    /// Step time.
    pub step_ms: Spread,
    /// Against `single`.
    pub scaling_efficiency: Scaling,
    /// Energy of all cards of the engine for one real sample.
    #[serde(default)]
    pub joules_per_sample: Option<Estimate>,
    /// Unevenness of the cards.
    pub imbalance: Imbalance,
    /// Medians over rounds, by card.
    pub cards: Vec<CardRound>,
}

/// A median and how sure it is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Median over rounds.
    pub median: f64,
    /// Bootstrap 95 % interval; `None` below five rounds.
    pub ci95: Option<[f64; 2]>,
}

/// Scaling efficiency, 1.0 = perfect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Scaling {
    /// Throughput on n cards over n times `single` at the per-card batch.
    pub weak: Option<f64>,
    /// Throughput on n cards over n times `single` at the global batch.
    pub strong: Option<f64>,
}

/// Largest over mean across cards, 1.0 = even.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Imbalance {
    /// Of utilisation.
    pub utilisation: Option<f64>,
    /// Of peak memory.
    pub memory: Option<f64>,
}

/// The engines against each other.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Throughput of `ddp` over `dp`; `None` when one of them is not there or they are not comparable.
    pub ddp_over_dp: Option<Ratio>,
    /// Throughput of `dp` over `single`.
    pub dp_over_single: Option<Ratio>,
    /// Throughput of `ddp` over `single`.
    pub ddp_over_single: Option<Ratio>,
    /// Our engines over PyTorch's of the same kind, by our name.
    #[serde(default)]
    pub over_torch: BTreeMap<String, Ratio>,
    /// What each option that was tried costs, by row.
    #[serde(default)]
    pub ab: BTreeMap<String, AbResult>,
    /// Whether they computed the same thing.
    pub losses: LossAgreement,
}

/// One row against its base.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AbResult {
    /// Throughput over that of the base; `None` where no pair of rounds has both, and where the losses
    /// are further apart than the option explains.
    pub throughput: Option<Ratio>,
    /// Largest relative difference of a loss from the base's, over the steps that are judged.
    pub loss_difference: Option<f64>,
    /// What it may be: rounding where the option is exact, more where it rounds on purpose. `None`
    /// where the option changes what is computed, so that losses are shown and not judged.
    pub tolerance: Option<f64>,
}

impl AbResult {
    /// Whether the losses are further apart than the option explains.
    pub fn disagrees(&self) -> bool {
        self.loss_difference.zip(self.tolerance).is_some_and(|(difference, allowed)| difference > allowed)
    }
}

/// A ratio of throughputs: the median of the ratios of paired rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Median over paired rounds.
    pub ratio: f64,
    /// Bootstrap 95 % interval; `None` below five rounds.
    pub ci95: Option<[f64; 2]>,
}

/// The correctness check that stands beside every speed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LossAgreement {
    /// `None`: not checked, and `reason` says why.
    pub agree: Option<bool>,
    /// Engines and steps that were compared, as in `single, dp, ddp: first 20 steps`.
    pub checked: String,
    /// Largest relative difference of a loss.
    pub max_difference: Option<f64>,
    /// What it may be.
    pub tolerance: Option<f64>,
    /// Why it was not checked, or what disagrees.
    pub reason: Option<String>,
}

/// Something the reader should know, with advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Stable identifier, in snake_case.
    pub code: String,
    /// What was seen.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// One row of `steps.csv`. The whole step is the row whose phase is `step`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRow {
    /// Row: an engine's name, with the options tried if there are any.
    pub engine: String,
    /// Round, from 0.
    pub round: usize,
    /// Process.
    pub rank: usize,
    /// Card.
    pub card: usize,
    /// Step of the round, warm-up included.
    pub step: u64,
    /// Phase name, or `step`.
    pub phase: String,
    /// Start, CLOCK_MONOTONIC.
    pub start_ns: u64,
    /// Length.
    pub duration_ns: u64,
    /// Real samples the card saw; only on `step` rows.
    pub samples: Option<u64>,
    /// How long the host took to ask for it; empty where the host itself did it.
    #[serde(default)]
    pub issue_ns: Option<u64>,
}

/// One row of `samples.csv`: what the sampler read of one card at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleRow {
    /// Row that is running.
    pub engine: String,
    /// Round, from 0.
    pub round: usize,
    /// When, CLOCK_MONOTONIC.
    pub t_ns: u64,
    /// Card.
    pub card: usize,
    /// What identifies the card.
    pub uuid: String,
    /// Busy over wall since the previous reading, per core of the card.
    pub utilisation_percent: Option<f64>,
    /// Bytes alive.
    pub memory_used_bytes: Option<u64>,
    /// Power draw.
    pub power_mw: Option<u64>,
    /// Bytes there are; with this and all below, only on CUDA cards.
    #[serde(default)]
    pub memory_total_bytes: Option<u64>,
    /// Share of time in which memory was read or written: how busy its bus was, not how full it is.
    #[serde(default)]
    pub memory_controller_percent: Option<f64>,
    /// Energy since the driver was loaded.
    #[serde(default)]
    pub energy_mj: Option<u64>,
    /// Of the chip.
    #[serde(default)]
    pub temperature_c: Option<u64>,
    /// Of the multiprocessors.
    #[serde(default)]
    pub sm_clock_mhz: Option<u64>,
    /// Of the memory.
    #[serde(default)]
    pub memory_clock_mhz: Option<u64>,
    /// Why clocks are lower than they could be, with `|` between; `none` where they are not.
    #[serde(default)]
    pub throttle: Option<String>,
    /// From the host; every twentieth reading, because asking takes 20 ms.
    #[serde(default)]
    pub pcie_rx_kb_s: Option<u64>,
    /// To the host; likewise.
    #[serde(default)]
    pub pcie_tx_kb_s: Option<u64>,
    /// From other cards.
    #[serde(default)]
    pub nvlink_rx_kb_s: Option<u64>,
    /// To other cards.
    #[serde(default)]
    pub nvlink_tx_kb_s: Option<u64>,
    /// Share of multiprocessors with work, over time.
    #[serde(default)]
    pub sm_activity_percent: Option<f64>,
    /// Share of resident warps, over time.
    #[serde(default)]
    pub sm_occupancy_percent: Option<f64>,
    /// Bytes of this run's processes.
    #[serde(default)]
    pub process_memory_bytes: Option<u64>,
    /// Utilisation by this run's processes.
    #[serde(default)]
    pub process_utilisation_percent: Option<f64>,
    /// Bytes of other processes.
    #[serde(default)]
    pub foreign_memory_bytes: Option<u64>,
}
