//! Options that change when and how gradients travel: none changes what arrives, but those that round.

use super::*;
use crate::config::CommHookPlan;
use crate::ddp::hooks::{AllReduce, Bucket, CommHook};
use crate::torch::grad::set_grad;

fn gradients(ddp: &DistributedDataParallel<Toy>) -> Vec<f32> {
    ddp.parameters().iter().flat_map(|p| grad(p).map_or_else(Vec::new, |g| floats(&g))).collect()
}

fn forget(ddp: &DistributedDataParallel<Toy>) {
    ddp.parameters().iter().for_each(|p| set_grad(p, None).unwrap());
}

fn mlp_loss(ddp: &mut DistributedDataParallel<Toy>, x: &Tensor) -> Tensor {
    ddp.forward(|toy| Ok(mlp_forward(toy, x).square().mean(Kind::Float))).unwrap()
}

/// A rank's rows of the `step`th batch.
fn rows(rank: usize, step: i64) -> Tensor {
    noise(&[8, 6], step * 10 + rank as i64)
}

#[test]
fn a_static_graph_gives_the_same_gradients_in_every_step() {
    let run = |static_graph: bool, overlap: bool| {
        ranks(2, |rank, collective| {
            let options = Options { static_graph, overlap, first_bucket_mb: 1e-4, ..Options::default() };
            let mut ddp = DistributedDataParallel::new(mlp(0), collective, options).unwrap();
            let mut seen = Vec::new();
            for step in 0..4 {
                let loss = mlp_loss(&mut ddp, &rows(rank, step));
                ddp.backward(&loss).unwrap();
                seen.push(gradients(&ddp));
                forget(&ddp);
            }
            seen
        })
    };
    let plain = run(false, true);
    for overlap in [true, false] {
        assert_eq!(run(true, overlap), plain);
    }
}

#[test]
fn a_static_graph_knows_its_unused_parameters_from_the_first_step_on() {
    let all = ranks(2, |_, collective| {
        let options = Options { static_graph: true, ..Options::default() };
        let mut ddp = DistributedDataParallel::new(branched(), collective, options).unwrap();
        (0..3)
            .map(|step| {
                let loss = ddp.forward(|toy| Ok(branched_loss(toy, &noise(&[4], step), false))).unwrap();
                ddp.backward(&loss).unwrap();
                let defined: Vec<bool> = ddp.parameters().iter().map(|p| grad(p).is_some()).collect();
                forget(&ddp);
                defined
            })
            .collect::<Vec<_>>()
    });
    // `side.weight` and `side.bias` stay without a gradient, as in one process.
    assert_eq!(all, vec![vec![vec![true, false, false]; 3]; 2]);
}

#[test]
fn a_rank_without_samples_at_first_learns_its_static_graph_later() {
    let all = ranks(2, |rank, collective| {
        let options = Options { static_graph: true, ..Options::default() };
        let mut ddp = DistributedDataParallel::new(mlp(0), collective, options).unwrap();
        (0..3)
            .map(|step| {
                let loss = (rank == 0 || step > 0).then(|| mlp_loss(&mut ddp, &rows(rank, step)));
                ddp.begin_backward(loss.as_ref(), Share::Equal).unwrap();
                ddp.finish_backward().unwrap();
                let seen = gradients(&ddp);
                forget(&ddp);
                seen
            })
            .collect::<Vec<_>>()
    });
    assert_eq!(all[0], all[1]);
    assert!(all[0].iter().all(|step| step.iter().any(|g| *g != 0.0)));
}

#[test]
fn a_static_graph_that_changes_is_an_error_that_names_the_parameter() {
    for appears in [true, false] {
        let errors = ranks(2, |_, collective| {
            let options = Options { static_graph: true, ..Options::default() };
            let mut ddp = DistributedDataParallel::new(branched(), collective, options).unwrap();
            let mut step = |number: i64, side: bool| {
                let loss = ddp.forward(|toy| Ok(branched_loss(toy, &noise(&[4], number), side)))?;
                ddp.backward(&loss)?;
                forget(&ddp);
                Ok(())
            };
            // A rank may hear of the other's step 1 at the end of its own step 0.
            let result: crate::Result<()> = step(0, !appears).and_then(|()| step(1, appears));
            result.unwrap_err()
        });
        for error in &errors {
            let text = error.to_string();
            assert!(text.contains("in step 1") && text.contains("`side."), "{text}");
        }
        let advice = errors.iter().find_map(|error| error.advice()).unwrap();
        assert!(advice.contains("ddp.static_graph"), "{advice}");
    }
}

#[test]
fn buckets_of_unused_parameters_do_not_wait_for_the_end_of_backward() {
    struct Telling(std::sync::mpsc::Sender<usize>);
    impl CommHook for Telling {
        fn reduce(&mut self, collective: &mut dyn Collective, bucket: Bucket) -> crate::Result<usize> {
            let sent = AllReduce.reduce(collective, bucket)?;
            self.0.send(bucket.index).unwrap();
            Ok(sent)
        }
    }
    // One parameter a bucket; in reverse order the unused side comes first.
    let options = Options {
        find_unused_parameters: true,
        first_bucket_mb: 1e-9,
        bucket_cap_mb: 1e-9,
        ..Options::default()
    };
    let mut ddp = DistributedDataParallel::new(branched(), Box::new(Local::new()), options).unwrap();
    let (sender, reduced) = std::sync::mpsc::channel();
    ddp.register_comm_hook(Box::new(Telling(sender))).unwrap();
    let loss = ddp.forward(|toy| Ok(branched_loss(toy, &noise(&[4], 0), false))).unwrap();
    // Backward cannot end before both have been reduced.
    let _hook = crate::torch::grad::on_gradient(&ddp.module().get("trunk"), move || {
        for bucket in 0..2 {
            assert_eq!(reduced.recv_timeout(PATIENCE), Ok(bucket));
        }
        Ok(())
    })
    .unwrap();
    ddp.backward(&loss).unwrap();
}

#[test]
fn accumulated_micro_batches_equal_one_batch_in_every_way_gradients_can_travel() {
    for options in ways() {
        let all = ranks(2, |rank, collective| {
            let mut ddp = DistributedDataParallel::new(mlp(0), collective, options.clone()).unwrap();
            let mut steps = Vec::new();
            for step in 0..2 {
                let x = rows(rank, step);
                let loss = mlp_loss(&mut ddp, &x);
                ddp.backward(&loss).unwrap();
                let whole = gradients(&ddp);
                forget(&ddp);
                // 8 rows as 3, 3 and 2.
                for (offset, len) in [(0, 3), (3, 3), (6, 2)] {
                    let loss = mlp_loss(&mut ddp, &x.narrow(0, offset, len)) * (len as f64 / 8.0);
                    if offset < 6 {
                        ddp.backward_no_sync(&loss).unwrap();
                    } else {
                        ddp.begin_backward(Some(&loss), Share::Samples { mine: 8, global: 16 }).unwrap();
                        ddp.finish_backward().unwrap();
                    }
                }
                steps.push((whole, gradients(&ddp)));
                forget(&ddp);
            }
            steps
        });
        for (whole, parts) in all.iter().flatten() {
            assert_close(whole, parts, 1e-6);
        }
        assert_eq!(
            all[0].iter().map(|s| &s.1).collect::<Vec<_>>(),
            all[1].iter().map(|s| &s.1).collect::<Vec<_>>()
        );
    }
}

/// Case 034: five micro-batches in windows of two; the last window has one, and its true divisor.
#[test]
fn the_last_partial_window_is_reduced_with_its_true_divisor() {
    let train = |world_size: usize, micro_batches: usize| {
        let all = ranks(world_size, |rank, collective| {
            let mut ddp = DistributedDataParallel::new(mlp(0), collective, Options::default()).unwrap();
            let mut optimizer = sgd(0.1, 0.0, 0.0, &ddp);
            let batches: Vec<i64> = (0..micro_batches as i64).collect();
            for window in batches.chunks(2) {
                for (place, batch) in window.iter().enumerate() {
                    // Two rows a micro-batch in all, one a rank where there are two.
                    let x = noise(&[2, 6], *batch).chunk(world_size as i64, 0).swap_remove(rank);
                    let loss = mlp_loss(&mut ddp, &x) / window.len() as f64;
                    if place + 1 < window.len() {
                        ddp.backward_no_sync(&loss).unwrap();
                    } else {
                        ddp.backward(&loss).unwrap();
                    }
                }
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
            ddp.parameters().iter().flat_map(floats).collect::<Vec<_>>()
        });
        assert!(all.iter().all(|rank| *rank == all[0]), "all ranks identical at the end");
        all[0].clone()
    };
    for micro_batches in [5, 1] {
        assert_close(&train(2, micro_batches), &train(1, micro_batches), 1e-6);
    }
}

#[test]
fn a_parameter_used_only_in_an_unsynced_micro_batch_counts_as_used() {
    let all = ranks(2, |rank, collective| {
        let options = Options { find_unused_parameters: true, ..Options::default() };
        let mut ddp = DistributedDataParallel::new(branched(), collective, options).unwrap();
        let loss = ddp.forward(|toy| Ok(branched_loss(toy, &noise(&[4], 0), rank == 0))).unwrap();
        ddp.backward_no_sync(&loss).unwrap();
        let local = grad(&ddp.module().get("side.weight")).map(|g| floats(&g));
        let loss = ddp.forward(|toy| Ok(branched_loss(toy, &noise(&[4], 1), false))).unwrap();
        ddp.backward(&loss).unwrap();
        (local, floats(&grad(&ddp.module().get("side.weight")).unwrap()))
    });
    let only_rank_0: Vec<f32> = all[0].0.as_ref().unwrap().iter().map(|g| g / 2.0).collect();
    assert_eq!(all[1].0, None);
    assert_close(&all[0].1, &only_rank_0, 1e-6);
    assert_eq!(all[0].1, all[1].1);
}

#[test]
fn hooks_that_round_stay_close_and_say_how_little_they_send() {
    let run = |hook: CommHookPlan| {
        ranks(4, |rank, collective| {
            let options = Options { comm_hook: hook, first_bucket_mb: 1e-4, ..Options::default() };
            let mut ddp = DistributedDataParallel::new(mlp(0), collective, options).unwrap();
            let mut last = Vec::new();
            for step in 0..3 {
                let loss = mlp_loss(&mut ddp, &rows(rank, step));
                ddp.backward(&loss).unwrap();
                last = gradients(&ddp);
                forget(&ddp);
            }
            (last, ddp.bytes_sent(), ddp.gradient_bytes() as u64)
        })
    };
    let plain = run(CommHookPlan::None);
    assert_eq!(plain[0].1, 3 * plain[0].2);
    let size = plain[0].0.iter().fold(0f32, |size, g| size.max(g.abs()));
    for hook in [CommHookPlan::Bf16, CommHookPlan::Fp16] {
        let rounded = run(hook);
        assert!(rounded.iter().all(|rank| rank.0 == rounded[0].0), "all ranks hold the same bits");
        assert_eq!(rounded[0].1 * 2, plain[0].1);
        assert_close(&rounded[0].0, &plain[0].0, size * 0.02);
        assert_ne!(rounded[0].0, plain[0].0);
    }
}

/// What PowerSGD leaves out comes later: over many steps of one gradient the sums meet.
#[test]
fn powersgd_on_two_ranks_loses_nothing_over_time() {
    let all = ranks(2, |rank, collective| {
        let hook = CommHookPlan::Powersgd { rank: 1, start_step: 2 };
        let options = Options { comm_hook: hook, ..Options::default() };
        let toy = Toy::default().with("w", noise(&[20, 30], 1));
        let mut ddp = DistributedDataParallel::new(toy, collective, options).unwrap();
        let own = noise(&[20, 30], 7 + rank as i64);
        let mut sum = Tensor::zeros([20, 30], (Kind::Float, Device::Cpu));
        for _ in 0..42 {
            let loss = ddp.forward(|toy| Ok((toy.get("w") * &own).sum(Kind::Float))).unwrap();
            ddp.backward(&loss).unwrap();
            sum += grad(&ddp.parameters()[0]).unwrap();
            forget(&ddp);
        }
        (floats(&sum), ddp.bytes_sent())
    });
    let mean = (noise(&[20, 30], 7) + noise(&[20, 30], 8)) * 0.5;
    assert_eq!(all[0].0, all[1].0);
    assert_eq!(all[0].1, 4 * (2 * 600 + 40 * 50));
    let total = Tensor::from_slice(&all[0].0).view([20, 30]);
    let apart = (&total - &mean * 42.0).norm().double_value(&[]) / mean.norm().double_value(&[]);
    // The error is that of a few steps, whatever their number.
    assert!(apart < 15.0, "{apart} gradients are missing after 42 steps");
}

/// Case 059: without the first broadcast, ranks that start apart stay apart.
#[test]
fn without_init_sync_ranks_that_start_apart_stay_apart() {
    let after = |init_sync: bool| {
        ranks(2, |rank, collective| {
            let options = Options { init_sync, ..Options::default() };
            let mut ddp = DistributedDataParallel::new(mlp(rank as i64), collective, options).unwrap();
            let mut optimizer = sgd(0.1, 0.9, 0.0, &ddp);
            for step in 0..5 {
                let loss = mlp_loss(&mut ddp, &rows(rank, step));
                ddp.backward(&loss).unwrap();
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
            ddp.parameters().iter().flat_map(floats).collect::<Vec<_>>()
        })
    };
    let (synced, apart) = (after(true), after(false));
    assert_eq!(synced[0], synced[1]);
    assert_ne!(apart[0], apart[1]);
}

/// An overflow on one rank reaches all of them with the average: all leave the step out.
#[test]
fn a_step_that_overflows_on_one_rank_is_left_out_on_all() {
    use crate::torch::precision::Scaler;
    let decisions = ranks(2, |rank, collective| {
        let mut ddp = DistributedDataParallel::new(mlp(0), collective, Options::default()).unwrap();
        let mut scaler = Scaler::default();
        (0..3)
            .map(|step| {
                let loss = mlp_loss(&mut ddp, &rows(rank, step)) * scaler.scale();
                let broken = step == 1 && rank == 1;
                let loss = if broken { loss * f64::INFINITY } else { loss };
                ddp.backward(&loss).unwrap();
                scaler.unscale(&ddp.parameters()).unwrap();
                forget(&ddp);
                (scaler.end_step(), scaler.scale())
            })
            .collect::<Vec<_>>()
    });
    assert_eq!(decisions[0], [(true, 65536.0), (false, 32768.0), (true, 32768.0)]);
    assert_eq!(decisions[0], decisions[1]);
}

/// Case 035: gradients are equal on all ranks after backward, so their norm is that of each.
#[test]
fn the_norm_that_clips_is_the_average_s_on_every_rank() {
    for world_size in [1, 2, 4] {
        let norms = ranks(world_size, |_, collective| {
            let toy = Toy::default().with("w", Tensor::zeros([2], (Kind::Float, Device::Cpu)));
            let mut ddp = DistributedDataParallel::new(toy, collective, Options::default()).unwrap();
            let direction = Tensor::from_slice(&[0.48f32, 0.64]);
            let loss = ddp.forward(|toy| Ok((toy.get("w") * &direction).sum(Kind::Float))).unwrap();
            ddp.backward(&loss).unwrap();
            let norm = crate::torch::precision::clip_norm(&ddp.parameters(), 1.0).unwrap();
            (norm, gradients(&ddp))
        });
        for (norm, gradient) in norms {
            assert!((norm - 0.8).abs() < 1e-6, "{norm} on {world_size} ranks");
            assert_close(&gradient, &[0.48, 0.64], 1e-7);
        }
    }
}
