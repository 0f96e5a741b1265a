//! Statistics: from the rounds of a run to its summaries and ratios. Pure, and rebuilt from disk at will.
//!
//! Every formula has one function here. What cannot be computed is `None`, never zero; a NaN or an
//! infinity in the input is refused by name, so that none can reach a file or a verdict.

mod agreement;
mod balance;
mod bootstrap;
mod describe;
mod monitoring;
mod summary;

pub use agreement::{CHECKED_STEPS, loss_agreement, relative_difference, tolerance};
pub use balance::{Resource, Unbalanced, unbalanced};
pub use bootstrap::{MIN_ROUNDS, RESAMPLES, median_interval};
pub use describe::{median, percentile, refuse_non_finite, spread};
pub use monitoring::monitoring_warnings;
pub use summary::{imbalance, paired_ratios, ratio, scaling, summarise};

use super::record::{AbResult, Comparison, Ratio, Results, Scaling};
use crate::Result;
use crate::config::EngineKind;
use std::collections::BTreeMap;

/// Fills in every engine's summary and the comparison, from the rounds that `results` holds. May be
/// called after every cell: what is already there is computed afresh.
///
/// Cards of different sizes have no scaling efficiency: n of them are not n times one of them.
pub fn conclude(results: &mut Results) -> Result<()> {
    let summaries = results
        .engines
        .iter()
        .map(|(name, record)| {
            Ok((name.clone(), summarise(name, record, &results.engines, results.plan.run.seed)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let one_size = unbalanced(&results.environment.cards).is_none();
    for (name, mut summary) in summaries {
        if let Some(summary) = summary.as_mut().filter(|_| !one_size) {
            summary.scaling_efficiency = Scaling::default();
        }
        if let Some(record) = results.engines.get_mut(&name) {
            record.summary = summary;
        }
    }
    results.comparison = compare(results)?;
    Ok(())
}

/// The engines against each other. Engines whose losses disagree have no ratios: they did not do the
/// same work.
pub fn compare(results: &Results) -> Result<Comparison> {
    let losses = loss_agreement(results);
    if losses.agree == Some(false) {
        return Ok(Comparison { losses, ..Comparison::default() });
    }
    let against = |over: EngineKind, base: EngineKind| {
        let (Some(a), Some(b)) = (results.engines.get(over.name()), results.engines.get(base.name())) else {
            return Ok(None);
        };
        ratio(over.name(), a, base.name(), b, results.plan.run.seed)
    };
    Ok(Comparison {
        ddp_over_dp: against(EngineKind::Ddp, EngineKind::Dp)?,
        dp_over_single: against(EngineKind::Dp, EngineKind::Single)?,
        ddp_over_single: against(EngineKind::Ddp, EngineKind::Single)?,
        over_torch: over_torch(results)?,
        ab: ab(results)?,
        losses,
    })
}

/// Our rows over PyTorch's of the same kind, and with the same options.
fn over_torch(results: &Results) -> Result<BTreeMap<String, Ratio>> {
    let mut ratios = BTreeMap::new();
    for (name, ours) in &results.engines {
        let peer = format!("torch_{name}");
        let Some(theirs) = results.engines.get(&peer) else { continue };
        if let Some(found) = ratio(name, ours, &peer, theirs, results.plan.run.seed)? {
            ratios.insert(name.clone(), found);
        }
    }
    Ok(ratios)
}

/// Every row that tries options over its base.
fn ab(results: &Results) -> Result<BTreeMap<String, AbResult>> {
    let mut all = BTreeMap::new();
    for (name, record) in &results.engines {
        let Some(tried) = &record.tried else { continue };
        let Some(base) = results.engines.get(&tried.base) else { continue };
        let mut result = AbResult {
            throughput: ratio(name, record, &tried.base, base, results.plan.run.seed)?,
            loss_difference: agreement::largest_difference(record, base),
            tolerance: agreement::tolerance_of(&results.plan, &tried.options),
        };
        if result.disagrees() {
            result.throughput = None;
        }
        all.insert(name.clone(), result);
    }
    Ok(all)
}
