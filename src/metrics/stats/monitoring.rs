//! What monitoring has to say that a reader must not miss: decided by what was read, never by a chip's name.

use crate::metrics::record::{CardMonitoring, Monitoring, Results, RoundStatus, UtilisationKind, Warning};
use crate::units::bytes;

/// Readings from which "always zero" is more than chance.
const ENOUGH: u64 = 5;

/// The longest time that the driver's utilisation is an average over.
const DRIVER_WINDOW_S: f64 = 1.0;

/// Reasons for low clocks that something is wrong with, unlike a power limit or an idle card.
const HEAT_AND_POWER: [&str; 4] = ["hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"];

/// Warnings about a run's monitoring; none on virtual cards.
pub fn monitoring_warnings(results: &Results) -> Vec<Warning> {
    let Some(monitoring) = &results.monitoring else { return Vec::new() };
    let mut warnings = Vec::new();
    let mut warn = |code: &str, message: String, hint: &str| {
        let hint = (!hint.is_empty()).then(|| hint.to_owned());
        warnings.push(Warning { code: code.to_owned(), message, hint });
    };
    if let Some(why) = &monitoring.unavailable {
        let what = format!(
            "monitoring is unavailable: {why}; utilisation, memory and energy of the cards are missing"
        );
        warn("monitoring_unavailable", what, "`dp-vs-ddp doctor` says what this machine has");
    }
    for card in &monitoring.cards {
        let index = card.index;
        if card.lost_since_ns.is_some() {
            let what =
                format!("card {index} ({}) stopped answering to NVML; its readings end there", card.uuid);
            warn(
                "card_lost",
                what,
                "look for Xid errors in `dmesg`; in a container, it may have lost its devices: restart it",
            );
        }
        if always_zero(card, "utilisation_percent") && worked(results, index) {
            let what = format!(
                "card {index}: NVML said 0 % busy in every reading, though the card worked; that is no idleness but a figure nobody keeps"
            );
            warn(
                "suspicious_zero",
                what,
                "believe the compute and communication times, which are measured by events",
            );
        }
        if unbacked_controller(card) {
            let what = format!(
                "card {index}: NVML's memory controller figure is 0 in every reading of a busy card: it is not kept, not idle"
            );
            warn("unbacked_field", what, "");
        }
        if let Some(foreign) = card.foreign_memory_peak_bytes.filter(|bytes| *bytes > 0) {
            let what = format!(
                "other processes used {} of card {index}: they may have taken its time, too",
                bytes(foreign)
            );
            warn(
                "foreign_processes",
                what,
                "`nvidia-smi` shows which; stop them, or leave the card out with --devices",
            );
        }
        let hot: Vec<&str> =
            HEAT_AND_POWER.into_iter().filter(|reason| card.throttle.contains_key(*reason)).collect();
        if !hot.is_empty() {
            let what = format!(
                "card {index} was slowed down ({}): its times are not those of a healthy card",
                hot.join(", ")
            );
            warn("throttled", what, "check cooling and power supply (`nvidia-smi -q -d PERFORMANCE`)");
        }
    }
    for (engine, card, busy, computing) in busy_but_waiting(results) {
        let what = format!(
            "{engine}, card {card}: NVML said {busy:.0} % busy, but only {computing:.0} % of the time was computing: kernels that wait for other cards count as busy"
        );
        warn("busy_but_waiting", what, "");
    }
    if let Some(seconds) = shortest_round(results).filter(|seconds| *seconds < DRIVER_WINDOW_S)
        && monitoring.cards.iter().any(|card| card.utilisation == Some(UtilisationKind::Point))
    {
        let what = format!(
            "rounds of {seconds:.2} s are too short for utilisation: the driver's is an average over up to a second"
        );
        warn("too_short_for_utilisation", what, "raise run.steps");
    }
    if different_power(monitoring) {
        let what = "power readings of some cards are averages and of others a moment's draw: they cannot be compared".to_owned();
        warn("power_kinds_differ", what, "compare energy, where the cards count it");
    }
    warnings
}

fn always_zero(card: &CardMonitoring, field: &str) -> bool {
    card.fields
        .get(field)
        .is_some_and(|account| account.samples >= ENOUGH && account.zeros == account.samples)
}

/// One status covers two numbers; where the second one is not kept, it is 0.
fn unbacked_controller(card: &CardMonitoring) -> bool {
    let utilisation = card.fields.get("utilisation_percent");
    let busy =
        utilisation.is_some_and(|account| account.samples >= ENOUGH && account.zeros * 2 < account.samples);
    busy && always_zero(card, "memory_controller_percent")
}

/// Whether our own timers saw the card work.
fn worked(results: &Results, index: usize) -> bool {
    let cards = results.engines.values().flat_map(|engine| &engine.rounds).flat_map(|round| &round.cards);
    cards.filter(|card| card.index == index).any(|card| card.compute_ms.is_some_and(|ms| ms > 0.0))
}

/// Engine, card, NVML's busy percent and our computing percent, where they tell different stories.
fn busy_but_waiting(results: &Results) -> Vec<(&str, usize, f64, f64)> {
    const BUSY: f64 = 90.0;
    const COMPUTING: f64 = 50.0;
    let mut found = Vec::new();
    for (name, record) in &results.engines {
        let Some(summary) = record.summary.as_ref().filter(|_| record.cards > 1) else { continue };
        for card in &summary.cards {
            let computing = card.compute_ms.map(|ms| 100.0 * ms / summary.step_ms.mean);
            if let (Some(busy), Some(computing)) = (card.utilisation_percent_mean, computing)
                && busy >= BUSY
                && computing < COMPUTING
            {
                found.push((name.as_str(), card.index, busy, computing));
            }
        }
    }
    found
}

/// Length of the shortest round that was measured, in seconds.
fn shortest_round(results: &Results) -> Option<f64> {
    let steps = results.plan.run.steps as f64;
    let rounds = results.engines.values().flat_map(|engine| &engine.rounds);
    let lengths = rounds.filter(|round| round.status == RoundStatus::Ok).filter_map(|round| round.step_ms);
    lengths.map(|step| step.mean * steps / 1e3).reduce(f64::min)
}

fn different_power(monitoring: &Monitoring) -> bool {
    let mut kinds = monitoring.cards.iter().filter_map(|card| card.power);
    let first = kinds.next();
    kinds.any(|kind| Some(kind) != first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::record::FieldAccount;
    use std::collections::BTreeMap;

    fn card(fields: &[(&str, u64, u64)]) -> CardMonitoring {
        let account = |samples, zeros| FieldAccount { samples, zeros, ..FieldAccount::default() };
        CardMonitoring {
            index: 0,
            uuid: "GPU-a".into(),
            power: None,
            utilisation: None,
            unified_memory: false,
            lost_since_ns: None,
            foreign_memory_peak_bytes: None,
            throttle: BTreeMap::new(),
            fields: fields
                .iter()
                .map(|(name, samples, zeros)| ((*name).to_owned(), account(*samples, *zeros)))
                .collect(),
        }
    }

    // Field cases 076 and 106: the figures decide, and few of them decide nothing.
    #[test]
    fn a_field_is_unbacked_when_it_is_zero_in_a_busy_card() {
        let busy = ("utilisation_percent", 500, 3);
        assert!(unbacked_controller(&card(&[busy, ("memory_controller_percent", 500, 500)])));
        assert!(!unbacked_controller(&card(&[busy, ("memory_controller_percent", 500, 499)])));
        assert!(!unbacked_controller(&card(&[
            ("utilisation_percent", 500, 500),
            ("memory_controller_percent", 500, 500)
        ])));
        assert!(!unbacked_controller(&card(&[
            ("utilisation_percent", 4, 0),
            ("memory_controller_percent", 4, 4)
        ])));
    }

    #[test]
    fn zeros_are_suspicious_only_when_there_are_enough_and_nothing_else() {
        assert!(always_zero(&card(&[("utilisation_percent", 5, 5)]), "utilisation_percent"));
        assert!(!always_zero(&card(&[("utilisation_percent", 4, 4)]), "utilisation_percent"));
        assert!(!always_zero(&card(&[("utilisation_percent", 5, 4)]), "utilisation_percent"));
        assert!(!always_zero(&card(&[]), "utilisation_percent"));
    }
}
