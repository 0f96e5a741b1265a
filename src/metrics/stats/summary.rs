//! One engine over its rounds, and two engines against each other.

use super::bootstrap::median_interval;
use super::describe::{median, refuse_non_finite};
use crate::Result;
use crate::config::{EngineKind, Layout};
use crate::metrics::record::{
    CardRound, EngineRecord, Estimate, Imbalance, Ratio, Round, RoundStatus, Scaling, Spread, Summary,
};
use std::collections::BTreeMap;

/// What an engine's ok rounds say together; `None` without one. `engines` are all of the run: the
/// single-card ones are what scaling is measured against.
pub fn summarise(
    name: &str,
    record: &EngineRecord,
    engines: &BTreeMap<String, EngineRecord>,
    seed: u64,
) -> Result<Option<Summary>> {
    let ok: Vec<&Round> = ok_rounds(record).map(|(_, round)| round).collect();
    let throughput: Vec<f64> = ok.iter().filter_map(|round| round.samples_per_second).collect();
    let label = format!("samples_per_second of {name}");
    refuse_non_finite(&label, &throughput)?;
    let Some((samples_per_second, step_ms)) = median(&throughput).zip(median_spread(name, &ok)?) else {
        return Ok(None);
    };
    let cards = median_cards(name, &ok)?;
    Ok(Some(Summary {
        samples_per_second: Estimate {
            median: samples_per_second,
            ci95: median_interval(&label, &throughput, seed)?,
        },
        step_ms,
        scaling_efficiency: scaling(name, record, engines)?,
        joules_per_sample: joules_per_sample(name, &ok, seed)?,
        imbalance: if record.cards < 2 {
            Imbalance::default()
        } else {
            Imbalance {
                utilisation: imbalance(cards.iter().map(|card| card.utilisation_percent_mean)),
                memory: imbalance(cards.iter().map(|card| card.memory_peak_bytes.map(|bytes| bytes as f64))),
            }
        },
        cards,
    }))
}

fn joules_per_sample(name: &str, rounds: &[&Round], seed: u64) -> Result<Option<Estimate>> {
    let label = format!("joules_per_sample of {name}");
    let values: Vec<f64> = rounds.iter().filter_map(|round| round.joules_per_sample).collect();
    refuse_non_finite(&label, &values)?;
    let ci95 = median_interval(&label, &values, seed)?;
    Ok(median(&values).map(|median| Estimate { median, ci95 }))
}

/// Throughput of `over` over `base`: the median of the ratios of paired rounds. Drift of the machine
/// between rounds hits both halves of a pair, so it leaves the ratio alone. `None` without a pair.
pub fn ratio(
    over_name: &str,
    over: &EngineRecord,
    base_name: &str,
    base: &EngineRecord,
    seed: u64,
) -> Result<Option<Ratio>> {
    let name = format!("throughput of {over_name} over {base_name}");
    let ratios = paired_ratios(over, base);
    refuse_non_finite(&name, &ratios)?;
    let ci95 = median_interval(&name, &ratios, seed)?;
    Ok(median(&ratios).map(|ratio| Ratio { ratio, ci95 }))
}

/// One ratio of throughputs for each round that both engines finished. A round at zero throughput
/// makes no ratio: there is nothing that it could be a multiple of.
pub fn paired_ratios(over: &EngineRecord, base: &EngineRecord) -> Vec<f64> {
    over.rounds
        .iter()
        .zip(&base.rounds)
        .filter(|(a, b)| a.status == RoundStatus::Ok && b.status == RoundStatus::Ok)
        .filter_map(|(a, b)| a.samples_per_second.zip(b.samples_per_second))
        .filter(|(_, b)| *b != 0.0)
        .map(|(a, b)| a / b)
        .collect()
}

/// Scaling efficiency, 1.0 = perfect: throughput on n cards over n times the throughput of one card,
/// by paired rounds. Weak: one card at the per-card batch. Strong: one card at the global batch.
pub fn scaling(
    name: &str,
    record: &EngineRecord,
    engines: &BTreeMap<String, EngineRecord>,
) -> Result<Scaling> {
    // Peers scale against PyTorch on one card, which has no row at the per-card batch.
    let kind = EngineKind::from_name(name.split('[').next().unwrap_or_default());
    let bases: &[EngineKind] = match kind {
        Some(kind) if kind.layout() == Layout::OneCard => return Ok(Scaling::default()),
        Some(kind) if kind.is_peer() => &[EngineKind::TorchSingle],
        _ => &[EngineKind::Single, EngineKind::SinglePerCard],
    };
    let against = |batch: usize| {
        // On one card both batches are the same, and `single` serves as either.
        let base =
            bases.iter().filter_map(|kind| engines.get(kind.name())).find(|base| base.global_batch == batch);
        base.and_then(|base| median(&paired_ratios(record, base))).map(|ratio| ratio / record.cards as f64)
    };
    let scaling = Scaling { weak: against(record.batch_per_card), strong: against(record.global_batch) };
    for (label, value) in [("weak", scaling.weak), ("strong", scaling.strong)] {
        refuse_non_finite(&format!("{label} scaling of {name}"), value.as_slice())?;
    }
    Ok(scaling)
}

/// Largest over mean across cards, 1.0 = even. `None` where a card's value is missing, where there
/// are no cards, and where all are zero.
pub fn imbalance(values: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    let values: Vec<f64> = values.into_iter().collect::<Option<_>>()?;
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let largest = values.into_iter().reduce(f64::max)?;
    (mean > 0.0 && largest.is_finite()).then(|| largest / mean)
}

/// The ok rounds with their index.
pub(super) fn ok_rounds(record: &EngineRecord) -> impl Iterator<Item = (usize, &Round)> {
    record.rounds.iter().enumerate().filter(|(_, round)| round.status == RoundStatus::Ok)
}

/// Each figure of a step's spread, as its median over rounds.
fn median_spread(name: &str, rounds: &[&Round]) -> Result<Option<Spread>> {
    let of = |figure: fn(&Spread) -> f64| -> Result<Option<f64>> {
        let values: Vec<f64> = rounds.iter().filter_map(|round| round.step_ms.as_ref().map(figure)).collect();
        refuse_non_finite(&format!("step_ms of {name}"), &values)?;
        Ok(median(&values))
    };
    let (p5, middle, p95, mean) = (of(|s| s.p5)?, of(|s| s.median)?, of(|s| s.p95)?, of(|s| s.mean)?);
    Ok((|| Some(Spread { median: middle?, p5: p5?, p95: p95?, mean: mean? }))())
}

/// Each card's figures as medians over the rounds that have them.
fn median_cards(name: &str, rounds: &[&Round]) -> Result<Vec<CardRound>> {
    let mut by_index: BTreeMap<usize, Vec<&CardRound>> = BTreeMap::new();
    for card in rounds.iter().flat_map(|round| &round.cards) {
        by_index.entry(card.index).or_default().push(card);
    }
    let median_card = |(index, cards): (usize, Vec<&CardRound>)| {
        let of = |key: &str, figure: fn(&CardRound) -> Option<f64>| -> Result<Option<f64>> {
            let values: Vec<f64> = cards.iter().filter_map(|card| figure(card)).collect();
            refuse_non_finite(&format!("{key} of {name}, card {index}"), &values)?;
            Ok(median(&values))
        };
        Ok(CardRound {
            index,
            utilisation_percent_mean: of("utilisation_percent_mean", |card| card.utilisation_percent_mean)?,
            compute_ms: of("compute_ms", |card| card.compute_ms)?,
            communication_ms: of("communication_ms", |card| card.communication_ms)?,
            wait_ms: of("wait_ms", |card| card.wait_ms)?,
            memory_peak_bytes: of("memory_peak_bytes", |card| card.memory_peak_bytes.map(|b| b as f64))?
                .map(|bytes| bytes.round() as u64),
            energy_joules: of("energy_joules", |card| card.energy_joules)?,
            // Of different kinds they do not add up: then it is nobody's.
            energy_source: cards
                .iter()
                .map(|card| card.energy_source)
                .reduce(|a, b| if a == b { a } else { None })
                .flatten(),
            memory_used_peak_bytes: of("memory_used_peak_bytes", |card| {
                card.memory_used_peak_bytes.map(|bytes| bytes as f64)
            })?
            .map(|bytes| bytes.round() as u64),
        })
    };
    by_index.into_iter().map(median_card).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(samples_per_second: f64) -> Round {
        Round {
            status: RoundStatus::Ok,
            error: None,
            samples_per_second: Some(samples_per_second),
            step_ms: Some(Spread { median: 10.0, p5: 9.0, p95: 12.0, mean: 10.5 }),
            phases_ms: BTreeMap::new(),
            issue_ms: BTreeMap::new(),
            losses: vec![],
            communication_ms: None,
            exposed_communication_ms: None,
            gradient_bytes: None,
            overlap: None,
            joules_per_sample: None,
            link: None,
            cards: vec![],
            weights_digests: vec![],
            skipped_steps: 0,
            start_ms: None,
        }
    }

    fn engine(cards: usize, global_batch: usize, throughputs: &[f64]) -> EngineRecord {
        EngineRecord {
            tried: None,
            cards,
            global_batch,
            batch_per_card: global_batch / cards,
            rounds: throughputs.iter().map(|t| round(*t)).collect(),
            summary: None,
        }
    }

    #[test]
    fn the_ratio_is_the_median_of_paired_ratios_not_the_ratio_of_medians() {
        // Pairs 2, 1.5, 1: median 1.5, where the medians 200 and 100 would give 2.
        let over = engine(2, 64, &[200.0, 300.0, 10.0]);
        let base = engine(2, 64, &[100.0, 200.0, 10.0]);
        let got = ratio("ddp", &over, "dp", &base, 0).unwrap().unwrap();
        assert_eq!(got, Ratio { ratio: 1.5, ci95: None });
        assert_eq!(median(&[200.0, 300.0, 10.0]).unwrap() / median(&[100.0, 200.0, 10.0]).unwrap(), 2.0);
    }

    #[test]
    fn a_failed_round_takes_its_pair_with_it() {
        let mut over = engine(2, 64, &[200.0, 300.0]);
        over.rounds[0].status = RoundStatus::Failed;
        let base = engine(2, 64, &[100.0, 200.0, 50.0]);
        assert_eq!(paired_ratios(&over, &base), [1.5]);
    }

    #[test]
    fn a_base_of_zero_makes_no_ratio() {
        let (zero, some) = (engine(2, 64, &[0.0]), engine(2, 64, &[12.0]));
        assert_eq!(ratio("ddp", &some, "dp", &zero, 0).unwrap(), None);
        assert_eq!(ratio("ddp", &zero, "dp", &zero, 0).unwrap(), None);
        assert_eq!(ratio("ddp", &zero, "dp", &some, 0).unwrap().unwrap().ratio, 0.0);
    }

    #[test]
    fn scaling_divides_by_the_cards_and_picks_its_batch() {
        let engines = BTreeMap::from([
            ("single".to_owned(), engine(1, 64, &[100.0])),
            ("single_per_card".to_owned(), engine(1, 32, &[80.0])),
        ]);
        let ddp = engine(2, 64, &[150.0]);
        // strong: 150 / (2 x 100); weak: 150 / (2 x 80).
        let got = scaling("ddp", &ddp, &engines).unwrap();
        assert_eq!(got, Scaling { weak: Some(0.9375), strong: Some(0.75) });
        assert_eq!(scaling("ddp", &ddp, &BTreeMap::new()).unwrap(), Scaling::default());
        assert_eq!(scaling("single", &engines["single"], &engines).unwrap(), Scaling::default());
    }

    #[test]
    fn imbalance_is_largest_over_mean() {
        assert_eq!(imbalance([Some(90.0), Some(30.0)]), Some(1.5));
        assert_eq!(imbalance([Some(50.0), Some(50.0)]), Some(1.0));
        assert_eq!(imbalance([Some(90.0), None]), None);
        assert_eq!(imbalance([Some(0.0), Some(0.0)]), None);
        assert_eq!(imbalance([]), None);
    }

    #[test]
    fn a_summary_takes_medians_over_ok_rounds_by_card() {
        let mut record = engine(2, 64, &[100.0, 110.0, 120.0]);
        for (round, utilisation) in record.rounds.iter_mut().zip([[90.0, 30.0], [80.0, 40.0], [70.0, 50.0]]) {
            round.cards = utilisation
                .iter()
                .enumerate()
                .map(|(index, percent)| CardRound {
                    index,
                    utilisation_percent_mean: Some(*percent),
                    compute_ms: Some(5.0),
                    communication_ms: None,
                    wait_ms: None,
                    memory_peak_bytes: Some(if index == 0 { 300 } else { 100 }),
                    energy_source: None,
                    memory_used_peak_bytes: None,
                    energy_joules: None,
                })
                .collect();
        }
        let summary = summarise("dp", &record, &BTreeMap::new(), 0).unwrap().unwrap();
        assert_eq!(summary.samples_per_second, Estimate { median: 110.0, ci95: None });
        assert_eq!(summary.cards[0].utilisation_percent_mean, Some(80.0));
        assert_eq!(summary.cards[1].utilisation_percent_mean, Some(40.0));
        assert_eq!(summary.cards[1].communication_ms, None);
        // 80 / 60 and 300 / 200.
        assert_eq!(summary.imbalance, Imbalance { utilisation: Some(80.0 / 60.0), memory: Some(1.5) });
    }

    #[test]
    fn an_engine_without_an_ok_round_has_no_summary() {
        let mut record = engine(2, 64, &[100.0]);
        record.rounds[0].status = RoundStatus::Failed;
        assert_eq!(summarise("dp", &record, &BTreeMap::new(), 0).unwrap(), None);
    }

    #[test]
    fn a_throughput_that_is_not_a_number_is_refused_by_name() {
        let record = engine(2, 64, &[100.0, f64::INFINITY]);
        let error = summarise("dp", &record, &BTreeMap::new(), 0).unwrap_err();
        assert_eq!(error.to_string(), "samples_per_second of dp: value 1 of 2 is inf");
    }
}
