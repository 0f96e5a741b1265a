//! `inject`: makes a phase longer on purpose, so that a gate can be shown to notice.

use crate::config::{InjectPhase, InjectPlan};
use crate::metrics::phase::{Phase, Recorder};
use crate::units::Nanos;
use std::time::Duration;

/// How long a card's phase is waited for before it is stretched.
const LONGEST_PHASE: Duration = Duration::from_secs(60);

/// Runs `work` and records it as `phase`; where the plan says so for this phase and the recorder's card
/// (ddp: rank), spins afterwards so that the phase takes that many percent longer.
pub fn timed<T>(
    recorder: &mut Recorder,
    inject: Option<&InjectPlan>,
    phase: Phase,
    work: impl FnOnce() -> T,
) -> T {
    let card = recorder.card();
    let stream = recorder.stream().filter(|_| meant(inject, phase, card).is_some()).cloned();
    recorder.time(phase, || {
        let start = Nanos::now();
        let result = work();
        if let Some(stream) = stream {
            // How long the card takes is known only once it has done it. What fails is found again at the
            // end of the step.
            let _ = stream.synchronize(LONGEST_PHASE);
        }
        burn(inject, phase, card, start);
        result
    })
}

/// Spins until a phase that began at `start` has lasted as much longer as the plan asks for.
pub fn burn(inject: Option<&InjectPlan>, phase: Phase, card: usize, start: Nanos) {
    let Some(plan) = meant(inject, phase, card) else { return };
    let end = burn_until(start, Nanos::now(), plan.percent);
    while Nanos::now() < end {
        std::hint::spin_loop();
    }
}

fn meant(inject: Option<&InjectPlan>, phase: Phase, card: usize) -> Option<&InjectPlan> {
    inject.filter(|plan| phase_of(plan.phase) == phase && plan.rank.is_none_or(|rank| rank == card))
}

/// The moment at which a phase of `start..now` has been stretched by `percent`.
fn burn_until(start: Nanos, now: Nanos, percent: f64) -> Nanos {
    Nanos(now.0 + (now.since(start).0 as f64 * percent / 100.0) as u64)
}

fn phase_of(phase: InjectPhase) -> Phase {
    match phase {
        InjectPhase::Forward => Phase::Forward,
        InjectPhase::Backward => Phase::Backward,
        InjectPhase::Update => Phase::Update,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(plan: InjectPlan, phase: Phase, card: usize) -> f64 {
        let mut recorder = Recorder::new(card);
        timed(&mut recorder, Some(&plan), phase, || std::thread::sleep(Duration::from_millis(20)));
        let spans: Vec<_> = recorder.drain().into_iter().map(|timed| timed.span().unwrap()).collect();
        assert_eq!((spans.len(), spans[0].phase), (1, phase));
        spans[0].duration.as_ms()
    }

    #[test]
    fn a_phase_is_stretched_by_the_percentage() {
        assert_eq!(burn_until(Nanos(1000), Nanos(1200), 50.0), Nanos(1300));
        assert_eq!(burn_until(Nanos(1000), Nanos(1200), 0.0), Nanos(1200));
    }

    #[test]
    fn only_the_named_phase_and_rank_burn() {
        let plan = InjectPlan { phase: InjectPhase::Backward, percent: 400.0, rank: Some(1) };
        assert!(measured(plan, Phase::Backward, 1) >= 100.0);
        assert!(measured(plan, Phase::Backward, 0) < 100.0);
        assert!(measured(plan, Phase::Forward, 1) < 100.0);
        assert!(measured(InjectPlan { rank: None, ..plan }, Phase::Backward, 0) >= 100.0);
    }
}
