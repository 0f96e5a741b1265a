//! Statistics: from the rounds of a run to its summaries and ratios. Pure, and rebuilt from disk at will.
//!
//! Every formula has one function here. What cannot be computed is `None`, never zero; a NaN or an
//! infinity in the input is refused by name, so that none can reach a file or a verdict.

mod agreement;
mod bootstrap;
mod describe;
mod summary;

pub use agreement::{CHECKED_STEPS, loss_agreement, relative_difference, tolerance};
pub use bootstrap::{MIN_ROUNDS, RESAMPLES, median_interval};
pub use describe::{median, percentile, refuse_non_finite, spread};
pub use summary::{imbalance, paired_ratios, ratio, scaling, summarise};

use super::record::{Comparison, Results};
use crate::Result;
use crate::config::EngineKind;

/// Fills in every engine's summary and the comparison, from the rounds that `results` holds. May be
/// called after every cell: what is already there is computed afresh.
pub fn conclude(results: &mut Results) -> Result<()> {
    let summaries = results
        .engines
        .iter()
        .map(|(name, record)| {
            Ok((name.clone(), summarise(name, record, &results.engines, results.plan.run.seed)?))
        })
        .collect::<Result<Vec<_>>>()?;
    for (name, summary) in summaries {
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
        losses,
    })
}
