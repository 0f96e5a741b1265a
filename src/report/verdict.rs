//! The result in plain words. Pure: a record goes in, sentences come out.

use super::text::{self, count, number, percent_or_dash, span};
use crate::config::EngineKind;
use crate::metrics::record::{CardKind, CardRound, EngineRecord, Ratio, Results, RoundStatus, Status};
use crate::metrics::stats::MIN_ROUNDS;
use crate::units::bytes;

/// What the run says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    /// The one sentence to remember.
    pub(super) headline: String,
    /// What stands behind it and what limits it, most important first.
    pub(super) sentences: Vec<String>,
}

/// Puts a record into words.
pub(super) fn verdict(results: &Results) -> Verdict {
    let mut sentences = Vec::new();
    match results.status {
        Status::Complete => {}
        Status::Interrupted => {
            sentences.push("The run was interrupted: what is here is whole rounds.".to_owned())
        }
        Status::Failed => {
            sentences.push("The run failed before its end: what is here is whole rounds.".to_owned())
        }
    }
    sentences.extend([EngineKind::Dp, EngineKind::Ddp].into_iter().filter_map(|kind| cards(results, kind)));
    sentences.extend(memory(results));
    sentences.extend(against_one_card(results));
    sentences.extend(against_torch(results));
    sentences.push(correctness(results));
    sentences.extend(strayed(results));
    sentences.extend(precision(results));
    sentences.extend(virtual_cards(results));
    Verdict { headline: headline(results), sentences }
}

fn headline(results: &Results) -> String {
    let comparison = &results.comparison;
    if comparison.losses.agree == Some(false) {
        return "Not comparable: the engines did not compute the same thing.".to_owned();
    }
    let on_cards = format!("on {}", count(results.plan.run.cards, "card"));
    let candidates = [
        (&comparison.ddp_over_dp, "DDP".to_owned(), "DP"),
        (&comparison.ddp_over_single, format!("DDP {on_cards}"), "one card"),
        (&comparison.dp_over_single, format!("DP {on_cards}"), "one card"),
    ];
    if let Some((ratio, over, base)) =
        candidates.into_iter().find_map(|(ratio, over, base)| ratio.as_ref().map(|ratio| (ratio, over, base)))
    {
        return against(ratio, &over, base);
    }
    let measured = text::engines_in_order(results).into_iter().find_map(|name| {
        let record = &results.engines[name];
        record.summary.as_ref().map(|summary| (name, record, summary))
    });
    match measured {
        Some((name, record, summary)) => format!(
            "{} trains {} samples/s on {}; {}.",
            text::engine(name),
            number(summary.samples_per_second.median),
            count(record.cards, "card"),
            match comparison.ab.len() {
                0 => "there is nothing to compare it with".to_owned(),
                tried => format!("{} tried on it", count(tried, "option")),
            },
        ),
        None => "Nothing was measured.".to_owned(),
    }
}

/// One throughput against another. Whether the interval holds 1 decides what may be said.
fn against(ratio: &Ratio, over: &str, base: &str) -> String {
    let figure = text::ratio(ratio);
    match ratio.ci95 {
        Some([low, high]) if low <= 1.0 && 1.0 <= high => {
            format!("{over} and {base}: no difference that this run can show ({figure}).")
        }
        // Two runs of the same thing differ too: without an interval nobody knows by how much.
        None => format!("No verdict below {MIN_ROUNDS} rounds: {over} ran {figure} as fast as {base} here."),
        _ if ratio.ratio < 1.0 => {
            format!("{over} trains {figure} as fast as {base}: {base} is the faster here.")
        }
        _ => format!("{over} trains {figure} as fast as {base}."),
    }
}

/// How evenly an engine's cards were busy, and who waited.
fn cards(results: &Results, kind: EngineKind) -> Option<String> {
    let summary = results.engines.get(kind.name())?.summary.as_ref()?;
    let name = text::engine(kind.name());
    let busy: Vec<(usize, f64)> =
        summary.cards.iter().filter_map(|c| c.utilisation_percent_mean.map(|p| (c.index, p))).collect();
    if busy.len() < 2 {
        return None;
    }
    let values: Vec<f64> = busy.iter().map(|(_, percent)| *percent).collect();
    let (low, high) = values.iter().fold((f64::INFINITY, 0.0f64), |(l, h), v| (l.min(*v), h.max(*v)));
    let show = |v: f64| format!("{v:.0}");
    // Five points: about what neighbouring cards of one round differ by for no reason.
    let busy_text = if high - low <= 5.0 {
        format!("under {name} the cards were evenly busy, {} % of the time", span(&values, show))
    } else if busy.len() == 2 {
        let [(a, x), (b, y)] = [busy[0], busy[1]];
        format!("under {name} card {a} was busy {x:.0} % of the time and card {b} {y:.0} %")
    } else {
        let (first, rest) = (busy[0], &values[1..]);
        format!(
            "under {name} card {} was busy {:.0} % of the time, the other {} {} %",
            first.0,
            first.1,
            rest.len(),
            span(rest, show)
        )
    };
    let step = summary.step_ms.mean;
    let wait = |card: &CardRound| card.wait_ms.map(|wait| (card.index, 100.0 * wait / step));
    let longest = summary.cards.iter().filter_map(wait).max_by(|a, b| a.1.total_cmp(&b.1));
    let waiting = match longest {
        Some((index, part)) if step > 0.0 && part >= 1.0 => {
            format!("; card {index} waited {} of the {name} step", percent_or_dash(Some(part)))
        }
        _ => String::new(),
    };
    Some(sentence(&format!("{busy_text}{waiting}")))
}

/// What the card that does more under `dp` held against the others.
fn memory(results: &Results) -> Option<String> {
    let of = |kind: EngineKind| {
        let summary = results.engines.get(kind.name())?.summary.as_ref()?;
        let main = if kind == EngineKind::Dp { results.plan.dp.output_card } else { 0 };
        let mut peaks: Vec<(usize, u64)> =
            summary.cards.iter().map(|c| Some((c.index, c.memory_peak_bytes?))).collect::<Option<_>>()?;
        let own = peaks.iter().position(|(card, _)| *card == main).map(|place| peaks.remove(place).1)?;
        let show = |b: f64| bytes(b as u64);
        (!peaks.is_empty()).then(|| {
            let name = text::engine(kind.name());
            let others = match peaks[..] {
                [(card, _)] => format!("card {card}"),
                _ => format!("the other {}", peaks.len()),
            };
            let rest: Vec<f64> = peaks.iter().map(|(_, bytes)| *bytes as f64).collect();
            format!("under {name} card {main} peaked at {} and {others} at {}", bytes(own), span(&rest, show))
        })
    };
    let parts: Vec<String> = [EngineKind::Dp, EngineKind::Ddp].into_iter().filter_map(of).collect();
    (!parts.is_empty()).then(|| sentence(&format!("Memory: {}", parts.join("; "))))
}

/// The engines against one card, where the headline is about the two.
fn against_one_card(results: &Results) -> Option<String> {
    let comparison = &results.comparison;
    comparison.ddp_over_dp?;
    let part =
        |ratio: &Option<Ratio>, name: &str| ratio.as_ref().map(|r| format!("{name} {}", text::ratio(r)));
    let parts: Vec<String> =
        [part(&comparison.dp_over_single, "DP"), part(&comparison.ddp_over_single, "DDP")]
            .into_iter()
            .flatten()
            .collect();
    let batch = results.plan.batch.global;
    (!parts.is_empty())
        .then(|| format!("Against one card with the same global batch of {batch}: {}.", parts.join(", ")))
}

/// Our engines against PyTorch's, in the same rounds.
fn against_torch(results: &Results) -> Option<String> {
    let kinds = [EngineKind::Single, EngineKind::Dp, EngineKind::Ddp];
    let parts: Vec<String> = kinds
        .into_iter()
        .filter_map(|kind| Some((kind, results.comparison.over_torch.get(kind.name())?)))
        .map(|(kind, ratio)| {
            // In the middle of a sentence.
            let name = text::engine(kind.name());
            let name = if kind == EngineKind::Single { name.to_lowercase() } else { name };
            format!("{name} {}", text::ratio(ratio))
        })
        .collect();
    (!parts.is_empty())
        .then(|| format!("Against PyTorch's own engines in the same rounds: {}.", parts.join(", ")))
}

fn correctness(results: &Results) -> String {
    let losses = &results.comparison.losses;
    let reason = losses.reason.as_deref().unwrap_or("no reason was recorded");
    match (losses.agree, losses.max_difference, losses.tolerance) {
        (Some(true), Some(0.0), _) => {
            format!("Same answers: losses are equal to the last bit ({}).", losses.checked)
        }
        (Some(true), Some(difference), Some(tolerance)) => format!(
            "Same answers: losses agree within {difference:.1e} relative, where {tolerance:.0e} is allowed ({}).",
            losses.checked
        ),
        (Some(true), _, _) => format!("Same answers ({}).", losses.checked),
        (Some(false), ..) => {
            format!("The answers differ: {reason} ({}). A speed-up would mean nothing.", losses.checked)
        }
        (None, ..) => format!("Whether the engines give the same answers was not checked: {reason}."),
    }
}

/// Options under which an engine gives other answers than without them.
fn strayed(results: &Results) -> Vec<String> {
    let rows = results.comparison.ab.iter().filter(|(_, result)| result.disagrees());
    rows.filter_map(|(name, result)| Some((name, result.loss_difference?, result.tolerance?)))
        .map(|(name, difference, allowed)| {
            format!(
                "{} gives other answers than without the option: losses differ by {difference:.1e} relative, where {allowed:.0e} is allowed. Its speed would mean nothing.",
                text::engine(name)
            )
        })
        .collect()
}

/// How far the figures may be trusted: rounds, and cells that failed.
fn precision(results: &Results) -> Vec<String> {
    let ok = |record: &EngineRecord| record.rounds.iter().filter(|r| r.status == RoundStatus::Ok).count();
    let least = results.engines.values().map(ok).filter(|rounds| *rounds > 0).min();
    let few = least.filter(|rounds| *rounds < MIN_ROUNDS).map(|rounds| {
        format!(
            "{}: too few for an interval, which needs {MIN_ROUNDS} (`--rounds {MIN_ROUNDS}`).",
            count(rounds, "round")
        )
    });
    let failed = text::engines_in_order(results).into_iter().filter_map(|name| {
        let record = &results.engines[name];
        let failed = record.rounds.len() - ok(record);
        let error = record.rounds.iter().find_map(|round| round.error.as_deref());
        (failed > 0).then(|| {
            format!(
                "{} of {} of {} failed: {}.",
                failed,
                count(record.rounds.len(), "round"),
                text::engine(name),
                error.unwrap_or("no reason was recorded")
            )
        })
    });
    let skipped = text::engines_in_order(results).into_iter().filter_map(|name| {
        let most = results.engines[name].rounds.iter().map(|round| round.skipped_steps).max()?;
        (most > 0).then(|| {
            format!(
                "{} left out up to {} a round: float16 could not hold their gradients, and the loss scale came down.",
                text::engine(name),
                count(most as usize, "update")
            )
        })
    });
    few.into_iter().chain(failed).chain(skipped).collect()
}

fn virtual_cards(results: &Results) -> Option<String> {
    results.environment.cards.iter().any(|card| card.kind == CardKind::Virtual).then(|| {
        "These are virtual cards (sets of CPU cores): the run shows the structure and the order of the engines, \
         not the magnitudes of GPUs."
            .to_owned()
    })
}

/// With a capital and a full stop.
fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| format!("{}{}.", first.to_uppercase(), letters.as_str()))
}
