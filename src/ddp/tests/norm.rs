//! BatchNorm over all ranks: `ddp` answers as one card does.

use super::*;
use crate::config::{CommHookPlan, DdpPlan, ModelPlan};
use crate::data::Batch;
use crate::engine::{Engine, Recipe, Single};
use crate::metrics::phase::Recorder;
use crate::model;

const SGD: OptimizerPlan = OptimizerPlan::Sgd { lr: 0.05, momentum: 0.9, weight_decay: 0.0 };

/// Only what concerns the engine is read.
const SYNCED: DdpPlan = DdpPlan {
    bucket_cap_mb: 25.0,
    first_bucket_mb: 1.0,
    overlap: true,
    gradient_as_bucket_view: false,
    find_unused_parameters: false,
    static_graph: false,
    broadcast_buffers: true,
    init_sync: true,
    comm_hook: CommHookPlan::None,
    accumulate: 1,
    join: false,
    sync_batch_norm: true,
};

fn batch(images: &Tensor, labels: &Tensor, from: i64, rows: i64) -> Batch {
    Batch {
        input: images.narrow(0, from, rows),
        target: labels.narrow(0, from, rows),
        samples: rows as usize,
        global_samples: images.size()[0] as usize,
        repeated: 0,
    }
}

fn data(samples: i64, channels: i64, step: i64) -> (Tensor, Tensor) {
    let labels = Tensor::arange(samples, (Kind::Int64, Device::Cpu)).remainder(10);
    (noise(&[samples, channels, 8, 8], step), labels)
}

/// Losses over all samples, and the state afterwards.
type Outcome = (Vec<f64>, Vec<(String, Vec<f32>)>);

fn train(engine: &mut dyn Engine, steps: i64, channels: i64, from: i64, rows: i64, samples: i64) -> Outcome {
    let mut recorder = Recorder::new(0);
    let losses = (0..steps)
        .map(|step| {
            let (images, labels) = data(samples, channels, step);
            let outcome = engine.backward(batch(&images, &labels, from, rows), &mut recorder).unwrap();
            engine.update(&mut recorder).unwrap();
            outcome.loss.value().unwrap() * outcome.samples as f64 / samples as f64
        })
        .collect();
    let state = engine.state().named_tensors();
    (losses, state.into_iter().map(|(name, tensor)| (name, floats(&tensor))).collect())
}

fn single(plan: &ModelPlan, channels: i64, steps: i64, samples: i64) -> Outcome {
    let model = model::build(plan, Device::Cpu, 3).unwrap();
    let mut engine = Single::new(model, Recipe::from(SGD));
    train(&mut engine, steps, channels, 0, samples, samples)
}

fn synced(
    plan: &ModelPlan,
    options: &Options,
    accumulate: usize,
    channels: i64,
    steps: i64,
    rows: &[i64],
) -> Outcome {
    let samples = rows.iter().sum();
    let all = ranks(rows.len(), |rank, collective| {
        tch::set_num_threads(1);
        let model = model::build(plan, Device::Cpu, 3 + rank as u64).unwrap();
        let ddp = DdpPlan { accumulate, ..SYNCED };
        let engine = DdpEngine::new(model, collective, options.clone(), SGD).unwrap();
        let from = rows[..rank].iter().sum();
        train(&mut engine.following(&ddp), steps, channels, from, rows[rank], samples)
    });
    assert!(all.iter().all(|rank| rank.1 == all[0].1), "all ranks hold the same state");
    let losses = (0..steps as usize).map(|step| all.iter().map(|rank| rank.0[step]).sum()).collect();
    (losses, all[0].1.clone())
}

fn assert_same(left: &Outcome, right: &Outcome) {
    for (l, r) in left.0.iter().zip(&right.0) {
        assert!((l - r).abs() <= 1e-4 * l.abs(), "losses {:?} and {:?}", left.0, right.0);
    }
    for ((name, l), (_, r)) in left.1.iter().zip(&right.1) {
        let largest = l.iter().fold(1e-3f32, |size, value| size.max(value.abs()));
        let apart = l.iter().zip(r).fold(0f32, |apart, (l, r)| apart.max((l - r).abs()));
        assert!(apart <= 1e-3 * largest, "`{name}`: {apart} apart, largest {largest}");
    }
}

const CONVNET: ModelPlan = ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: true };

#[test]
fn single_equals_ddp_with_sync_batch_norm_on_even_and_uneven_ranks() {
    let one = single(&CONVNET, 1, 6, 16);
    for rows in [vec![16], vec![8, 8], vec![11, 5], vec![4, 4, 4, 4], vec![0, 16], vec![9, 7, 0]] {
        assert_same(&one, &synced(&CONVNET, &Options::default(), 1, 1, 6, &rows));
    }
}

#[test]
fn without_it_ddp_normalises_each_rank_s_own_samples() {
    let one = single(&CONVNET, 1, 2, 16);
    let all = ranks(2, |rank, collective| {
        let model = model::build(&CONVNET, Device::Cpu, 3).unwrap();
        let mut engine = DdpEngine::new(model, collective, Options::default(), SGD).unwrap();
        train(&mut engine, 2, 1, rank as i64 * 8, 8, 16)
    });
    let apart = (one.0[1] - all[0].0[1] - all[1].0[1]).abs() / one.0[1];
    assert!(apart > 1e-4, "{apart}");
}

#[test]
fn single_equals_ddp_with_sync_batch_norm_on_resnet18() {
    let plan = ModelPlan::Resnet18 { channels: 3, classes: 10 };
    // Weights of one step: the last layers normalise few values a channel, and rounding grows from step
    // to step.
    assert_same(&single(&plan, 3, 1, 16), &synced(&plan, &Options::default(), 1, 3, 1, &[9, 7]));
    let (one, two) = (single(&plan, 3, 3, 16), synced(&plan, &Options::default(), 1, 3, 3, &[8, 8]));
    assert_same(&(one.0, Vec::new()), &(two.0, Vec::new()));
}

#[test]
fn its_sums_keep_their_place_among_buckets_with_every_option() {
    let one = single(&CONVNET, 1, 3, 16);
    let small = Options { first_bucket_mb: 1e-3, bucket_cap_mb: 1e-2, ..Options::default() };
    for bits in 0..16 {
        let options = Options {
            overlap: bits & 1 == 0,
            gradient_as_bucket_view: bits & 2 != 0,
            find_unused_parameters: bits & 4 != 0,
            static_graph: bits & 8 != 0,
            ..small.clone()
        };
        assert_same(&one, &synced(&CONVNET, &options, 1, 1, 3, &[10, 6]));
    }
}

/// `ddp.join`: the engine asks who has how many samples, and needs no plan that knew it.
#[test]
fn ranks_that_run_out_of_samples_are_weighted_by_what_all_have() {
    let plain = ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: false };
    for (plan, sync_batch_norm) in [(&plain, false), (&CONVNET, true)] {
        let one = single(plan, 1, 3, 12);
        for rows in [vec![12, 0], vec![7, 5], vec![6, 6, 0]] {
            let all = ranks(rows.len(), |rank, collective| {
                let model = model::build(plan, Device::Cpu, 3).unwrap();
                let options = DdpPlan { join: true, sync_batch_norm, ..SYNCED };
                let engine = DdpEngine::new(model, collective, Options::default(), SGD).unwrap();
                let mut engine = engine.following(&options);
                let from = rows[..rank].iter().sum::<i64>();
                let mut recorder = Recorder::new(0);
                for step in 0..3 {
                    let (images, labels) = data(12, 1, step);
                    let unaware = Batch { global_samples: 0, ..batch(&images, &labels, from, rows[rank]) };
                    engine.backward(unaware, &mut recorder).unwrap();
                    engine.update(&mut recorder).unwrap();
                }
                let state = engine.state().named_tensors();
                state.into_iter().map(|(name, tensor)| (name, floats(&tensor))).collect::<Vec<_>>()
            });
            assert_same(&(Vec::new(), one.1.clone()), &(Vec::new(), all[0].clone()));
            assert!(all.iter().all(|rank| *rank == all[0]));
        }
    }
}

/// Statistics are those of a micro-batch of all ranks. Ranks that are cut into fewer of them come along.
#[test]
fn accumulation_normalises_micro_batches_over_all_ranks() {
    // Two ranks of 8 in halves: micro-batches of rows 0-3 and 8-11, 4-7 and 12-15.
    let halves = synced(&CONVNET, &Options::default(), 2, 1, 3, &[8, 8]);
    assert!(halves.0.iter().all(|loss| loss.is_finite()));
    assert_ne!(halves.0, synced(&CONVNET, &Options::default(), 1, 1, 3, &[8, 8]).0);
    // 5 rows in four make 2, 2, 1 and nothing.
    synced(&CONVNET, &Options::default(), 4, 1, 2, &[5, 11]);
}
