//! What a report says, and the checks behind it.

use crate::fixture::{Fixture, Size};
use dp_vs_ddp::config::{ModelPlan, OptimizerPlan};
use dp_vs_ddp::metrics::record::{Ratio, Results};
use dp_vs_ddp::metrics::stats;
use dp_vs_ddp::report;

fn results(rounds: usize) -> Results {
    Fixture::new(Size { rounds, steps: 30, ..Size::default() }).results
}

/// The console's text as one line.
fn said(results: &Results) -> String {
    report::console(results).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The first sentence, for this ratio of `ddp` over `dp`.
fn headline(ratio: f64, ci95: Option<[f64; 2]>) -> String {
    let mut results = results(5);
    results.comparison.ddp_over_dp = Some(Ratio { ratio, ci95 });
    report::console(&results).lines().next().unwrap().to_owned()
}

#[test]
fn the_headline_says_no_more_than_the_interval_allows() {
    for (ratio, ci95, expected) in [
        (1.42, Some([1.39, 1.46]), "DDP trains 1.42x [1.39, 1.46] as fast as DP."),
        (1.42, None, "No verdict below 5 rounds: DDP ran 1.42x as fast as DP here."),
        (1.033, Some([0.97, 1.06]), "DDP and DP: no difference that this run can show (1.03x [0.97, 1.06])."),
        (1.04, Some([1.02, 1.06]), "DDP trains 1.04x [1.02, 1.06] as fast as DP."),
        (0.87, Some([0.84, 0.9]), "DDP trains 0.87x [0.84, 0.90] as fast as DP: DP is the faster here."),
    ] {
        assert_eq!(headline(ratio, ci95), expected);
    }
}

#[test]
fn few_rounds_are_said_and_have_no_interval() {
    for rounds in 1..5 {
        let results = results(rounds);
        let ratio = results.comparison.ddp_over_dp.unwrap();
        assert_eq!(ratio.ci95, None, "{rounds} rounds");
        assert!(results.engines["dp"].summary.as_ref().unwrap().samples_per_second.ci95.is_none());
        assert!(said(&results).contains("too few for an interval, which needs 5"), "{rounds} rounds");
    }
    let enough = results(5);
    let [low, high] = enough.comparison.ddp_over_dp.unwrap().ci95.unwrap();
    assert!(low < high);
    assert!(!said(&enough).contains("too few"));
}

#[test]
fn cards_waiting_memory_and_the_kind_of_cards_are_put_into_words() {
    let text = said(&results(5));
    for part in [
        "Under DP card 0 was busy",
        "card 1 waited 3",
        "of the DP step",
        "Under DDP the cards were evenly busy",
        "Memory: under DP card 0 peaked at 330",
        "not the magnitudes of GPUs",
        "Same answers: losses are equal to the last bit (single, dp, ddp: first 20 steps)",
        "Against one card with the same global batch of 64",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn the_console_keeps_to_eighty_columns() {
    let mut results = results(5);
    results.warnings[0].message = "a long warning ".repeat(20);
    for record in results.engines.values_mut() {
        (record.global_batch, record.batch_per_card) = (1_048_576, 131_072);
    }
    for line in report::console(&results).lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn losses_that_differ_take_the_speed_up_away() {
    let mut results = results(5);
    results.engines.get_mut("ddp").unwrap().rounds[3].losses[7] *= 1.01;
    stats::conclude(&mut results).unwrap();
    let comparison = &results.comparison;
    assert_eq!(comparison.losses.agree, Some(false));
    assert_eq!(
        (comparison.ddp_over_dp, comparison.dp_over_single, comparison.ddp_over_single),
        (None, None, None)
    );
    let difference = comparison.losses.max_difference.unwrap();
    assert!((difference - 0.01 / 1.01).abs() < 1e-12, "{difference}");
    let text = said(&results);
    assert!(text.starts_with("Not comparable"), "{text}");
    assert!(text.contains("round 3, step 7: loss"), "{text}");
}

#[test]
fn a_loss_that_is_not_a_number_disagrees() {
    let mut results = results(5);
    results.engines.get_mut("dp").unwrap().rounds[0].losses[0] = f64::NAN;
    stats::conclude(&mut results).unwrap();
    assert_eq!(results.comparison.losses.agree, Some(false));
    assert!(results.comparison.losses.max_difference.unwrap().is_finite());
}

#[test]
fn steps_after_the_judged_ones_are_not_judged() {
    let mut results = results(5);
    results.engines.get_mut("ddp").unwrap().rounds[0].losses[20] *= 2.0;
    stats::conclude(&mut results).unwrap();
    assert_eq!(results.comparison.losses.agree, Some(true));
}

#[test]
fn the_tolerance_follows_the_optimizer() {
    let mut results = results(5);
    results.engines.get_mut("ddp").unwrap().rounds[0].losses[5] *= 1.0005;
    stats::conclude(&mut results).unwrap();
    assert_eq!(
        (results.comparison.losses.agree, results.comparison.losses.tolerance),
        (Some(false), Some(1e-4))
    );
    results.plan.optimizer = OptimizerPlan::Adam { lr: 1e-3, weight_decay: 0.0 };
    stats::conclude(&mut results).unwrap();
    assert_eq!(
        (results.comparison.losses.agree, results.comparison.losses.tolerance),
        (Some(true), Some(1e-3))
    );
}

#[test]
fn with_batch_norm_single_is_left_out_and_that_is_said() {
    let mut results = results(5);
    results.plan.model = ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: true };
    results.engines.get_mut("single").unwrap().rounds[0].losses[0] *= 2.0;
    stats::conclude(&mut results).unwrap();
    let losses = &results.comparison.losses;
    assert_eq!(losses.agree, Some(true));
    assert!(
        losses.checked.starts_with("dp, ddp: first 20 steps; single left out: BatchNorm"),
        "{}",
        losses.checked
    );
}

#[test]
fn weights_of_dp_s_cards_leave_it_out_where_batch_norm_sees_them() {
    let mut results = results(5);
    results.plan.dp.chunk_weights = Some(vec![1.0, 2.0]);
    stats::conclude(&mut results).unwrap();
    assert!(results.comparison.losses.checked.starts_with("single, dp, ddp: "));
    results.plan.model = ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: true };
    results.engines.get_mut("dp").unwrap().rounds[0].losses[0] *= 2.0;
    stats::conclude(&mut results).unwrap();
    let losses = &results.comparison.losses;
    assert_eq!(losses.agree, None);
    let reason = losses.reason.as_deref().unwrap();
    assert!(reason.contains("dp left out: dp.chunk_weights gives BatchNorm other samples"), "{reason}");
}

// Field case 016.
#[test]
fn cards_of_different_sizes_have_no_scaling_efficiency() {
    let mut results = results(5);
    let efficiency = |results: &Results| results.engines["ddp"].summary.as_ref().unwrap().scaling_efficiency;
    assert!(efficiency(&results).weak.is_some() && efficiency(&results).strong.is_some());
    results.environment.cards[0].cores = Some(vec![0, 2]);
    stats::conclude(&mut results).unwrap();
    assert_eq!((efficiency(&results).weak, efficiency(&results).strong), (None, None));
}

#[test]
fn what_the_output_card_held_is_said_of_it() {
    let mut results = results(5);
    assert!(said(&results).contains("under DP card 0 peaked at "));
    results.plan.dp.output_card = 1;
    let text = said(&results);
    assert!(text.contains("under DP card 1 peaked at ") && text.contains(" and card 0 at "), "{text}");
    assert!(text.contains("under DDP card 0 peaked at "), "{text}");
}

#[test]
fn with_sync_batch_norm_it_is_dp_that_is_left_out() {
    let mut results = results(5);
    results.plan.model = ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: true };
    results.plan.ddp.sync_batch_norm = true;
    results.engines.get_mut("dp").unwrap().rounds[0].losses[0] *= 2.0;
    stats::conclude(&mut results).unwrap();
    let losses = &results.comparison.losses;
    assert_eq!(losses.agree, Some(true));
    assert!(
        losses.checked.starts_with("single, ddp: first 10 steps; dp left out: BatchNorm"),
        "{}",
        losses.checked
    );
    results.engines.get_mut("ddp").unwrap().rounds[0].losses[5] *= 1.0005;
    stats::conclude(&mut results).unwrap();
    assert_eq!(results.comparison.losses.agree, Some(false));
}

#[test]
fn ranks_whose_weights_differ_disagree() {
    let mut results = results(5);
    results.engines.get_mut("ddp").unwrap().rounds[2].weights_digests[1] = "beef".into();
    stats::conclude(&mut results).unwrap();
    let losses = &results.comparison.losses;
    assert_eq!(losses.agree, Some(false));
    let reason = losses.reason.as_deref().unwrap();
    assert_eq!(reason, "round 2: weights of ddp's rank 1 differ from rank 0's after the last step");
}

#[test]
fn one_engine_alone_has_sensible_words_and_nothing_checked() {
    let mut results = results(5);
    results.engines.retain(|name, _| name == "dp");
    stats::conclude(&mut results).unwrap();
    assert_eq!(results.comparison.losses.agree, None);
    let text = said(&results);
    assert!(text.starts_with("DP trains ") && text.contains("there is nothing to compare it with"), "{text}");
    assert!(text.contains("was not checked: fewer than two engines to compare"), "{text}");
    results.engines.clear();
    stats::conclude(&mut results).unwrap();
    assert!(said(&results).starts_with("Nothing was measured."));
}

#[test]
fn conclusions_do_not_depend_on_how_often_they_are_drawn() {
    let mut results = results(5);
    let once = results.clone();
    stats::conclude(&mut results).unwrap();
    assert_eq!(results, once);
    let json = serde_json::to_string(&results).unwrap();
    assert_eq!(serde_json::from_str::<Results>(&json).unwrap(), once);
}
