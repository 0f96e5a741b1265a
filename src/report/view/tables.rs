//! The tables: engines, and cards of engines.

use crate::metrics::record::{CardKind, EngineRecord, Results, Round, RoundStatus};
use crate::metrics::stats::median;
use crate::report::text::{
    self, MISSING, fixed_or_dash, memory_unit, number, number_or_dash, percent_or_dash,
};
use serde::Serialize;

/// Columns with names and units, and cells that are text already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(in crate::report) struct Table {
    pub(in crate::report) header: Vec<String>,
    pub(in crate::report) rows: Vec<Vec<String>>,
}

/// Of all cards of an engine; there only where they count it.
const ENERGY: &str = "Energy, J/sample";

/// How fast each engine was, and what a sample cost.
pub(in crate::report) fn speed(results: &Results) -> Table {
    let header = [
        "Engine",
        "Cards",
        "Batch, global",
        "Batch, per card",
        "Samples/s",
        "95 % interval",
        "Step, ms",
        "5 to 95 %, ms",
        ENERGY,
    ];
    let mut table = by_engine(results, &header, |record| {
        let summary = record.summary.as_ref();
        let spread = summary.map(|s| format!("{} to {}", number(s.step_ms.p5), number(s.step_ms.p95)));
        vec![
            record.cards.to_string(),
            record.global_batch.to_string(),
            record.batch_per_card.to_string(),
            number_or_dash(summary.map(|s| s.samples_per_second.median)),
            interval(summary.and_then(|s| s.samples_per_second.ci95)),
            number_or_dash(summary.map(|s| s.step_ms.median)),
            spread.unwrap_or_else(|| MISSING.to_owned()),
            number_or_dash(summary.and_then(|s| s.joules_per_sample).map(|joules| joules.median)),
        ]
    });
    table.drop_empty(ENERGY);
    table
}

/// How well each engine scales, how even its cards are and what communication costs.
pub(in crate::report) fn balance(results: &Results) -> Table {
    let virtual_cards = results.environment.cards.iter().any(|card| card.kind == CardKind::Virtual);
    let header = [
        "Engine",
        "Weak scaling",
        "Strong scaling",
        "Imbalance, busy",
        "Imbalance, memory",
        "Comm., ms",
        "Exposed, ms",
        // The communication thread of a virtual card shares its cores: what it hides there is not free.
        if virtual_cards { "Overlap, wall-clock" } else { "Overlap" },
        "Rounds",
    ];
    by_engine(results, &header, |record| {
        let summary = record.summary.as_ref();
        let ok = ok_rounds(record);
        let over = |figure: fn(&Round) -> Option<f64>| {
            median(&ok.iter().filter_map(|round| figure(round)).collect::<Vec<_>>())
        };
        vec![
            fixed_or_dash(summary.and_then(|s| s.scaling_efficiency.weak), 2),
            fixed_or_dash(summary.and_then(|s| s.scaling_efficiency.strong), 2),
            fixed_or_dash(summary.and_then(|s| s.imbalance.utilisation), 2),
            fixed_or_dash(summary.and_then(|s| s.imbalance.memory), 2),
            number_or_dash(over(|round| round.communication_ms)),
            number_or_dash(over(|round| round.exposed_communication_ms)),
            percent_or_dash(over(|round| round.overlap).map(|overlap| overlap * 100.0)),
            format!("{} of {}", ok.len(), record.rounds.len()),
        ]
    })
}

/// What each option that was tried costs: its row against its base, round by round.
pub(in crate::report) fn ab(results: &Results) -> Table {
    let header = [
        "Tried",
        "Throughput",
        "Memory peak",
        "Exposed comm.",
        "Gradients sent",
        "Start",
        "Loss differs by",
        "Allowed",
    ];
    let rows = text::engines_in_order(results).into_iter().filter_map(|name| {
        let record = &results.engines[name];
        let base = results.engines.get(&record.tried.as_ref()?.base)?;
        let result = results.comparison.ab.get(name);
        let difference = |figure: fn(&EngineRecord) -> Option<f64>, show: fn(f64) -> String| {
            let (own, base) = (figure(record)?, figure(base)?);
            // A minus sign, not a hyphen: it stands beside figures.
            Some(format!("{}{}", if own < base { "\u{2212}" } else { "+" }, show((own - base).abs())))
        };
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| MISSING.to_owned());
        Some(vec![
            text::engine(name),
            or_dash(result.and_then(|result| result.throughput.as_ref()).map(text::ratio)),
            or_dash(difference(largest_peak, |b| crate::units::bytes(b as u64))),
            or_dash(difference(exposed, |ms| format!("{} ms", number(ms)))),
            or_dash(difference(sent, |b| crate::units::bytes(b as u64))),
            or_dash(difference(start, |ms| format!("{} ms", number(ms)))),
            or_dash(
                result
                    .and_then(|result| result.loss_difference)
                    .map(|d| if d == 0.0 { "0".to_owned() } else { format!("{d:.1e}") }),
            ),
            or_dash(result.and_then(|result| result.tolerance).map(|allowed| format!("{allowed:.0e}"))),
        ])
    });
    Table { header: header.map(str::to_owned).to_vec(), rows: rows.collect() }
}

/// The most that any card held.
fn largest_peak(record: &EngineRecord) -> Option<f64> {
    let peaks = record.summary.as_ref()?.cards.iter().filter_map(|card| card.memory_peak_bytes);
    peaks.max().map(|bytes| bytes as f64)
}

fn sent(record: &EngineRecord) -> Option<f64> {
    median(&ok_rounds(record).iter().filter_map(|round| round.gradient_bytes).collect::<Vec<_>>())
}

fn start(record: &EngineRecord) -> Option<f64> {
    median(&ok_rounds(record).iter().filter_map(|round| round.start_ms).collect::<Vec<_>>())
}

fn exposed(record: &EngineRecord) -> Option<f64> {
    median(&ok_rounds(record).iter().filter_map(|round| round.exposed_communication_ms).collect::<Vec<_>>())
}

/// A table with one line an engine: its name, and what `cells` says of it.
fn by_engine(results: &Results, header: &[&str], cells: impl Fn(&EngineRecord) -> Vec<String>) -> Table {
    let rows = text::engines_in_order(results).into_iter().map(|name| {
        let mut row = vec![text::engine(name)];
        row.extend(cells(&results.engines[name]));
        row
    });
    Table { header: header.iter().map(|name| (*name).to_owned()).collect(), rows: rows.collect() }
}

/// One line a card of an engine; memory in one unit.
pub(in crate::report) fn cards(results: &Results) -> Table {
    let summaries = || {
        text::engines_in_order(results)
            .into_iter()
            .filter_map(|name| results.engines[name].summary.as_ref().map(|summary| (name, summary)))
    };
    let largest =
        summaries().flat_map(|(_, s)| &s.cards).filter_map(|c| c.memory_peak_bytes).max().unwrap_or(0);
    let (unit, size) = memory_unit(largest as f64);
    let header = ["Engine", "Card", "Busy", "Compute, ms", "Comm., ms", "Wait, ms"].map(str::to_owned);
    let used = format!("Used memory, {unit}");
    let header =
        header.into_iter().chain([format!("Peak memory, {unit}"), used.clone(), "Energy, J".to_owned()]);
    let rows = summaries().flat_map(|(name, summary)| {
        summary.cards.iter().map(move |card| {
            vec![
                text::engine(name),
                card.index.to_string(),
                percent_or_dash(card.utilisation_percent_mean),
                number_or_dash(card.compute_ms),
                number_or_dash(card.communication_ms),
                number_or_dash(card.wait_ms),
                number_or_dash(card.memory_peak_bytes.map(|bytes| bytes as f64 / size)),
                number_or_dash(card.memory_used_peak_bytes.map(|bytes| bytes as f64 / size)),
                number_or_dash(card.energy_joules),
            ]
        })
    });
    let mut table = Table { header: header.collect(), rows: rows.collect() };
    table.drop_empty(&used);
    table.drop_empty("Energy, J");
    table
}

impl Table {
    /// The rows whose first cell is not like that.
    pub(in crate::report) fn without(mut self, unwanted: impl Fn(&str) -> bool) -> Self {
        self.rows.retain(|row| row.first().is_none_or(|name| !unwanted(name)));
        self
    }

    /// The first column and those whose names begin so; a name that is not there is passed over.
    pub(in crate::report) fn columns(&self, names: &[&str]) -> Self {
        let named =
            names.iter().filter_map(|name| self.header.iter().position(|header| header.starts_with(name)));
        let keep: Vec<usize> = std::iter::once(0).chain(named).collect();
        let pick = |row: &Vec<String>| keep.iter().map(|column| row[*column].clone()).collect();
        Self { header: pick(&self.header), rows: self.rows.iter().map(pick).collect() }
    }

    /// Takes out a column in which nothing is known.
    fn drop_empty(&mut self, name: &str) {
        let Some(column) = self.header.iter().position(|header| header == name) else { return };
        if self.rows.iter().all(|row| row[column] == MISSING) {
            self.header.remove(column);
            for row in &mut self.rows {
                row.remove(column);
            }
        }
    }
}

fn interval(ci95: Option<[f64; 2]>) -> String {
    ci95.map_or_else(|| MISSING.to_owned(), |[low, high]| format!("{} to {}", number(low), number(high)))
}

fn ok_rounds(record: &EngineRecord) -> Vec<&Round> {
    record.rounds.iter().filter(|round| round.status == RoundStatus::Ok).collect()
}
