//! What was read of CUDA cards becomes part of a round's record. Pure: readings in, values out.

use super::record::{CardRound, EnergySource, Round, RoundStatus};
use super::round::{RankLog, measured_window, real_samples};
use crate::units::Nanos;

/// One reading, as far as a round is summed up from it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Point {
    /// When, CLOCK_MONOTONIC.
    pub at: Nanos,
    /// Busy, of 100.
    pub utilisation_percent: Option<f64>,
    /// Bytes in use, by all processes.
    pub memory_used_bytes: Option<u64>,
    /// Counter.
    pub energy_mj: Option<u64>,
    /// Draw.
    pub power_mw: Option<u64>,
}

/// All readings of one card in one round, in order of time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series {
    /// Position in the run's card list.
    pub card: usize,
    /// The readings.
    pub points: Vec<Point>,
}

/// Fewest readings whose mean stands for a round.
const FEWEST: usize = 3;

/// Adds to a round what its cards' readings say. The engine's steps are those of `logs` after `warmup`.
pub fn add(round: &mut Round, logs: &[RankLog], warmup: usize, series: &[Series]) {
    let Some(window) = measured_window(logs, warmup).filter(|_| round.status == RoundStatus::Ok) else {
        return;
    };
    for card in &mut round.cards {
        if let Some(series) = series.iter().find(|series| series.card == card.index) {
            add_card(card, &series.points, window);
        }
    }
    let energy: Option<f64> = round.cards.iter().map(|card| card.energy_joules).sum();
    let samples = real_samples(logs, warmup);
    round.joules_per_sample =
        energy.filter(|_| samples > 0 && !round.cards.is_empty()).map(|energy| energy / samples as f64);
}

fn add_card(card: &mut CardRound, points: &[Point], window: (Nanos, Nanos)) {
    let inside = || points.iter().filter(|point| (window.0..=window.1).contains(&point.at));
    let utilisation: Vec<f64> = inside().filter_map(|point| point.utilisation_percent).collect();
    card.utilisation_percent_mean =
        (utilisation.len() >= FEWEST).then(|| utilisation.iter().sum::<f64>() / utilisation.len() as f64);
    card.memory_used_peak_bytes = inside().filter_map(|point| point.memory_used_bytes).max();
    let counted = values(points, |point| point.energy_mj.map(|energy| energy as f64));
    let drawn = values(points, |point| point.power_mw.map(|power| power as f64));
    let counter = at(&counted, window.1)
        .zip(at(&counted, window.0))
        .map(|(end, start)| (end - start) / 1e3)
        .filter(|joules| *joules >= 0.0);
    (card.energy_joules, card.energy_source) = match counter {
        Some(joules) => (Some(joules), Some(EnergySource::Counter)),
        None => match integral(&drawn, window) {
            Some(joules) => (Some(joules), Some(EnergySource::Power)),
            None => (None, None),
        },
    };
}

fn values(points: &[Point], value: impl Fn(&Point) -> Option<f64>) -> Vec<(f64, f64)> {
    points.iter().filter_map(|point| Some((point.at.as_seconds(), value(point)?))).collect()
}

/// The value at a moment, on the line between its neighbours; `None` outside of what was read.
fn at(values: &[(f64, f64)], moment: Nanos) -> Option<f64> {
    let moment = moment.as_seconds();
    let after = values.iter().position(|(time, _)| *time >= moment)?;
    let (later, end) = values[after];
    if later == moment {
        return Some(end);
    }
    let (earlier, start) = *values.get(after.checked_sub(1)?)?;
    Some(start + (end - start) * (moment - earlier) / (later - earlier))
}

/// Joules, from milliwatts: trapezia between readings, the edges of the window on the lines between theirs.
fn integral(values: &[(f64, f64)], window: (Nanos, Nanos)) -> Option<f64> {
    let (first, last) = (at(values, window.0)?, at(values, window.1)?);
    let (start, end) = (window.0.as_seconds(), window.1.as_seconds());
    let inside = values.iter().copied().filter(|(time, _)| *time > start && *time < end);
    let all: Vec<(f64, f64)> =
        std::iter::once((start, first)).chain(inside).chain(std::iter::once((end, last))).collect();
    let millijoules: f64 =
        all.windows(2).map(|pair| (pair[1].0 - pair[0].0) * (pair[0].1 + pair[1].1) / 2.0).sum();
    Some(millijoules / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn card() -> CardRound {
        CardRound {
            index: 0,
            utilisation_percent_mean: None,
            compute_ms: None,
            communication_ms: None,
            wait_ms: None,
            memory_peak_bytes: Some(5),
            energy_joules: None,
            energy_source: None,
            memory_used_peak_bytes: None,
        }
    }

    fn point(at: u64, energy_mj: Option<u64>, power_mw: Option<u64>) -> Point {
        Point {
            at: Nanos(at * S),
            energy_mj,
            power_mw,
            utilisation_percent: Some(50.0),
            memory_used_bytes: Some(at),
        }
    }

    fn judged(points: &[Point]) -> CardRound {
        let mut card = card();
        add_card(&mut card, points, (Nanos(3 * S / 2), Nanos(7 * S / 2)));
        card
    }

    #[test]
    fn energy_is_the_counter_between_the_edges_of_the_window() {
        // 100 W for 4 s; the window is 1.5 s to 3.5 s.
        let points: Vec<Point> = (1..=5).map(|s| point(s, Some(1_000_000 + s * 100_000), Some(1))).collect();
        let card = judged(&points);
        assert_eq!((card.energy_joules, card.energy_source), (Some(200.0), Some(EnergySource::Counter)));
        assert_eq!(card.memory_used_peak_bytes, Some(3));
        assert_eq!(card.memory_peak_bytes, Some(5));
    }

    #[test]
    fn without_a_counter_power_is_integrated_and_says_so() {
        // 100 W at 1 s, rising by 100 W a second: 150 W at 1.5 s, 350 W at 3.5 s.
        let points: Vec<Point> = (1..=5).map(|s| point(s, None, Some(s * 100_000))).collect();
        let card = judged(&points);
        assert_eq!((card.energy_joules, card.energy_source), (Some(500.0), Some(EnergySource::Power)));
    }

    #[test]
    fn what_was_not_read_on_both_sides_is_missing() {
        let points: Vec<Point> = (2..=5).map(|s| point(s, Some(s), None)).collect();
        assert_eq!(judged(&points).energy_joules, None);
        assert_eq!(judged(&[]).energy_source, None);
    }

    // Field case 095.
    #[test]
    fn too_few_readings_are_no_utilisation() {
        let few: Vec<Point> = (2..=3).map(|s| point(s, None, None)).collect();
        assert_eq!(judged(&few).utilisation_percent_mean, None);
        let enough: Vec<Point> =
            (3..=7).map(|half| Point { at: Nanos(half * S / 2), ..point(0, None, None) }).collect();
        assert_eq!(judged(&enough).utilisation_percent_mean, Some(50.0));
    }
}
