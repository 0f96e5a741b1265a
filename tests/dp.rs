//! `single` and `dp` through the run loop, on the real models and data: the same losses, the same weights.
#![cfg(feature = "engines")]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use dp_vs_ddp::Result;
use dp_vs_ddp::card::{Cores, VirtualCard};
use dp_vs_ddp::config::{DataSource, DpPlan, ModelPlan, OptimizerPlan};
use dp_vs_ddp::data::{self, Cut, Loader, LoaderOptions, Part};
use dp_vs_ddp::dp::{DpEngine, Options};
use dp_vs_ddp::engine::{Engine, Event, RunLoop, Single, StepEvent};
use dp_vs_ddp::metrics::phase::Phase;
use dp_vs_ddp::model::{self, State};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

const SGD: OptimizerPlan = OptimizerPlan::Sgd { lr: 0.05, momentum: 0.9, weight_decay: 0.0 };
const SEED: u64 = 3;

type Setup = (ModelPlan, DataSource);

fn mlp() -> Setup {
    (ModelPlan::Mlp { input: 64, hidden: 128, classes: 10 }, DataSource::Digits)
}

fn convnet(batch_norm: bool) -> Setup {
    (ModelPlan::Convnet { channels: 1, classes: 10, batch_norm }, DataSource::Digits)
}

fn gpt() -> Setup {
    (
        ModelPlan::Gpt { width: 32, heads: 4, layers: 2, context: 16, vocabulary: 64 },
        DataSource::Tokens { context: 16, vocabulary: 64, samples: 500 },
    )
}

fn loader(setup: &Setup, world_size: usize, cut: Cut) -> Loader {
    part(setup, world_size, cut, Part::Whole)
}

fn part((model, source): &Setup, world_size: usize, cut: Cut, part: Part) -> Loader {
    let images = matches!(model, ModelPlan::Convnet { .. } | ModelPlan::Resnet18 { .. });
    let (train, _) = data::open(source, images, SEED).unwrap();
    let options = LoaderOptions {
        world_size,
        cut,
        part,
        shuffle: true,
        drop_last: false,
        seed: SEED,
        workers: 1,
        first_epoch: 0,
    };
    Loader::new(Arc::new(train), options).unwrap()
}

fn single((plan, _): &Setup, optimizer: OptimizerPlan) -> Single {
    Single::new(model::build(plan, Device::Cpu, SEED).unwrap(), optimizer.into())
}

/// Replicas draw other weights than card 0, which they must not keep.
fn dp((plan, _): &Setup, optimizer: OptimizerPlan, cards: usize) -> DpEngine {
    let plan = plan.clone();
    let cards: Vec<_> = (0..cards).map(|index| VirtualCard { index, cores: Cores(Vec::new()) }).collect();
    DpEngine::new(&cards, Options::default(), optimizer, move |card| {
        model::build(&plan, Device::Cpu, SEED + card as u64)
    })
    .unwrap()
}

fn run(engine: &mut dyn Engine, mut loader: Loader, steps: usize) -> Result<Vec<StepEvent>> {
    let mut events = Vec::new();
    RunLoop { steps, ..RunLoop::default() }.run(engine, &mut loader, &mut |event| {
        if let Event::Step(step) = event {
            events.push(step);
        }
        Ok(())
    })?;
    Ok(events)
}

fn losses(events: &[StepEvent]) -> Vec<f64> {
    events.iter().map(|event| event.loss).collect()
}

fn assert_losses_agree(ours: &[StepEvent], theirs: &[StepEvent], tolerance: f64, what: &str) {
    for (step, (ours, theirs)) in losses(ours).into_iter().zip(losses(theirs)).enumerate() {
        assert!(
            (ours - theirs).abs() <= tolerance * theirs.abs(),
            "{what}, step {step}: {ours} and {theirs}"
        );
    }
}

/// Largest difference over largest value, for each tensor.
fn assert_weights_agree(ours: &State, theirs: &State, tolerance: f64, what: &str) {
    let most = |tensor: &Tensor| tensor.detach().to_kind(Kind::Double).abs().max().double_value(&[]);
    for (ours, theirs) in ours.entries().iter().zip(theirs.entries()) {
        let difference = most(&(&ours.tensor.detach() - theirs.tensor.detach()));
        let scale = most(&theirs.tensor);
        assert!(difference <= tolerance * scale, "{what}, {}: {difference} of {scale}", ours.name);
    }
}

#[test]
fn dp_trains_as_single_does() {
    for setup in [mlp(), convnet(false), gpt()] {
        for cards in [2, 4] {
            let what = format!("{} on {cards} cards", setup.0.name());
            let cut = Cut::PerRank(16 / cards);
            let mut one = single(&setup, SGD);
            let mut many = dp(&setup, SGD, cards);
            let expected = run(&mut one, loader(&setup, cards, cut), 20).unwrap();
            let events = run(&mut many, loader(&setup, cards, cut), 20).unwrap();
            assert_losses_agree(&events, &expected, 1e-4, &what);
            assert_weights_agree(many.state(), one.state(), 1e-3, &what);
        }
    }
}

#[test]
fn dp_with_adam_trains_as_single_does() {
    let adam = OptimizerPlan::Adam { lr: 1e-3, weight_decay: 0.0 };
    let setup = gpt();
    let expected = run(&mut single(&setup, adam), loader(&setup, 2, Cut::PerRank(8)), 20).unwrap();
    let events = run(&mut dp(&setup, adam, 2), loader(&setup, 2, Cut::PerRank(8)), 20).unwrap();
    assert_losses_agree(&events, &expected, 1e-3, "gpt, Adam");
    assert!(losses(&events)[19] < losses(&events)[0], "{:?}", losses(&events));
}

// Field cases 001 and 002: batches that cards do not divide, and a last batch that is short.
#[test]
fn uneven_batches_train_as_single_does() {
    let setup = mlp();
    // 1,618 samples: 9 a step on 4 cards is 3, 3, 3, 0, and the last of an epoch has 7.
    let cut = Cut::Global(9);
    let (mut one, mut many) = (single(&setup, SGD), dp(&setup, SGD, 4));
    let steps = loader(&setup, 4, cut).steps_per_epoch();
    assert_eq!(steps, 180);
    let expected = run(&mut one, loader(&setup, 4, cut), steps).unwrap();
    let events = run(&mut many, loader(&setup, 4, cut), steps).unwrap();
    assert_eq!(events.iter().map(|event| event.samples).sum::<usize>(), 1618);
    assert_eq!(events[179].samples, 7);
    assert_losses_agree(&events[..20], &expected, 1e-4, "9 samples on 4 cards");
    let forwards: Vec<_> = events[1].spans.iter().filter(|span| span.phase == Phase::Forward).collect();
    assert_eq!(forwards.len(), 3, "three cards worked: {forwards:?}");
}

/// The engine as a plan with these options would have it, and what it gives after 20 steps.
fn with_options(setup: &Setup, dp: &DpPlan, cards: usize) -> (DpEngine, Vec<StepEvent>) {
    let order = dp.order((0..cards).collect());
    let list: Vec<_> = order.iter().map(|&index| VirtualCard { index, cores: Cores(Vec::new()) }).collect();
    let options = Options { chunk_weights: dp.weights_of(&order), ..Options::default() };
    let plan = setup.0.clone();
    let mut engine =
        DpEngine::new(&list, options, SGD, move |_| model::build(&plan, Device::Cpu, SEED)).unwrap();
    let events = run(&mut engine, loader(setup, cards, Cut::PerRank(12 / cards)), 20).unwrap();
    (engine, events)
}

#[test]
fn any_output_card_gives_the_same_bits_also_under_batch_norm() {
    for setup in [mlp(), convnet(true)] {
        let of = |output_card| {
            let (engine, events) = with_options(&setup, &DpPlan { output_card, chunk_weights: None }, 3);
            assert_eq!(engine.cards()[0], output_card);
            let gathers = events[1].spans.iter().filter(|span| span.phase == Phase::Gather);
            assert!(gathers.clone().count() == 1 && gathers.clone().all(|span| span.card == output_card));
            (losses(&events), engine.state().digest().unwrap())
        };
        let first = of(0);
        assert_eq!(of(1), first, "{}", setup.0.name());
        assert_eq!(of(2), first, "{}", setup.0.name());
    }
}

#[test]
fn chunk_weights_follow_their_cards_and_train_as_single_does() {
    for setup in [mlp(), convnet(false)] {
        let mut one = single(&setup, SGD);
        let expected = run(&mut one, loader(&setup, 3, Cut::PerRank(4)), 20).unwrap();
        for output_card in [0, 2] {
            let plan = DpPlan { output_card, chunk_weights: Some(vec![1.0, 5.0, 0.01]) };
            let (engine, events) = with_options(&setup, &plan, 3);
            let what = format!("{}, output card {output_card}", setup.0.name());
            assert_losses_agree(&events, &expected, 1e-4, &what);
            assert_weights_agree(engine.state(), one.state(), 1e-3, &what);
            // Two of twelve rows, ten, and none.
            let worked =
                |card| events[1].spans.iter().any(|span| span.card == card && span.phase == Phase::Forward);
            assert_eq!([0, 1, 2].map(worked), [true, true, false], "{what}");
        }
    }
}

#[test]
fn eight_cards_on_two_cores_train() {
    let setup = mlp();
    let expected = run(&mut single(&setup, SGD), loader(&setup, 8, Cut::PerRank(2)), 20).unwrap();
    let events = run(&mut dp(&setup, SGD, 8), loader(&setup, 8, Cut::PerRank(2)), 20).unwrap();
    assert_losses_agree(&events, &expected, 1e-4, "8 cards");
}

#[test]
fn batch_norm_keeps_the_statistics_of_card_0s_rows() {
    let setup = convnet(true);
    let events = run(&mut dp(&setup, SGD, 2), loader(&setup, 2, Cut::PerRank(16)), 20).unwrap();
    assert!(losses(&events)[19] < losses(&events)[0]);
    let statistics = |engine: &mut dyn Engine, share| {
        run(engine, part(&setup, 2, Cut::PerRank(16), share), 1).unwrap();
        engine.state().buffers().map(|entry| entry.tensor.to_kind(Kind::Double)).collect::<Vec<_>>()
    };
    let gathered = statistics(&mut dp(&setup, SGD, 2), Part::Whole);
    let alone = statistics(&mut single(&setup, SGD), Part::Rank(0));
    assert_eq!(gathered.len(), 9);
    for (ours, theirs) in gathered.iter().zip(&alone) {
        assert!((ours - theirs).abs().max().double_value(&[]) < 1e-6);
    }
}

#[test]
fn both_engines_judge_the_test_set_alike() {
    let setup = mlp();
    let (_, test) = data::open(&setup.1, false, SEED).unwrap();
    let judge = |engine: &mut dyn Engine| {
        run(engine, loader(&setup, 2, Cut::PerRank(16)), 150).unwrap();
        engine.evaluate(test.batch(&(0..test.len()).collect::<Vec<_>>()).unwrap()).unwrap()
    };
    let (one, two) = (judge(&mut single(&setup, SGD)), judge(&mut dp(&setup, SGD, 2)));
    assert_eq!((one.1, two.1), (179, 179));
    assert!(one.0.abs_diff(two.0) <= 2, "{one:?} and {two:?}");
    assert!(one.0 > 150, "three epochs of digits: {one:?}");
}

#[test]
fn every_phase_of_every_card_is_told() {
    let (plan, source) = mlp();
    let ModelPlan::Mlp { input, classes, .. } = plan else { panic!("an mlp") };
    let setup = (ModelPlan::Mlp { input, hidden: 1024, classes }, source);
    let events = run(&mut dp(&setup, SGD, 2), loader(&setup, 2, Cut::PerRank(16)), 12).unwrap();
    let step = &events[2];
    let has = |card, phase| {
        step.spans.iter().any(|span| span.card == card && span.phase == phase && span.step == 2)
    };
    let by_card_0 = [
        Phase::Data,
        Phase::Scatter,
        Phase::Replicate,
        Phase::Forward,
        Phase::Gather,
        Phase::Loss,
        Phase::Backward,
        Phase::Wait,
        Phase::Reduce,
        Phase::Update,
    ];
    assert!(by_card_0.iter().all(|phase| has(0, *phase)), "{:?}", step.spans);
    let by_card_1 = [Phase::Wait, Phase::Scatter, Phase::Replicate, Phase::Forward, Phase::Backward];
    assert!(by_card_1.iter().all(|phase| has(1, *phase)), "{:?}", step.spans);
    // The calling thread's phases fill a step but for bookkeeping. Judged by the best step: on a busy machine
    // the thread may lose its core between two phases.
    let filled = events.iter().map(|event| {
        let own = event.spans.iter().filter(|span| span.card == 0);
        own.map(|span| span.duration.0).sum::<u64>() as f64 / event.end.since(event.start).0 as f64
    });
    let best = filled.fold(0.0, f64::max);
    assert!((0.9..=1.0).contains(&best), "{best}");
}

#[test]
fn a_loss_that_explodes_is_an_error_that_names_the_step() {
    let setup = mlp();
    let wild = OptimizerPlan::Sgd { lr: 1e9, momentum: 0.9, weight_decay: 0.0 };
    let error = run(&mut dp(&setup, wild, 2), loader(&setup, 2, Cut::PerRank(8)), 50).unwrap_err();
    assert!(error.to_string().starts_with("step "), "{error}");
    assert!(error.advice().unwrap().contains("optimizer.lr"));
}
