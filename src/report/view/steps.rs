//! Where the time of a step goes: on average by card, and one step as it happened.

use super::over_time::{Windows, is_ok};
use crate::config::EngineKind;
use crate::metrics::phase::Phase;
use crate::metrics::record::{Results, StepRow};
use std::collections::{BTreeMap, BTreeSet};

/// Mean milliseconds of every phase in a measured step, by engine and card.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::report) struct PhaseBars {
    pub(in crate::report) engines: Vec<EnginePhases>,
}

/// One engine's cards.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::report) struct EnginePhases {
    pub(in crate::report) engine: EngineKind,
    /// Wall time of a step.
    pub(in crate::report) step_ms: f64,
    pub(in crate::report) cards: Vec<CardPhases>,
}

/// One card.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::report) struct CardPhases {
    pub(in crate::report) card: usize,
    /// On the card's own thread, in the order of a step; they follow each other.
    pub(in crate::report) own: Vec<(Phase, f64)>,
    /// All-reduce on the communication thread, beside the others.
    pub(in crate::report) beside_ms: Option<f64>,
}

/// One step of one engine as it happened.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::report) struct Timeline {
    pub(in crate::report) engine: EngineKind,
    pub(in crate::report) round: usize,
    pub(in crate::report) step: u64,
    pub(in crate::report) length_ms: f64,
    pub(in crate::report) lanes: Vec<Lane>,
}

/// One thread's spans.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::report) struct Lane {
    pub(in crate::report) card: usize,
    pub(in crate::report) thread: Thread,
    /// In order of their starts.
    pub(in crate::report) spans: Vec<Piece>,
}

/// A phase on a lane, in milliseconds since the step began.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::report) struct Piece {
    pub(in crate::report) phase: Phase,
    pub(in crate::report) start: f64,
    pub(in crate::report) length: f64,
}

/// Which of a card's threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::report) enum Thread {
    /// Computes.
    Own,
    /// Reduces buckets while backward goes on.
    Communication,
}

/// The thread that runs a phase: only `ddp`'s all-reduce has one of its own.
pub(in crate::report) fn thread_of(phase: Phase) -> Thread {
    if phase == Phase::AllReduce { Thread::Communication } else { Thread::Own }
}

/// A phase by its name in a file; `None` for `step` and for names this build does not know.
pub(in crate::report) fn phase_named(name: &str) -> Option<Phase> {
    Phase::ALL.into_iter().find(|phase| phase.name() == name)
}

/// Means over all measured steps of all ok rounds.
pub(super) fn phases(results: &Results, steps: &[StepRow]) -> PhaseBars {
    let engines = super::shown_engines(results).into_iter().filter_map(|engine| {
        let mut walls: BTreeMap<(usize, u64), (u64, u64)> = BTreeMap::new();
        let mut sums: BTreeMap<usize, BTreeMap<Phase, u64>> = BTreeMap::new();
        for row in measured(results, steps, engine) {
            if row.phase == "step" {
                let end = row.start_ns.saturating_add(row.duration_ns);
                let wall = walls.entry((row.round, row.step)).or_insert((row.start_ns, end));
                *wall = (wall.0.min(row.start_ns), wall.1.max(end));
            } else if let Some(phase) = phase_named(&row.phase) {
                let sum = sums.entry(row.card).or_default().entry(phase).or_default();
                *sum = sum.saturating_add(row.duration_ns);
            }
        }
        let count = walls.len() as f64;
        let per_step = |sum: u64| sum as f64 / 1e6 / count;
        let cards = sums.into_iter().map(|(card, phases)| CardPhases {
            card,
            own: Phase::ALL
                .into_iter()
                .filter(|phase| thread_of(*phase) == Thread::Own)
                .filter_map(|phase| phases.get(&phase).map(|sum| (phase, per_step(*sum))))
                .collect(),
            beside_ms: phases.get(&Phase::AllReduce).map(|sum| per_step(*sum)),
        });
        let wall: u64 = walls.values().map(|(start, end)| end - start).sum();
        let cards: Vec<_> = cards.collect();
        (count > 0.0 && !cards.is_empty()).then(|| EnginePhases { engine, step_ms: per_step(wall), cards })
    });
    PhaseBars { engines: engines.collect() }
}

/// The step of median length in the last measured round of each engine.
pub(super) fn timelines(results: &Results, windows: &Windows, steps: &[StepRow]) -> Vec<Timeline> {
    super::shown_engines(results)
        .into_iter()
        .filter_map(|engine| {
            let (_, round) = *windows.range((engine, 0)..=(engine, usize::MAX)).next_back()?.0;
            let rows: Vec<&StepRow> =
                measured(results, steps, engine).filter(|row| row.round == round).collect();
            timeline(engine, round, &rows)
        })
        .collect()
}

fn timeline(engine: EngineKind, round: usize, rows: &[&StepRow]) -> Option<Timeline> {
    let mut walls: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.phase == "step") {
        let end = row.start_ns.saturating_add(row.duration_ns);
        let wall = walls.entry(row.step).or_insert((row.start_ns, end));
        *wall = (wall.0.min(row.start_ns), wall.1.max(end));
    }
    let mut by_length: Vec<(u64, u64, u64)> = walls.iter().map(|(step, (s, e))| (e - s, *step, *s)).collect();
    by_length.sort_unstable();
    let (length, step, zero) = *by_length.get(by_length.len() / 2)?;
    let mut lanes: BTreeMap<(usize, Thread), Vec<Piece>> = BTreeMap::new();
    let end = zero + length;
    for row in rows {
        // By time, not by number: a replica's last wait of a step ends in the next one and is counted there.
        let (from, to) = (row.start_ns.max(zero), row.start_ns.saturating_add(row.duration_ns).min(end));
        if let Some(phase) = phase_named(&row.phase).filter(|_| from < to) {
            let ms = |ns: u64| ns as f64 / 1e6;
            let piece = Piece { phase, start: ms(from - zero), length: ms(to - from) };
            lanes.entry((row.card, thread_of(phase))).or_default().push(piece);
        }
    }
    let lanes = lanes.into_iter().map(|((card, thread), mut spans)| {
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        Lane { card, thread, spans }
    });
    Some(Timeline { engine, round, step, length_ms: length as f64 / 1e6, lanes: lanes.collect() })
}

fn measured<'a>(
    results: &'a Results,
    steps: &'a [StepRow],
    engine: EngineKind,
) -> impl Iterator<Item = &'a StepRow> {
    let warmup = results.plan.run.warmup as u64;
    let rounds: BTreeSet<usize> = results
        .engines
        .get(engine.name())
        .map(|record| (0..record.rounds.len()).filter(|round| is_ok(results, engine, *round)).collect())
        .unwrap_or_default();
    steps
        .iter()
        .filter(move |row| row.engine == engine.name() && row.step >= warmup && rounds.contains(&row.round))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(card: usize, step: u64, phase: &str, start_ms: u64, length_ms: u64) -> StepRow {
        StepRow {
            engine: "dp".into(),
            round: 0,
            rank: 0,
            card,
            step,
            phase: phase.to_owned(),
            start_ns: start_ms * 1_000_000,
            duration_ns: length_ms * 1_000_000,
            samples: None,
            issue_ns: None,
        }
    }

    #[test]
    fn a_wait_that_ends_in_the_next_step_is_seen_in_both_and_cut_at_their_border() {
        let rows = [
            row(0, 0, "step", 100, 10),
            row(0, 0, "forward", 100, 10),
            row(1, 0, "forward", 100, 4),
            row(1, 1, "wait", 104, 8),
            row(0, 1, "step", 110, 20),
        ];
        let rows: Vec<&StepRow> = rows.iter().collect();
        // Of two steps the longer is the upper median: 20 ms from 110 on.
        let late = timeline(EngineKind::Dp, 0, &rows).unwrap();
        assert_eq!((late.step, late.length_ms), (1, 20.0));
        assert_eq!(late.lanes[0].spans, [Piece { phase: Phase::Wait, start: 0.0, length: 2.0 }]);
        let early = timeline(EngineKind::Dp, 0, &rows[..4]).unwrap();
        assert_eq!(early.lanes[1].spans[1], Piece { phase: Phase::Wait, start: 4.0, length: 6.0 });
    }
}
