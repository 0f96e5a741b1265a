//! From records to what is shown: plain values, no drawing and no layout. Pure.

mod facts;
mod monitoring;
mod over_time;
mod steps;
pub(super) mod tables;

pub(super) use facts::Fact;
pub(super) use over_time::{EngineTracks, OverTime, Point, Track, downsample};
pub(super) use steps::{CardPhases, PhaseBars, Thread, Timeline, phase_named, thread_of};
pub(super) use tables::Table;

use super::load::Run;
use super::text;
use super::verdict::{Verdict, verdict};
use crate::config::EngineKind;
use crate::metrics::record::{Results, RoundStatus, Warning};
use crate::metrics::stats::CHECKED_STEPS;

/// Everything the page, the charts and the summary show.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct View {
    pub(super) title: String,
    pub(super) verdict: Verdict,
    pub(super) speed: Table,
    pub(super) balance: Table,
    pub(super) cards: Table,
    /// Options that were tried; without rows where none was.
    pub(super) ab: Table,
    /// How to read what NVML says; empty on virtual cards.
    pub(super) monitoring: Vec<String>,
    /// What it would not say.
    pub(super) refusals: Table,
    pub(super) facts: Vec<Fact>,
    pub(super) warnings: Vec<Warning>,
    /// What could not be used, in plain words.
    pub(super) notes: Vec<String>,
    pub(super) utilisation: OverTime,
    pub(super) memory: OverTime,
    pub(super) memory_peaks: Vec<EnginePeaks>,
    pub(super) phases: PhaseBars,
    pub(super) timelines: Vec<Timeline>,
    pub(super) throughput: Vec<Throughput>,
    pub(super) losses: Losses,
}

/// Peak memory of an engine's cards.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct EnginePeaks {
    pub(super) engine: String,
    /// Card and bytes.
    pub(super) cards: Vec<(usize, Option<u64>)>,
}

/// Speed of one engine.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Throughput {
    pub(super) engine: String,
    pub(super) global_batch: usize,
    pub(super) batch_per_card: usize,
    pub(super) cards: usize,
    /// Samples a second: the median over rounds, its interval, and each round.
    pub(super) median: f64,
    pub(super) ci95: Option<[f64; 2]>,
    pub(super) rounds: Vec<f64>,
}

/// Losses of the first ok round of each engine that sees the global batch.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Losses {
    pub(super) engines: Vec<(String, Vec<f64>)>,
    /// Steps that were judged.
    pub(super) judged: usize,
    /// Steps before measuring.
    pub(super) warmup: usize,
}

impl View {
    /// What a run has to show.
    pub(super) fn new(run: &Run) -> Self {
        let results = &run.results;
        let windows = over_time::windows(results, &run.steps);
        Self {
            title: facts::title(results),
            verdict: verdict(results),
            speed: tables::speed(results),
            balance: tables::balance(results),
            cards: tables::cards(results),
            ab: tables::ab(results),
            monitoring: monitoring::notes(results),
            refusals: monitoring::refusals(results),
            facts: facts::facts(results, run.samples.len()),
            warnings: results.warnings.clone(),
            notes: run.notes.clone(),
            utilisation: over_time::utilisation(results, &windows, &run.samples),
            memory: over_time::memory(results, &windows, &run.samples),
            memory_peaks: memory_peaks(results),
            phases: steps::phases(results, &run.steps),
            timelines: steps::timelines(results, &windows, &run.steps),
            throughput: throughput(results),
            losses: losses(results),
        }
    }
}

/// The engines whose cards are worth looking at one by one: those with several, or else the only one.
fn shown_engines(results: &Results) -> Vec<EngineKind> {
    let measured = |kind: &EngineKind| results.engines.get(kind.name()).is_some_and(|e| e.summary.is_some());
    let several = [EngineKind::Dp, EngineKind::Ddp, EngineKind::TorchDp, EngineKind::TorchDdp];
    let several: Vec<EngineKind> = several.into_iter().filter(measured).collect();
    if several.is_empty() { [EngineKind::Single].into_iter().filter(measured).collect() } else { several }
}

/// Engines that see the global batch. Rows that try an option stand in a table of their own.
fn on_the_global_batch(results: &Results) -> impl Iterator<Item = &str> {
    let engines = text::engines_in_order(results).into_iter();
    engines.filter(|name| EngineKind::from_name(name).is_some_and(|kind| kind != EngineKind::SinglePerCard))
}

fn memory_peaks(results: &Results) -> Vec<EnginePeaks> {
    let names = on_the_global_batch(results);
    names
        .filter_map(|name| {
            let record = &results.engines[name];
            let cards = &record.summary.as_ref()?.cards;
            let cards: Vec<_> = cards
                .iter()
                .filter(|c| c.index < record.cards)
                .map(|c| (c.index, c.memory_peak_bytes))
                .collect();
            // Where nobody counts there is nothing to compare: the table has the dash.
            cards
                .iter()
                .any(|(_, bytes)| bytes.is_some())
                .then(|| EnginePeaks { engine: name.to_owned(), cards })
        })
        .collect()
}

fn throughput(results: &Results) -> Vec<Throughput> {
    text::engines_in_order(results)
        .into_iter()
        .filter_map(|name| {
            let record = &results.engines[name];
            let summary = record.summary.as_ref()?;
            let ok = record.rounds.iter().filter(|round| round.status == RoundStatus::Ok);
            Some(Throughput {
                engine: name.to_owned(),
                global_batch: record.global_batch,
                batch_per_card: record.batch_per_card,
                cards: record.cards,
                median: summary.samples_per_second.median,
                ci95: summary.samples_per_second.ci95,
                rounds: ok.filter_map(|round| round.samples_per_second).collect(),
            })
        })
        .collect()
}

fn losses(results: &Results) -> Losses {
    let names = on_the_global_batch(results);
    let engines = names.filter_map(|name| {
        let round = results.engines[name].rounds.iter().find(|round| round.status == RoundStatus::Ok)?;
        (!round.losses.is_empty()).then(|| (name.to_owned(), round.losses.clone()))
    });
    Losses { engines: engines.collect(), judged: CHECKED_STEPS, warmup: results.plan.run.warmup }
}
