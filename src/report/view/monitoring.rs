//! What NVML said of the cards, what it would not say, and how to take it.

use super::tables::Table;
use crate::metrics::record::{CardMonitoring, Monitoring, PowerKind, Results, UtilisationKind};
use crate::report::text::count;

/// How to read what NVML says: for the page.
pub(super) fn notes(results: &Results) -> Vec<String> {
    let Some(monitoring) = &results.monitoring else { return Vec::new() };
    if let Some(why) = &monitoring.unavailable {
        return vec![format!("Monitoring was unavailable: {why}.")];
    }
    let mut notes = vec![
        utilisation(monitoring),
        "Busy, by NVML, means that some kernel was running: an NCCL kernel that waits for another card counts \
         as busy. Compute, communication and waiting in the table of cards are told apart by events in the \
         cards' own streams."
            .to_owned(),
        "Peak memory is what tensors needed (libtorch's allocator); used memory is what NVML saw in use on the \
         card, by all processes: contexts, kernels and what the allocator keeps are in it."
            .to_owned(),
    ];
    notes.extend(power(monitoring));
    for card in &monitoring.cards {
        if card.lost_since_ns.is_some() {
            notes.push(format!("Card {} stopped answering in mid-run; its lines end there.", card.index));
        }
        if card.unified_memory {
            notes.push(format!("Card {} has no memory of its own: NVML has no figure for it.", card.index));
        }
    }
    notes
}

fn utilisation(monitoring: &Monitoring) -> String {
    let buffered = |card: &CardMonitoring| card.utilisation == Some(UtilisationKind::Buffered);
    let how = if monitoring.cards.iter().any(buffered) {
        "a reading is the mean of what the driver sampled by itself since the one before"
    } else {
        "a reading is the driver's own average over the last sixth of a second to a second, whatever the \
         sampling period is"
    };
    format!("Utilisation: {how}.")
}

fn power(monitoring: &Monitoring) -> Option<String> {
    let kinds: Vec<PowerKind> = monitoring.cards.iter().filter_map(|card| card.power).collect();
    let what = match kinds.first()? {
        PowerKind::Average => "an average over about a second",
        PowerKind::Instant => "a moment's draw",
    };
    Some(format!("Power is {what} on these cards; energy is the cards' own counter where they have one."))
}

/// One line a field that some card refused or misreported.
pub(super) fn refusals(results: &Results) -> Table {
    let header = ["Card", "Field", "Readings", "Refused", "Impossible", "First reason"];
    let cards = results.monitoring.iter().flat_map(|monitoring| &monitoring.cards);
    let rows = cards.flat_map(|card| {
        let wrong = card.fields.iter().filter(|(_, account)| account.errors + account.rejected > 0);
        wrong.map(|(name, account)| {
            vec![
                card.index.to_string(),
                name.clone(),
                account.samples.to_string(),
                account.errors.to_string(),
                account.rejected.to_string(),
                account.first_error.clone().unwrap_or_default(),
            ]
        })
    });
    Table { header: header.map(str::to_owned).to_vec(), rows: rows.collect() }
}

/// For the list of facts: what was asked of NVML.
pub(super) fn in_short(monitoring: &Monitoring) -> String {
    match &monitoring.unavailable {
        Some(why) => why.clone(),
        None => format!("NVML, {}", count(monitoring.cards.len(), "card")),
    }
}
