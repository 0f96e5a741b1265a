//! What the workers of one round reported becomes one record. Pure: reports in, values out.
//!
//! A step of several ranks lasts from the first rank's start to the last rank's end, and its loss is the
//! mean over all samples, so that one process and many are measured by one rule.

use super::phase::{CardTotals, Phase, Span, StepReport};
use super::record::{CardRound, Round, RoundStatus, StepRow};
use super::stats;
use crate::config::{EngineKind, Layout, shares};
use crate::error::{Error, Kind, Result};
use crate::units::Nanos;
use std::collections::{BTreeMap, BTreeSet};

/// The `phase` of rows of `steps.csv` that stand for a whole step.
pub const WHOLE_STEP: &str = "step";

/// Everything one rank reported.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankLog {
    /// Cards this process works for, in the order in which a batch is split among them.
    pub cards: Vec<usize>,
    /// By what weights, in the same order; `None` splits as `tensor.chunk` does.
    pub weights: Option<Vec<f64>>,
    /// Its steps, in order.
    pub steps: Vec<StepReport>,
    /// Its cards during the measured steps.
    pub totals: Vec<CardTotals>,
    /// Hash of its weights after the last step.
    pub weights_digest: Option<String>,
    /// Updates that it left out because float16 could not hold their gradients.
    pub skipped_steps: u64,
    /// From the start of its process until it was ready to train.
    pub ready_after: Option<Nanos>,
    /// How weights and gradients travel between its cards.
    pub link: Option<String>,
}

/// The record of a round that went well. `logs` are in rank order; the first `warmup` steps are left
/// out of everything but the losses.
pub fn summarise(engine: EngineKind, logs: &[RankLog], warmup: usize) -> Result<Round> {
    let steps = agreed_steps(logs)?;
    if steps <= warmup {
        return Err(corrupt(format!("{engine}: {steps} steps reported, of which {warmup} are warm-up")));
    }
    let walls: Vec<(Nanos, Nanos)> = (warmup..steps).map(|step| wall_of_step(logs, step)).collect();
    let step_ms: Vec<f64> = walls.iter().map(|(start, end)| end.since(*start).as_ms()).collect();
    let window = walls.iter().map(|(start, _)| *start).min().unwrap_or_default();
    let measured: Vec<Span> = logs
        .iter()
        .flat_map(|log| log.steps.iter().flat_map(|step| &step.spans))
        .filter(|span| span.step >= warmup as u64)
        .map(|span| from(window, *span))
        .collect();
    let cards: BTreeSet<usize> = logs.iter().flat_map(|log| log.cards.iter().copied()).collect();
    let measured_steps = steps - warmup;
    // PyTorch's own communication goes on inside its backward, where nothing of ours can time it.
    let timed = cards.len() > 1 && !engine.is_peer();
    let communication = timed.then(|| communication(engine, &measured, cards.len() * measured_steps));
    Ok(Round {
        status: RoundStatus::Ok,
        error: None,
        samples_per_second: samples_per_second(logs, warmup, &walls),
        step_ms: stats::spread("step_ms", &step_ms)?,
        phases_ms: phases_ms(&measured, warmup, measured_steps, |span| Some(span.duration)),
        issue_ms: phases_ms(&measured, warmup, measured_steps, |span| span.issue),
        losses: (0..steps).map(|step| loss_of_step(logs, step)).collect::<Result<_>>()?,
        communication_ms: communication.map(|comm| comm.total_ms),
        exposed_communication_ms: communication.map(|comm| comm.exposed_ms),
        gradient_bytes: gradient_bytes(logs, warmup),
        overlap: communication.and_then(Communication::overlap),
        cards: cards.iter().map(|&card| card_round(card, logs, &measured, measured_steps, timed)).collect(),
        joules_per_sample: None,
        link: logs.iter().find_map(|log| log.link.clone()),
        weights_digests: logs.iter().filter_map(|log| log.weights_digest.clone()).collect(),
        skipped_steps: logs.iter().map(|log| log.skipped_steps).max().unwrap_or(0),
        start_ms: logs.iter().filter_map(|log| log.ready_after).max().map(Nanos::as_ms),
    })
}

/// The part of a span from `start` on: a replica has waited for the first measured step since it ended its
/// part of the last warm-up step, and what lies before measuring does not count.
fn from(start: Nanos, span: Span) -> Span {
    let end = Nanos(span.start.0 + span.duration.0);
    let start = span.start.max(start);
    Span { start, duration: end.since(start), ..span }
}

/// The record of a round that could not be measured.
pub fn failed(error: &Error) -> Round {
    Round {
        status: RoundStatus::Failed,
        error: Some(error.to_string()),
        samples_per_second: None,
        step_ms: None,
        phases_ms: BTreeMap::new(),
        issue_ms: BTreeMap::new(),
        losses: Vec::new(),
        communication_ms: None,
        exposed_communication_ms: None,
        gradient_bytes: None,
        overlap: None,
        cards: Vec::new(),
        joules_per_sample: None,
        link: None,
        weights_digests: Vec::new(),
        skipped_steps: 0,
        start_ms: None,
    }
}

/// Rows of `steps.csv` of one rank: for each step the whole of it on each card, then its phases.
pub fn step_rows(engine: &str, round: usize, rank: usize, log: &RankLog) -> Vec<StepRow> {
    let row =
        |card, step, phase: &str, start: Nanos, duration: Nanos, samples, issue: Option<Nanos>| StepRow {
            engine: engine.to_owned(),
            round,
            rank,
            card,
            step,
            phase: phase.to_owned(),
            start_ns: start.0,
            duration_ns: duration.0,
            samples,
            issue_ns: issue.map(|issue| issue.0),
        };
    let mut rows = Vec::new();
    for report in &log.steps {
        let shares = shares(report.samples as usize, log.cards.len(), log.weights.as_deref());
        for (&card, samples) in log.cards.iter().zip(shares) {
            let duration = report.end.since(report.start);
            rows.push(row(card, report.step, WHOLE_STEP, report.start, duration, Some(samples as u64), None));
        }
        rows.extend(report.spans.iter().map(|span| {
            row(span.card, span.step, span.phase.name(), span.start, span.duration, None, span.issue)
        }));
    }
    rows
}

fn corrupt(what: String) -> Error {
    Error::new(Kind::Worker, what)
        .hint("this is a fault of the program, please report it with the run folder")
}

/// The number of steps, which all ranks must have taken, numbered from 0.
fn agreed_steps(logs: &[RankLog]) -> Result<usize> {
    let counts: Vec<usize> = logs.iter().map(|log| log.steps.len()).collect();
    let steps = *counts.first().ok_or_else(|| corrupt("no rank reported anything".to_owned()))?;
    if counts.iter().any(|&count| count != steps) {
        return Err(corrupt(format!("ranks took different numbers of steps, by rank: {counts:?}")));
    }
    for (rank, log) in logs.iter().enumerate() {
        let numbered = log.steps.iter().zip(0u64..).all(|(report, number)| report.step == number);
        if !numbered {
            return Err(corrupt(format!("rank {rank} reported its steps out of order")));
        }
    }
    Ok(steps)
}

/// From the first rank's start to the last rank's end.
fn wall_of_step(logs: &[RankLog], step: usize) -> (Nanos, Nanos) {
    let reports = || logs.iter().map(|log| &log.steps[step]);
    let start = reports().map(|report| report.start).min().unwrap_or_default();
    let end = reports().map(|report| report.end).max().unwrap_or_default();
    (start, end)
}

/// Real samples over the wall time from the start of the first to the end of the last measured step.
fn samples_per_second(logs: &[RankLog], warmup: usize, walls: &[(Nanos, Nanos)]) -> Option<f64> {
    let samples = real_samples(logs, warmup);
    let seconds = walls.last()?.1.since(walls.first()?.0).as_seconds();
    (seconds > 0.0).then(|| samples as f64 / seconds)
}

/// Samples of the measured steps, without those that only fill up an epoch.
pub fn real_samples(logs: &[RankLog], warmup: usize) -> u64 {
    let real = |report: &StepReport| report.samples.saturating_sub(report.repeated);
    logs.iter().flat_map(|log| log.steps.get(warmup..).unwrap_or_default()).map(real).sum()
}

/// From the first rank's start of the first measured step to the last rank's end of the last one.
pub fn measured_window(logs: &[RankLog], warmup: usize) -> Option<(Nanos, Nanos)> {
    let measured = || logs.iter().flat_map(|log| log.steps.get(warmup..).unwrap_or_default());
    Some((measured().map(|step| step.start).min()?, measured().map(|step| step.end).max()?))
}

/// Mean over the samples of all ranks.
fn loss_of_step(logs: &[RankLog], step: usize) -> Result<f64> {
    let reports = || logs.iter().map(|log| &log.steps[step]);
    let samples: u64 = reports().map(|report| report.samples).sum();
    if samples == 0 {
        return Err(corrupt(format!("step {step} had no samples")));
    }
    let weighted = |report: &StepReport| match (report.samples, report.loss) {
        (0, _) => Ok(0.0),
        (count, Some(loss)) => Ok(loss * count as f64),
        (_, None) => Err(corrupt(format!("a rank reported no loss for step {step}"))),
    };
    Ok(reports().map(weighted).sum::<Result<f64>>()? / samples as f64)
}

/// Mean over ranks and measured steps; `None` unless all of them were counted.
fn gradient_bytes(logs: &[RankLog], warmup: usize) -> Option<f64> {
    let reports = logs.iter().flat_map(|log| &log.steps[warmup..]);
    let counts: Option<Vec<f64>> =
        reports.map(|report| report.sent_bytes.map(|bytes| bytes as f64)).collect();
    counts.filter(|counts| !counts.is_empty()).map(|all| all.iter().sum::<f64>() / all.len() as f64)
}

/// By phase: its time on a card in a step, the largest over cards, the median over steps. A step without
/// the phase spent no time in it.
fn phases_ms(
    spans: &[Span],
    warmup: usize,
    steps: usize,
    time: impl Fn(&Span) -> Option<Nanos>,
) -> BTreeMap<Phase, f64> {
    let mut by_cell: BTreeMap<(Phase, u64, usize), u64> = BTreeMap::new();
    for (span, time) in spans.iter().filter_map(|span| Some((span, time(span)?))) {
        *by_cell.entry((span.phase, span.step, span.card)).or_default() += time.0;
    }
    let mut largest: BTreeMap<Phase, Vec<u64>> = BTreeMap::new();
    for ((phase, step, _), time) in by_cell {
        let row = largest.entry(phase).or_insert_with(|| vec![0; steps]);
        if let Some(cell) = row.get_mut(step as usize - warmup) {
            *cell = (*cell).max(time);
        }
    }
    largest
        .into_iter()
        .filter_map(|(phase, row)| {
            let row: Vec<f64> = row.into_iter().map(|time| Nanos(time).as_ms()).collect();
            stats::median(&row).map(|median| (phase, median))
        })
        .collect()
}

/// Mean a step and card.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Communication {
    total_ms: f64,
    exposed_ms: f64,
}

impl Communication {
    /// 1 - exposed / communication.
    fn overlap(self) -> Option<f64> {
        (self.total_ms > 0.0).then(|| 1.0 - self.exposed_ms / self.total_ms)
    }
}

/// Communication is exposed where nothing else goes on. In `dp` the thread that moves data is the one
/// that computes: all of it. In `ddp` the part of an all-reduce during which the computing thread waits.
fn communication(engine: EngineKind, spans: &[Span], card_steps: usize) -> Communication {
    let total: u64 =
        spans.iter().filter(|span| span.phase.is_communication()).map(|span| span.duration.0).sum();
    let exposed = match engine.layout() {
        Layout::ProcessPerCard => waited_for_all_reduce(spans),
        Layout::OneCard | Layout::OneProcess => total,
    };
    let mean_ms = |time: u64| Nanos(time).as_ms() / card_steps as f64;
    Communication { total_ms: mean_ms(total), exposed_ms: mean_ms(exposed) }
}

/// Time during which a card was both in an all-reduce and waiting. Spans of one phase on one card do
/// not overlap each other: each comes from one thread.
fn waited_for_all_reduce(spans: &[Span]) -> u64 {
    let of = |phase| spans.iter().filter(move |span| span.phase == phase);
    let mut waits: BTreeMap<(usize, u64), Vec<&Span>> = BTreeMap::new();
    for wait in of(Phase::Wait) {
        waits.entry((wait.card, wait.step)).or_default().push(wait);
    }
    of(Phase::AllReduce)
        .filter_map(|reduce| Some((reduce, waits.get(&(reduce.card, reduce.step))?)))
        .flat_map(|(reduce, waits)| waits.iter().map(|wait| common(reduce, wait)))
        .sum()
}

/// Length of what two spans have in common.
fn common(a: &Span, b: &Span) -> u64 {
    let end = (a.start.0 + a.duration.0).min(b.start.0 + b.duration.0);
    end.saturating_sub(a.start.0.max(b.start.0))
}

/// `timed`: whether communication and waiting are there and timed; one card does neither.
fn card_round(card: usize, logs: &[RankLog], spans: &[Span], steps: usize, timed: bool) -> CardRound {
    let per_step = |wanted: fn(Phase) -> bool| {
        let mine = spans.iter().filter(|span| span.card == card && wanted(span.phase));
        Nanos(mine.map(|span| span.duration.0).sum()).as_ms() / steps as f64
    };
    let totals = logs.iter().flat_map(|log| &log.totals).find(|totals| totals.card == card);
    CardRound {
        index: card,
        utilisation_percent_mean: totals.and_then(utilisation_percent),
        compute_ms: Some(per_step(|phase| !phase.is_communication() && phase != Phase::Wait)),
        communication_ms: timed.then(|| per_step(Phase::is_communication)),
        wait_ms: timed.then(|| per_step(|phase| phase == Phase::Wait)),
        memory_peak_bytes: totals.and_then(|totals| totals.memory_peak_bytes),
        energy_joules: None,
        energy_source: None,
        memory_used_peak_bytes: None,
    }
}

/// Busy time (on a CPU and not waiting) over wall time, per core of the card. `None` where the accounts
/// contradict each other.
fn utilisation_percent(totals: &CardTotals) -> Option<f64> {
    let busy = totals.on_cpu.0.checked_sub(totals.wait_cpu.0)?;
    let available = totals.wall.0 as f64 * totals.cores as f64;
    (available > 0.0).then(|| 100.0 * busy as f64 / available).filter(|percent| *percent <= 105.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn span(step: u64, card: usize, phase: Phase, start_ms: u64, ms: u64) -> Span {
        Span { step, card, phase, start: Nanos(start_ms * MS), duration: Nanos(ms * MS), issue: None }
    }

    fn step(step: u64, loss: f64, samples: u64, start_ms: u64, end_ms: u64, spans: Vec<Span>) -> StepReport {
        StepReport {
            step,
            loss: Some(loss),
            samples,
            repeated: 0,
            sent_bytes: None,
            start: Nanos(start_ms * MS),
            end: Nanos(end_ms * MS),
            spans,
        }
    }

    /// Two ranks, one warm-up step and two measured ones.
    fn ddp() -> Vec<RankLog> {
        let rank = |card: usize, shift: u64, losses: [f64; 3], samples: [u64; 3], wait: u64| RankLog {
            link: None,
            cards: vec![card],
            weights: None,
            skipped_steps: 0,
            ready_after: Some(Nanos((300 + shift) * MS)),
            steps: vec![
                step(
                    0,
                    losses[0],
                    samples[0],
                    shift,
                    100 + shift,
                    vec![span(0, card, Phase::Forward, 0, 90)],
                ),
                step(
                    1,
                    losses[1],
                    samples[1],
                    100 + shift,
                    120 + shift,
                    vec![
                        span(1, card, Phase::Backward, 100, 10),
                        span(1, card, Phase::AllReduce, 106, 8),
                        span(1, card, Phase::Wait, 110, wait),
                        span(1, card, Phase::Update, 114, 2),
                    ],
                ),
                step(
                    2,
                    losses[2],
                    samples[2],
                    120 + shift,
                    150 + shift,
                    vec![span(2, card, Phase::Backward, 120, 20), span(2, card, Phase::AllReduce, 126, 8)],
                ),
            ],
            totals: vec![CardTotals {
                card,
                cores: 2,
                wall: Nanos(50 * MS),
                on_cpu: Nanos(60 * MS),
                wait_cpu: Nanos(10 * MS),
                memory_peak_bytes: Some(1000 + card as u64),
            }],
            weights_digest: Some("same".into()),
        };
        vec![rank(0, 0, [3.0, 2.0, 1.0], [8, 8, 30], 4), rank(1, 5, [3.0, 4.0, 5.0], [8, 8, 10], 2)]
    }

    #[test]
    fn a_step_lasts_from_the_first_start_to_the_last_end() {
        let round = summarise(EngineKind::Ddp, &ddp(), 1).unwrap();
        // Steps of 25 and 35 ms; 56 samples from 100 to 155 ms.
        let spread = round.step_ms.unwrap();
        assert_eq!((spread.median, spread.mean), (30.0, 30.0));
        assert!((round.samples_per_second.unwrap() - 56.0 / 0.055).abs() < 1e-9);
    }

    #[test]
    fn losses_weigh_samples_and_include_warm_up() {
        let round = summarise(EngineKind::Ddp, &ddp(), 1).unwrap();
        assert_eq!(round.losses, [3.0, 3.0, 2.0]);
        assert_eq!(round.weights_digests, ["same", "same"]);
    }

    #[test]
    fn phases_are_the_largest_over_cards_then_the_median_over_steps() {
        let round = summarise(EngineKind::Ddp, &ddp(), 1).unwrap();
        assert_eq!(round.phases_ms[&Phase::Backward], 15.0);
        assert_eq!(round.phases_ms[&Phase::Wait], 2.0);
        assert_eq!(round.phases_ms[&Phase::AllReduce], 8.0);
        assert!(!round.phases_ms.contains_key(&Phase::Forward), "only warm-up had it");
    }

    #[test]
    fn exposed_communication_is_what_the_computing_thread_waited_for() {
        let round = summarise(EngineKind::Ddp, &ddp(), 1).unwrap();
        // All-reduces of 8 ms in 2 steps on 2 cards; 4 + 2 ms of them waited for.
        assert_eq!(round.communication_ms, Some(8.0));
        assert_eq!(round.exposed_communication_ms, Some(1.5));
        assert_eq!(round.overlap, Some(1.0 - 1.5 / 8.0));
    }

    #[test]
    fn what_pytorch_communicates_inside_its_backward_is_missing_not_zero() {
        let round = summarise(EngineKind::TorchDdp, &ddp(), 1).unwrap();
        assert_eq!(
            (round.communication_ms, round.exposed_communication_ms, round.overlap),
            (None, None, None)
        );
        assert_eq!((round.cards[0].communication_ms, round.cards[0].wait_ms), (None, None));
    }

    #[test]
    fn cards_have_their_own_times_and_memory() {
        let round = summarise(EngineKind::Ddp, &ddp(), 1).unwrap();
        let card = &round.cards[1];
        assert_eq!((card.index, card.memory_peak_bytes), (1, Some(1001)));
        assert_eq!(
            (card.compute_ms, card.communication_ms, card.wait_ms),
            (Some(16.0), Some(8.0), Some(1.0))
        );
        // 60 ms on a CPU of which 10 waiting, of 50 ms on 2 cores.
        assert_eq!(card.utilisation_percent_mean, Some(50.0));
    }

    #[test]
    fn all_of_dp_communication_is_exposed() {
        let spans = vec![
            span(0, 0, Phase::Gather, 0, 4),
            span(0, 1, Phase::Replicate, 0, 6),
            span(0, 1, Phase::Wait, 6, 10),
        ];
        let log =
            RankLog { cards: vec![0, 1], steps: vec![step(0, 1.0, 4, 0, 20, spans)], ..RankLog::default() };
        let round = summarise(EngineKind::Dp, &[log], 0).unwrap();
        assert_eq!((round.communication_ms, round.exposed_communication_ms), (Some(5.0), Some(5.0)));
        assert_eq!(round.overlap, Some(0.0));
    }

    #[test]
    fn waiting_counts_from_the_first_measured_step_on() {
        // The replica was idle from 5 on; measuring starts at 20.
        let spans = vec![span(1, 1, Phase::Wait, 5, 18), span(1, 1, Phase::Forward, 23, 7)];
        let steps = vec![step(0, 1.0, 4, 0, 20, vec![]), step(1, 1.0, 4, 20, 30, spans)];
        let log = RankLog { cards: vec![0, 1], steps, ..RankLog::default() };
        let round = summarise(EngineKind::Dp, &[log], 1).unwrap();
        assert_eq!((round.cards[1].wait_ms, round.cards[1].compute_ms), (Some(3.0), Some(7.0)));
    }

    #[test]
    fn one_card_has_no_communication_rather_than_none_of_it() {
        let log =
            RankLog { cards: vec![0], steps: vec![step(0, 1.0, 4, 0, 20, vec![])], ..RankLog::default() };
        let round = summarise(EngineKind::Single, &[log], 0).unwrap();
        assert_eq!((round.communication_ms, round.overlap), (None, None));
        assert_eq!(round.cards[0].utilisation_percent_mean, None);
        assert_eq!(round.cards[0].memory_peak_bytes, None);
    }

    #[test]
    fn ranks_must_agree_on_the_number_of_steps() {
        let mut logs = ddp();
        logs[1].steps.pop();
        let error = summarise(EngineKind::Ddp, &logs, 1).unwrap_err();
        assert_eq!(error.to_string(), "ranks took different numbers of steps, by rank: [3, 2]");
        assert!(summarise(EngineKind::Ddp, &ddp(), 3).is_err());
        assert!(summarise(EngineKind::Ddp, &[], 0).is_err());
    }

    #[test]
    fn a_rank_without_samples_does_not_disturb_the_loss() {
        let mut logs = ddp();
        logs[1].steps[1].samples = 0;
        logs[1].steps[1].loss = None;
        assert_eq!(summarise(EngineKind::Ddp, &logs, 1).unwrap().losses[1], 2.0);
        logs[0].steps[1].loss = None;
        assert!(summarise(EngineKind::Ddp, &logs, 1).is_err());
    }

    #[test]
    fn rows_that_fill_up_a_batch_are_no_throughput() {
        let mut logs = ddp();
        logs[0].steps[2].repeated = 28;
        let round = summarise(EngineKind::Ddp, &logs, 1).unwrap();
        assert!((round.samples_per_second.unwrap() - 28.0 / 0.055).abs() < 1e-9);
        assert_eq!(round.losses, [3.0, 3.0, 2.0]);
    }

    #[test]
    fn contradictory_accounts_give_no_utilisation() {
        let totals = CardTotals { wait_cpu: Nanos(70 * MS), ..ddp()[0].totals[0] };
        assert_eq!(utilisation_percent(&totals), None);
        let totals = CardTotals { on_cpu: Nanos(150 * MS), ..ddp()[0].totals[0] };
        assert_eq!(utilisation_percent(&totals), None);
    }

    #[test]
    fn rows_hold_the_whole_step_by_card_and_each_phase() {
        let log = RankLog {
            cards: vec![0, 1],
            steps: vec![step(0, 1.0, 5, 10, 30, vec![span(0, 1, Phase::Scatter, 11, 2)])],
            ..RankLog::default()
        };
        let rows = step_rows("dp", 2, 0, &log);
        let short: Vec<_> = rows
            .iter()
            .map(|row| (row.card, row.phase.as_str(), row.start_ns / MS, row.duration_ns / MS, row.samples))
            .collect();
        assert_eq!(
            short,
            [(0, "step", 10, 20, Some(3)), (1, "step", 10, 20, Some(2)), (1, "scatter", 11, 2, None)]
        );
    }

    #[test]
    fn a_steps_samples_are_those_that_each_card_got() {
        let samples = |cards: &[usize], weights: Option<Vec<f64>>| {
            let steps = vec![step(0, 1.0, 10, 0, 1, vec![])];
            let log = RankLog { cards: cards.to_vec(), weights, steps, ..RankLog::default() };
            let rows = step_rows("dp", 0, 0, &log);
            rows.into_iter().map(|row| (row.card, row.samples.unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(samples(&[0, 1, 2, 3], None), [(0, 3), (1, 3), (2, 3), (3, 1)]);
        // Card 1 is the output card and cuts first.
        assert_eq!(samples(&[1, 0], Some(vec![1.0, 4.0])), [(1, 2), (0, 8)]);
    }
}
