//! Whether the engines computed the same thing: the check that stands beside every speed.

use super::summary::ok_rounds;
use crate::config::{CommHookPlan, EngineKind, OptimizerPlan, Plan, Precision};
use crate::metrics::record::{EngineRecord, LossAgreement, Results};

/// Steps whose losses are judged. Later ones are shown and not judged: rounding grows from step to
/// step, under BatchNorm and Adam quickly.
pub const CHECKED_STEPS: usize = 20;

/// The same between one of our engines and a peer, where the two sum gradients in another order (from
/// three ranks on) and BatchNorm doubles the difference from step to step: two runs of PyTorch that differ
/// only in the order of summation part as fast.
const CHECKED_STEPS_OF_PEERS: usize = 2;

/// The same between one card and `ddp.sync_batch_norm`, which sum statistics in another order: `single` on
/// one and on two threads parts as fast, from 1e-7 to 1e-4 in some 15 steps.
const CHECKED_STEPS_OF_SYNCED: usize = 10;

/// What rounding to 16 bits on purpose explains.
const ROUNDED: f64 = 2e-2;

/// How far losses may be apart, relatively: what rounding in another order of summation explains.
pub fn tolerance(plan: &Plan) -> f64 {
    match (plan.run.precision, plan.ddp.comm_hook, plan.optimizer) {
        (Precision::Bf16 | Precision::Fp16, ..) | (_, CommHookPlan::Bf16 | CommHookPlan::Fp16, _) => ROUNDED,
        // Both sides approximate alike: PyTorch's DDP and ours. Others are not compared with them.
        (_, CommHookPlan::Powersgd { .. }, _) => ROUNDED,
        (Precision::Fp32, CommHookPlan::None, OptimizerPlan::Sgd { .. }) => 1e-4,
        (Precision::Fp32, CommHookPlan::None, OptimizerPlan::Adam { .. }) => 1e-3,
    }
}

/// The same for a row that tries these options (`key=value`) beside the plan; `None` where they change
/// what is computed.
pub(super) fn tolerance_of(plan: &Plan, options: &[String]) -> Option<f64> {
    let exact = tolerance(plan);
    let of = |option: &String| match option.split('=').next().unwrap_or_default() {
        "optimizer.clip_norm" | "ddp.join" => None,
        // Low rank is not rounding: how far it strays depends on the model and the rate.
        "ddp.comm_hook" if option.ends_with("powersgd") => None,
        // These change which samples a replica normalises together.
        "ddp.sync_batch_norm" | "ddp.accumulate" | "dp.chunk_weights" if plan.model.has_batch_norm() => None,
        _ => Some(match option.as_str() {
            "run.precision=bf16" | "run.precision=fp16" | "ddp.comm_hook=bf16" | "ddp.comm_hook=fp16" => {
                ROUNDED
            }
            _ => exact,
        }),
    };
    options.iter().try_fold(exact, |allowed, option| Some(f64::max(allowed, of(option)?)))
}

/// Largest relative difference of a loss in the first [`CHECKED_STEPS`] steps of paired rounds; `None`
/// without a pair.
pub(super) fn largest_difference(a: &EngineRecord, b: &EngineRecord) -> Option<f64> {
    let mut check = Check::default();
    check.pair(("", a), ("", b), CHECKED_STEPS, f64::INFINITY);
    check.max_difference
}

/// `|a - b| / max(|a|, |b|)`; zero for two zeros.
pub fn relative_difference(a: f64, b: f64) -> f64 {
    (a - b).abs() / a.abs().max(b.abs()).max(f64::MIN_POSITIVE)
}

/// Compares the losses of the first [`CHECKED_STEPS`] steps of every pair of rounds, and the weights
/// of `ddp`'s ranks with each other.
///
/// Where the model has BatchNorm, those that normalise each replica's own samples cannot agree with those
/// that normalise the global batch: `single` is left out, or with `ddp.sync_batch_norm`, which makes `ddp`
/// normalise as `single` does, `dp`. Nor can `dp` where weights give its replicas other samples than
/// `ddp`'s. `single_per_card` never takes part: it sees other batches.
pub fn loss_agreement(results: &Results) -> LossAgreement {
    let tolerance = tolerance(&results.plan);
    let left_out = left_out(&results.plan);
    let taking_part: Vec<(&str, &EngineRecord)> = EngineKind::ALL
        .into_iter()
        .filter(|kind| *kind != EngineKind::SinglePerCard)
        .filter(|kind| left_out.iter().all(|(other, _)| other != kind))
        .filter_map(|kind| results.engines.get(kind.name()).map(|record| (kind.name(), record)))
        .filter(|(_, record)| ok_rounds(record).next().is_some())
        .collect();

    let is_peer = |name: &str| EngineKind::from_name(name).is_some_and(EngineKind::is_peer);
    let is_ddp =
        |name: &str| matches!(EngineKind::from_name(name), Some(EngineKind::Ddp | EngineKind::TorchDdp));
    let apart = ddp_apart(&results.plan);
    let sums_differ = results.plan.model.has_batch_norm() && results.plan.run.cards > 2;
    let mut check = Check::default();
    for (i, a) in taking_part.iter().enumerate() {
        for b in &taking_part[i + 1..] {
            if apart.is_some() && is_ddp(a.0) != is_ddp(b.0) {
                continue;
            }
            let with_peer = is_peer(a.0) != is_peer(b.0);
            let steps = if with_peer && sums_differ {
                CHECKED_STEPS_OF_PEERS
            } else if results.plan.model.has_batch_norm() && results.plan.ddp.sync_batch_norm {
                CHECKED_STEPS_OF_SYNCED
            } else {
                CHECKED_STEPS
            };
            check.pair(*a, *b, steps, tolerance);
        }
    }
    for (name, record) in &results.engines {
        check.digests(name, record);
    }

    // Whose peer it is stands for the peer.
    let named = left_out.iter().filter(|(kind, _)| !kind.is_peer());
    let left_out: String = named
        .filter(|(kind, _)| results.engines.contains_key(kind.name()))
        .map(|(kind, why)| format!("; {kind} left out: {why}"))
        .collect();
    let left_out = match apart {
        Some(why) => format!("{left_out}; ddp not with the others: {why}"),
        None => left_out,
    };
    if check.pairs == 0 && check.fault.is_none() {
        let reason = if taking_part.len() < 2 {
            format!("fewer than two engines to compare{left_out}")
        } else if apart.is_some() {
            format!("no two engines that could agree{left_out}")
        } else {
            format!("no round that two engines both finished{left_out}")
        };
        return LossAgreement {
            agree: None,
            checked: "nothing".to_owned(),
            max_difference: None,
            tolerance: Some(tolerance),
            reason: Some(reason),
        };
    }
    let peers = if sums_differ && taking_part.iter().any(|(name, _)| is_peer(name)) {
        "; against PyTorch the first 2: from there BatchNorm doubles what the order of summation rounds"
    } else {
        ""
    };
    let names: Vec<&str> = taking_part.iter().map(|(name, _)| *name).collect();
    LossAgreement {
        agree: Some(check.fault.is_none()),
        checked: format!("{}: first {} steps{peers}{left_out}", names.join(", "), check.steps.unwrap_or(0)),
        max_difference: check.max_difference,
        tolerance: Some(tolerance),
        reason: check.fault,
    }
}

/// Engines that BatchNorm keeps from agreeing with the others, and why.
fn left_out(plan: &Plan) -> Vec<(EngineKind, &'static str)> {
    const PER_REPLICA: &str = "BatchNorm normalises each replica's own samples";
    if !plan.model.has_batch_norm() || plan.run.cards < 2 {
        return Vec::new();
    }
    if plan.ddp.sync_batch_norm {
        return vec![(EngineKind::Dp, PER_REPLICA), (EngineKind::TorchDp, PER_REPLICA)];
    }
    let mut engines = vec![(EngineKind::Single, PER_REPLICA), (EngineKind::TorchSingle, PER_REPLICA)];
    if plan.dp.chunk_weights.is_some() {
        // PyTorch has no weights: torch_dp cuts as ddp does.
        let why = "dp.chunk_weights gives BatchNorm other samples to normalise together";
        engines.push((EngineKind::Dp, why));
    }
    engines
}

/// Why `ddp`, and PyTorch's with it, computes something else than the other engines, if it does.
fn ddp_apart(plan: &Plan) -> Option<&'static str> {
    if matches!(plan.ddp.comm_hook, CommHookPlan::Powersgd { .. }) {
        return Some("powersgd approximates its gradients");
    }
    (plan.ddp.accumulate > 1 && plan.model.has_batch_norm())
        .then_some("ddp.accumulate gives BatchNorm a micro-batch at a time")
}

/// What was compared so far, and the first thing that was wrong.
#[derive(Default)]
struct Check {
    pairs: usize,
    /// The longest prefix compared in a pair.
    steps: Option<usize>,
    max_difference: Option<f64>,
    fault: Option<String>,
}

impl Check {
    fn pair(&mut self, a: (&str, &EngineRecord), b: (&str, &EngineRecord), most: usize, tolerance: f64) {
        for (round, of_a) in ok_rounds(a.1) {
            let Some((_, of_b)) = ok_rounds(b.1).find(|(index, _)| *index == round) else { continue };
            let steps = of_a.losses.len().min(of_b.losses.len()).min(most);
            if steps == 0 {
                continue;
            }
            self.pairs += 1;
            self.steps = Some(self.steps.map_or(steps, |longest| longest.max(steps)));
            for (step, (x, y)) in of_a.losses.iter().zip(&of_b.losses).take(steps).enumerate() {
                let difference = relative_difference(*x, *y);
                if difference.is_finite() {
                    self.max_difference = Some(self.max_difference.map_or(difference, |m| m.max(difference)));
                }
                // A NaN is no agreement.
                if difference.is_nan() || difference > tolerance {
                    self.fault.get_or_insert_with(|| {
                        format!("round {round}, step {step}: loss {x} under {}, {y} under {}", a.0, b.0)
                    });
                }
            }
        }
    }

    fn digests(&mut self, name: &str, ddp: &EngineRecord) {
        for (round, record) in ok_rounds(ddp) {
            let digests = &record.weights_digests;
            if let Some(rank) = digests.iter().position(|digest| *digest != digests[0]) {
                self.fault.get_or_insert_with(|| {
                    format!(
                        "round {round}: weights of {name}'s rank {rank} differ from rank 0's after the last step"
                    )
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_option_may_change_depends_on_what_it_does() {
        let plan = |name| {
            let text = crate::config::builtin(name).unwrap();
            let machine = crate::config::Machine { cards: 2, cores: 2 };
            crate::config::resolve(name, text, &Default::default(), machine, crate::config::Uneven::Refuse)
                .unwrap()
        };
        let allowed = |name, options: &[&str]| {
            tolerance_of(&plan(name), &options.iter().map(|option| (*option).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(allowed("quick", &["ddp.overlap=false"]), Some(1e-4));
        assert_eq!(allowed("quick", &["ddp.overlap=false", "ddp.comm_hook=bf16"]), Some(2e-2));
        assert_eq!(allowed("quick", &["ddp.comm_hook=powersgd", "ddp.powersgd_rank=4"]), None);
        assert_eq!(allowed("quick", &["ddp.accumulate=2"]), Some(1e-4));
        assert_eq!(allowed("convnet-batchnorm", &["ddp.accumulate=2"]), None);
        assert_eq!(allowed("quick", &["optimizer.clip_norm=1"]), None);
    }

    #[test]
    fn the_difference_is_relative_to_the_larger() {
        assert_eq!(relative_difference(2.0, 1.0), 0.5);
        assert_eq!(relative_difference(-1.0, 1.0), 2.0);
        assert_eq!(relative_difference(0.0, 0.0), 0.0);
        assert!(relative_difference(f64::NAN, 1.0).is_nan());
    }
}
