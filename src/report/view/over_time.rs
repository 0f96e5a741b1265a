//! What the sampler saw of each card, round after round on one time line.

use crate::config::EngineKind;
use crate::metrics::record::{EngineRecord, Results, RoundStatus, SampleRow, StepRow};
use std::collections::BTreeMap;

/// One quantity of every card over time, engine by engine.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::report) struct OverTime {
    pub(in crate::report) engines: Vec<EngineTracks>,
}

/// One engine's cards. Rounds follow each other without the pauses between them.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::report) struct EngineTracks {
    pub(in crate::report) engine: EngineKind,
    pub(in crate::report) tracks: Vec<Track>,
    /// Where rounds begin and end, in seconds: one more than there are rounds.
    pub(in crate::report) borders: Vec<f64>,
}

/// One card.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::report) struct Track {
    pub(in crate::report) card: usize,
    /// Seconds of measuring, and the value; `None` breaks the line.
    pub(in crate::report) points: Vec<Point>,
    /// The exact mean of the whole run, where there is one.
    pub(in crate::report) mean: Option<f64>,
    /// Where the card stopped answering, in seconds of measuring.
    pub(in crate::report) lost: Option<f64>,
}

/// A moment and a value.
pub(in crate::report) type Point = (f64, Option<f64>);

impl OverTime {
    /// Length of the longest engine's time line, in seconds.
    pub(in crate::report) fn seconds(&self) -> f64 {
        self.engines.iter().filter_map(|engine| engine.borders.last().copied()).fold(0.0, f64::max)
    }

    /// All values there are.
    pub(in crate::report) fn values(&self) -> impl Iterator<Item = f64> {
        self.engines.iter().flat_map(|e| &e.tracks).flat_map(|t| &t.points).filter_map(|(_, value)| *value)
    }
}

/// Busy percent. A reading is the mean since the one before it, so it is drawn as a step over that time.
pub(super) fn utilisation(results: &Results, windows: &Windows, samples: &[SampleRow]) -> OverTime {
    let period = results.plan.sample.period_ms * 1_000_000;
    over_time(
        results,
        windows,
        samples,
        |engine, card| {
            let summary = engine.summary.as_ref()?;
            summary.cards.iter().find(|c| c.index == card)?.utilisation_percent_mean
        },
        |window, rows| {
            let mut points = Vec::with_capacity(rows.len() * 2);
            let mut before: Option<u64> = None;
            for row in rows {
                let from = before.unwrap_or_else(|| row.t_ns.saturating_sub(period)).min(row.t_ns);
                before = Some(row.t_ns);
                let (start, end) = (from.max(window.start), row.t_ns.min(window.end));
                // Mostly outside the measured steps: it says more of warm-up than of them.
                if end <= start || (end - start) * 2 < row.t_ns - from {
                    continue;
                }
                points.push((window.seconds(start), row.utilisation_percent));
                points.push((window.seconds(end), row.utilisation_percent));
            }
            points
        },
    )
}

/// Live bytes at each reading.
pub(super) fn memory(results: &Results, windows: &Windows, samples: &[SampleRow]) -> OverTime {
    over_time(
        results,
        windows,
        samples,
        |_, _| None,
        |window, rows| {
            rows.iter()
                .filter(|row| (window.start..=window.end).contains(&row.t_ns))
                .map(|row| (window.seconds(row.t_ns), row.memory_used_bytes.map(|bytes| bytes as f64)))
                .collect()
        },
    )
}

/// The measured steps of one round, and where it is put on the engine's time line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Window {
    start: u64,
    end: u64,
    offset: f64,
}

impl Window {
    fn seconds(&self, t_ns: u64) -> f64 {
        self.offset + t_ns.saturating_sub(self.start) as f64 / 1e9
    }
}

/// Start and end of the measured steps of every ok round, CLOCK_MONOTONIC nanoseconds.
pub(super) type Windows = BTreeMap<(EngineKind, usize), (u64, u64)>;

/// From the `step` rows after warm-up.
pub(super) fn windows(results: &Results, steps: &[StepRow]) -> Windows {
    let mut windows = Windows::new();
    let measured =
        steps.iter().filter(|row| row.phase == "step" && row.step >= results.plan.run.warmup as u64);
    for row in measured {
        // Rows that try an option are not drawn over time: their figures stand in a table.
        let Some(engine) = EngineKind::from_name(&row.engine) else { continue };
        if !is_ok(results, engine, row.round) {
            continue;
        }
        let end = row.start_ns.saturating_add(row.duration_ns);
        let window = windows.entry((engine, row.round)).or_insert((row.start_ns, end));
        *window = (window.0.min(row.start_ns), window.1.max(end));
    }
    windows
}

/// Whether that round was measured to its end.
pub(super) fn is_ok(results: &Results, engine: EngineKind, round: usize) -> bool {
    let record = results.engines.get(engine.name());
    record.and_then(|record| record.rounds.get(round)).is_some_and(|round| round.status == RoundStatus::Ok)
}

fn over_time(
    results: &Results,
    windows: &Windows,
    samples: &[SampleRow],
    mean: impl Fn(&EngineRecord, usize) -> Option<f64>,
    points: impl Fn(&Window, &[&SampleRow]) -> Vec<Point>,
) -> OverTime {
    let mut by_card: BTreeMap<(EngineKind, usize, usize), Vec<&SampleRow>> = BTreeMap::new();
    for row in samples {
        if let Some(engine) = EngineKind::from_name(&row.engine) {
            by_card.entry((engine, row.round, row.card)).or_default().push(row);
        }
    }
    for rows in by_card.values_mut() {
        rows.sort_by_key(|row| row.t_ns);
    }
    let engines = super::shown_engines(results).into_iter().filter_map(|engine| {
        let record = results.engines.get(engine.name())?;
        let mut borders = vec![0.0];
        let mut tracks: BTreeMap<usize, Vec<Point>> =
            (0..record.cards).map(|card| (card, Vec::new())).collect();
        for ((_, round), (start, end)) in windows.range((engine, 0)..=(engine, usize::MAX)) {
            let offset = borders.last().copied().unwrap_or(0.0);
            let window = Window { start: *start, end: *end, offset };
            for (card, track) in &mut tracks {
                if let Some(rows) = by_card.get(&(engine, *round, *card)) {
                    track.extend(points(&window, rows));
                }
                // Rounds are apart in truth: no line from one to the next.
                track.push((window.seconds(*end), None));
            }
            borders.push(window.seconds(*end));
        }
        let tracks = tracks.into_iter().map(|(card, points)| {
            let lost = lost_since(results, card)
                .and_then(|since| second_of(since, windows.range((engine, 0)..=(engine, usize::MAX))));
            Track { card, points, mean: mean(record, card), lost }
        });
        (borders.len() > 1).then(|| EngineTracks { engine, tracks: tracks.collect(), borders })
    });
    OverTime { engines: engines.collect() }
}

/// When a card stopped answering to NVML, if it did.
fn lost_since(results: &Results, card: usize) -> Option<u64> {
    let cards = &results.monitoring.as_ref()?.cards;
    cards.iter().find(|watched| watched.index == card)?.lost_since_ns
}

/// A moment on an engine's time line: the start of the next round where it lies between two; `None` after the last.
fn second_of<'a>(
    moment: u64,
    rounds: impl Iterator<Item = (&'a (EngineKind, usize), &'a (u64, u64))>,
) -> Option<f64> {
    let mut offset = 0.0;
    for (_, &(start, end)) in rounds {
        let window = Window { start, end, offset };
        if moment <= end {
            return Some(window.seconds(moment));
        }
        offset = window.seconds(end);
    }
    None
}

/// Fewer points that look the same in `columns` columns of pixels: each column keeps its first, smallest,
/// largest and last value in order, and its gaps.
pub(in crate::report) fn downsample(points: &[Point], seconds: f64, columns: usize) -> Vec<Point> {
    if points.len() <= columns * 4 || seconds <= 0.0 {
        return points.to_vec();
    }
    let column = |point: &Point| ((point.0 / seconds * columns as f64) as usize).min(columns);
    points
        .chunk_by(|a, b| column(a) == column(b) && a.1.is_some() == b.1.is_some())
        .flat_map(extremes)
        .collect()
}

/// First, smallest, largest and last of a run of points, in order and each once.
fn extremes(run: &[Point]) -> Vec<Point> {
    let value = |i: &usize| run[*i].1.unwrap_or(f64::NAN);
    let smallest = (0..run.len()).min_by(|a, b| value(a).total_cmp(&value(b)));
    let largest = (0..run.len()).max_by(|a, b| value(a).total_cmp(&value(b)));
    let mut keep: Vec<usize> =
        [Some(0), smallest, largest, run.len().checked_sub(1)].into_iter().flatten().collect();
    keep.sort_unstable();
    keep.dedup();
    keep.into_iter().map(|i| run[i]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downsampling_keeps_extremes_and_gaps() {
        let mut points: Vec<Point> = (0..100_000).map(|i| (f64::from(i) * 1e-3, Some(50.0))).collect();
        points[12_345].1 = Some(100.0);
        points[54_321].1 = Some(0.0);
        points[77_777].1 = None;
        let fewer = downsample(&points, 100.0, 400);
        assert!(fewer.len() < 2000, "{}", fewer.len());
        assert!(fewer.contains(&points[12_345]) && fewer.contains(&points[54_321]));
        assert!(fewer.contains(&points[77_777]), "a gap stays a gap");
        assert!(fewer.windows(2).all(|pair| pair[0].0 <= pair[1].0));
        assert_eq!((fewer[0], fewer[fewer.len() - 1]), (points[0], points[99_999]));
    }

    #[test]
    fn a_moment_between_two_rounds_is_the_start_of_the_next() {
        const S: u64 = 1_000_000_000;
        let mut windows = Windows::new();
        windows.insert((EngineKind::Ddp, 0), (10 * S, 12 * S));
        windows.insert((EngineKind::Ddp, 1), (20 * S, 24 * S));
        let at = |moment| second_of(moment * S, windows.range(..));
        assert_eq!((at(11), at(15), at(21)), (Some(1.0), Some(2.0), Some(3.0)));
        assert_eq!(at(30), None);
    }

    #[test]
    fn few_points_are_left_alone() {
        let points = [(0.0, Some(1.0)), (1.0, None)];
        assert_eq!(downsample(&points, 1.0, 400), points);
    }
}
