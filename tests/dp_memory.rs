//! Memory of the cards under `dp`: counted for the card whose thread asked, and flat over the steps. In a
//! process of its own, because the counting allocator is one for the whole process.
#![cfg(feature = "engines")]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use dp_vs_ddp::card::{Cores, Meter, VirtualCard};
use dp_vs_ddp::config::{ModelPlan, OptimizerPlan};
use dp_vs_ddp::data::Batch;
use dp_vs_ddp::dp::{DpEngine, Options};
use dp_vs_ddp::engine::Engine;
use dp_vs_ddp::metrics::phase::Recorder;
use dp_vs_ddp::{model, torch};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tch::{Device, Kind, Tensor};

// Field case 154: nothing grows from step to step, and the logged loss is a plain number.
#[test]
fn memory_is_flat_over_two_thousand_steps_and_card_0_holds_most() {
    let meter = Arc::new(Meter::create(2).unwrap());
    torch::memory::install(Arc::clone(&meter)).unwrap();
    torch::memory::set_thread_card(0);
    let cards: Vec<_> = (0..2).map(|index| VirtualCard { index, cores: Cores(Vec::new()) }).collect();
    let options = Options { meter: Some(Arc::clone(&meter)), ..Options::default() };
    let optimizer = OptimizerPlan::Sgd { lr: 0.01, momentum: 0.9, weight_decay: 0.0 };
    let plan = ModelPlan::Mlp { input: 64, hidden: 256, classes: 10 };
    let mut engine =
        DpEngine::new(&cards, options, optimizer, move |_| model::build(&plan, Device::Cpu, 0)).unwrap();
    let input = Tensor::ones([16, 64], (Kind::Float, Device::Cpu));
    let target = Tensor::zeros([16], (Kind::Int64, Device::Cpu));
    let mut recorder = Recorder::new(0);
    let mut losses = Vec::new();
    let mut train = |steps| {
        for _ in 0..steps {
            let batch = Batch::whole(input.shallow_clone(), target.shallow_clone());
            losses.push(engine.backward(batch, &mut recorder).unwrap().loss.value().unwrap());
            engine.update(&mut recorder).unwrap();
            recorder.drain();
        }
        [0, 1].map(|card| meter.card(card).live_bytes.load(Relaxed))
    };
    let warm = train(20);
    [0, 1].iter().for_each(|card| torch::memory::reset_peak(&meter, *card));
    let end = train(1980);
    let peak = [0, 1].map(|card| meter.card(card).peak_bytes.load(Relaxed));

    // A replica thread may free the last rows a moment after the step has returned.
    for card in 0..2 {
        assert!(
            end[card].abs_diff(warm[card]) <= 16 * 1024,
            "card {card}: {} became {}",
            warm[card],
            end[card]
        );
    }
    let weights = engine.state().parameters().map(|entry| 4 * entry.tensor.numel() as u64).sum::<u64>();
    // Between steps: weights and momentum on card 0, weights on card 1, and little else.
    assert!(end[0] >= 2 * weights && end[0] < 5 * weights / 2, "{} of {weights}", end[0]);
    assert!(end[1] >= weights && end[1] < 3 * weights / 2, "{} of {weights}", end[1]);
    // Within a step: each its gradients on top.
    assert!(peak[0] >= 3 * weights && peak[1] >= 2 * weights && peak[0] > peak[1] + weights / 2, "{peak:?}");
    assert!(losses[1999] < losses[0]);
}
