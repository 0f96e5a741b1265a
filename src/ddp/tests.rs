//! Ranks as threads over shared memory, on models small enough to work out by hand or in one process.

use super::*;
use crate::comm::{Collective, Local, Shm};
use crate::config::OptimizerPlan;
use crate::error::{Error, Kind as ErrorKind};
use crate::metrics::phase::settle;
use crate::torch::grad::grad;
use crate::torch::no_grad;
use crate::torch::optim::Optimizer;
use std::cell::RefCell;
use std::time::Duration;
use tch::{Device, Kind, Tensor};

mod join;
mod norm;
mod options;

const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `work` as every rank, each on its own thread; results by rank.
fn ranks<T: Send>(world_size: usize, work: impl Fn(usize, Box<dyn Collective>) -> T + Sync) -> Vec<T> {
    if world_size == 1 {
        return vec![work(0, Box::new(Local::new()))];
    }
    let group = Shm::threads(world_size, PATIENCE).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = group
            .into_iter()
            .enumerate()
            .map(|(rank, shm)| {
                scope.spawn({
                    let work = &work;
                    move || work(rank, Box::new(shm))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Any few tensors with names.
#[derive(Default)]
struct Toy {
    parameters: Vec<(String, Tensor)>,
    buffers: RefCell<Vec<(String, Tensor)>>,
}

impl Module for Toy {
    fn named_parameters(&self) -> Vec<(String, Tensor)> {
        self.parameters.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
    }
    fn named_buffers(&self) -> Vec<(String, Tensor)> {
        self.buffers.borrow().iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
    }
}

impl Toy {
    fn with(mut self, name: &str, tensor: Tensor) -> Self {
        self.parameters.push((name.to_owned(), tensor.set_requires_grad(true)));
        self
    }
    fn frozen(mut self, name: &str, tensor: Tensor) -> Self {
        self.parameters.push((name.to_owned(), tensor));
        self
    }
    fn buffer(self, name: &str, tensor: Tensor) -> Self {
        self.buffers.borrow_mut().push((name.to_owned(), tensor));
        self
    }
    fn get(&self, name: &str) -> Tensor {
        let of = |list: &[(String, Tensor)]| {
            list.iter().find(|(known, _)| known == name).map(|(_, t)| t.shallow_clone())
        };
        of(&self.parameters).or_else(|| of(&self.buffers.borrow())).unwrap()
    }
}

/// Numbers in about -1..1 that look random and depend on nothing but their arguments.
fn noise(shape: &[i64], seed: i64) -> Tensor {
    let len: i64 = shape.iter().product();
    let steps = Tensor::arange(len, (Kind::Double, Device::Cpu)) + 1.0;
    (steps * (12.9898 + seed as f64)).sin().to_kind(Kind::Float).reshape(shape)
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.detach().to_kind(Kind::Float).contiguous().view([-1])).unwrap()
}

fn assert_close(left: &[f32], right: &[f32], tolerance: f32) {
    assert_eq!(left.len(), right.len());
    for (l, r) in left.iter().zip(right) {
        assert!((l - r).abs() <= tolerance, "{l} and {r} in {left:?} and {right:?}");
    }
}

fn sgd(lr: f64, momentum: f64, weight_decay: f64, ddp: &DistributedDataParallel<Toy>) -> Optimizer {
    Optimizer::new(OptimizerPlan::Sgd { lr, momentum, weight_decay }, ddp.parameters())
}

/// Every combination of the options that change how gradients travel.
fn ways() -> Vec<Options> {
    let mut ways = Vec::new();
    for bits in 0..8 {
        ways.push(Options {
            overlap: bits & 1 == 0,
            gradient_as_bucket_view: bits & 2 != 0,
            find_unused_parameters: bits & 4 != 0,
            // Two of the three layers below fill a bucket: there is an order to keep.
            first_bucket_mb: 1e-4,
            bucket_cap_mb: 2e-4,
            ..Options::default()
        });
    }
    ways
}

/// Three layers, one hidden width.
fn mlp(seed: i64) -> Toy {
    Toy::default()
        .with("0.weight", noise(&[8, 6], seed))
        .with("0.bias", noise(&[8], seed + 1))
        .with("1.weight", noise(&[8, 8], seed + 2))
        .with("1.bias", noise(&[8], seed + 3))
        .with("2.weight", noise(&[3, 8], seed + 4))
}

fn mlp_forward(toy: &Toy, input: &Tensor) -> Tensor {
    let hidden = input.linear(&toy.get("0.weight"), Some(&toy.get("0.bias"))).tanh();
    let hidden = hidden.linear(&toy.get("1.weight"), Some(&toy.get("1.bias"))).tanh();
    hidden.linear(&toy.get("2.weight"), None::<&Tensor>)
}

/// Case 067: the reduction is a mean, so the step does not depend on the number of ranks.
#[test]
fn a_linear_step_is_the_same_on_one_two_and_four_ranks() {
    let input = noise(&[8, 3], 1);
    let target = noise(&[8, 1], 2);
    let (input, target) = (floats(&input), floats(&target));
    let weights: Vec<Vec<f32>> = [1, 2, 4]
        .into_iter()
        .map(|world_size| {
            let rows = 8 / world_size as i64;
            let all = ranks(world_size, |rank, collective| {
                let at = rank as i64 * rows;
                let x = Tensor::from_slice(&input).view([8, 3]).narrow(0, at, rows);
                let y = Tensor::from_slice(&target).view([8, 1]).narrow(0, at, rows);
                let toy = Toy::default().with("w", noise(&[1, 3], 3));
                let mut ddp = DistributedDataParallel::new(toy, collective, Options::default()).unwrap();
                let mut optimizer = sgd(0.1, 0.0, 0.0, &ddp);
                let output = ddp.forward(|toy| Ok(x.linear(&toy.get("w"), None::<&Tensor>))).unwrap();
                ddp.backward(&output.mse_loss(&y, tch::Reduction::Mean)).unwrap();
                optimizer.step().unwrap();
                floats(&ddp.module().get("w"))
            });
            assert!(all.iter().all(|weights| *weights == all[0]), "bit-equal over ranks");
            all[0].clone()
        })
        .collect();
    assert_ne!(weights[0], floats(&noise(&[1, 3], 3)), "the step did something");
    assert_close(&weights[0], &weights[1], 1e-6);
    assert_close(&weights[0], &weights[2], 1e-6);
}

#[test]
fn training_equals_one_process_in_every_way_gradients_can_travel() {
    let train = |world_size: usize, options: &Options| -> Vec<f32> {
        let rows = 8 / world_size as i64;
        let all = ranks(world_size, |rank, collective| {
            let mut ddp =
                DistributedDataParallel::new(mlp(rank as i64 * 50), collective, options.clone()).unwrap();
            let mut optimizer = sgd(0.2, 0.9, 0.01, &ddp);
            for step in 0..6 {
                let x = noise(&[8, 6], 100 + step).narrow(0, rank as i64 * rows, rows);
                let output = ddp.forward(|toy| Ok(mlp_forward(toy, &x))).unwrap();
                ddp.backward(&output.square().mean(Kind::Float)).unwrap();
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
            ddp.parameters().iter().flat_map(floats).collect::<Vec<f32>>()
        });
        assert!(all.iter().all(|weights| *weights == all[0]), "bit-equal over ranks: {options:?}");
        all[0].clone()
    };
    let single = train(1, &Options::default());
    assert_ne!(single, mlp(0).parameters.iter().flat_map(|(_, t)| floats(t)).collect::<Vec<_>>());
    for options in ways() {
        assert_close(&train(1, &options), &single, 1e-6);
        assert_close(&train(2, &options), &single, 2e-6);
    }
    assert_close(&train(4, &ways()[0]), &single, 2e-6);
    assert_close(&train(8, &ways()[0]), &single, 2e-6);
}

/// Case 059: ranks that start differently start equally.
#[test]
fn rank_0_s_weights_and_buffers_are_the_start_of_all() {
    let hashes = ranks(3, |rank, collective| {
        let seed = rank as i64 * 10;
        let toy = Toy::default()
            .with("w", noise(&[4, 4], seed))
            .frozen("fixed", noise(&[3], seed + 1))
            .buffer("mean", noise(&[4], seed + 2));
        let mut ddp = DistributedDataParallel::new(toy, collective, Options::default()).unwrap();
        let all = |toy: &Toy| ["w", "fixed", "mean"].map(|name| floats(&toy.get(name)));
        let start = all(ddp.module());
        let mut optimizer = sgd(0.1, 0.0, 0.0, &ddp);
        for step in 0..5 {
            let x = noise(&[2, 4], step + seed);
            let loss = ddp
                .forward(|toy| {
                    let output = x.matmul(&toy.get("w"));
                    // A running statistic, different on every rank.
                    no_grad(|| toy.get("mean").copy_(&output.mean_dim(0, false, Kind::Float)));
                    Ok(output.square().mean(Kind::Float))
                })
                .unwrap();
            ddp.backward(&loss).unwrap();
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
        (start, all(ddp.module()))
    });
    assert_eq!(hashes[0].0[1], floats(&noise(&[3], 1)), "rank 0 keeps its own");
    assert_ne!(hashes[0].0[2], hashes[0].1[2], "the statistic moved");
    assert!(hashes.iter().all(|rank| *rank == hashes[0]));
}

/// Case 044: every rank is told the first difference, before any of them could hang.
#[test]
fn different_models_are_named_on_every_rank() {
    let check = |build: fn(usize) -> Toy, expected: &str| {
        let errors = ranks(3, |rank, collective| {
            DistributedDataParallel::new(build(rank), collective, Options::default()).unwrap_err().to_string()
        });
        for (rank, error) in errors.iter().enumerate() {
            assert_eq!(*error, format!("rank {rank}: ranks built different models: {expected}"));
        }
    };
    check(
        |rank| {
            Toy::default()
                .with("a", noise(&[2], 0))
                .with("w", noise(&[if rank == 1 { 65 } else { 64 }, 2], 0))
        },
        "entry 1 is parameter `w` [64, 2] Float on rank 0 and parameter `w` [65, 2] Float on rank 1",
    );
    check(
        |rank| if rank == 2 { mlp(0).with("3.weight", noise(&[1], 0)) } else { mlp(0) },
        "entry 5 is option bucket_cap_mb = 25 on rank 0 and parameter `3.weight` [1] Float on rank 2",
    );
    check(
        |rank| {
            Toy::default()
                .with("w", noise(&[4], 0).to_kind(if rank == 1 { Kind::Double } else { Kind::Float }))
        },
        "entry 0 is parameter `w` [4] Float on rank 0 and parameter `w` [4] Double on rank 1",
    );
}

/// A trunk, and a side branch that takes part when asked to.
fn branched() -> Toy {
    Toy::default()
        .with("trunk", noise(&[4], 0))
        .with("side.weight", noise(&[4], 1))
        .with("side.bias", noise(&[4], 2))
}

fn branched_loss(toy: &Toy, x: &Tensor, side: bool) -> Tensor {
    let trunk = x * toy.get("trunk");
    let output = if side { trunk * toy.get("side.weight") + toy.get("side.bias") } else { trunk };
    output.square().sum(Kind::Float)
}

/// Case 025, option off: an error in that very step, on all ranks, naming the parameters.
#[test]
fn an_unused_parameter_is_an_error_in_its_step_on_every_rank() {
    let start = std::time::Instant::now();
    let errors = ranks(2, |rank, collective| {
        let mut ddp = DistributedDataParallel::new(branched(), collective, Options::default()).unwrap();
        for step in 0..4 {
            let loss = ddp
                .forward(|toy| Ok(branched_loss(toy, &noise(&[4], step), rank == 0 || step % 2 == 0)))
                .unwrap();
            if let Err(error) = ddp.backward(&loss) {
                return (step, error.to_string(), error.advice().map(str::to_owned));
            }
        }
        panic!("nothing was noticed");
    });
    assert!(start.elapsed() < PATIENCE / 2, "noticed at once, not by the deadline");
    let expected = "2 of 3 parameters took no part in the loss of step 1: `side.weight`, `side.bias`; \
                    find_unused_parameters is off";
    assert_eq!((errors[1].0, &errors[1].1), (1, &format!("rank 1: {expected}")));
    assert!(errors[1].2.as_ref().unwrap().contains("ddp.find_unused_parameters"));
    assert_eq!((errors[0].0, &errors[0].1), (1, &format!("stopped by rank 1: {expected}")));
}

/// Case 025, option on: what one rank skips, the others still average.
#[test]
fn a_branch_that_some_ranks_skip_is_averaged_with_zeros() {
    for as_view in [false, true] {
        let gradients = ranks(2, |rank, collective| {
            let options = Options {
                find_unused_parameters: true,
                gradient_as_bucket_view: as_view,
                ..Options::default()
            };
            let mut ddp = DistributedDataParallel::new(branched(), collective, options).unwrap();
            let mut seen = Vec::new();
            for step in 0..4 {
                let skips = step % 2 == 1 && rank == 1;
                let loss = ddp.forward(|toy| Ok(branched_loss(toy, &noise(&[4], step), !skips))).unwrap();
                ddp.backward(&loss).unwrap();
                let parameters = ddp.parameters();
                seen.push(parameters.iter().map(|p| floats(&grad(p).unwrap())).collect::<Vec<_>>());
                for parameter in &parameters {
                    crate::torch::grad::set_grad(parameter, None).unwrap();
                }
            }
            seen
        });
        assert_eq!(gradients[0], gradients[1]);
        // Step 1: side.bias has gradient 2 (x*t*w + b) on rank 0 and none on rank 1.
        let (x, toy) = (noise(&[4], 1), branched());
        let full = (x * toy.get("trunk") * toy.get("side.weight") + toy.get("side.bias")) * 2.0;
        assert_close(&gradients[0][1][2], &floats(&(&full * 0.5)), 1e-6);
    }
}

/// Case 026: unused on every rank is unused, as in one process: no gradient, no decay, no momentum.
#[test]
fn a_globally_unused_parameter_keeps_an_undefined_gradient_and_its_value() {
    let train = |world_size: usize, as_view: bool| {
        let all = ranks(world_size, |_, collective| {
            let options = Options {
                find_unused_parameters: true,
                gradient_as_bucket_view: as_view,
                ..Options::default()
            };
            let mut ddp = DistributedDataParallel::new(branched(), collective, options).unwrap();
            let mut optimizer = sgd(0.1, 0.9, 0.1, &ddp);
            let mut undefined = Vec::new();
            // Used once, so that there is a momentum that could move it afterwards.
            for step in 0..4 {
                let loss = ddp.forward(|toy| Ok(branched_loss(toy, &noise(&[4], step), step == 0))).unwrap();
                ddp.backward(&loss).unwrap();
                undefined.push(grad(&ddp.module().get("side.weight")).is_none());
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
            (undefined, ddp.parameters().iter().flat_map(floats).map(f32::to_bits).collect::<Vec<_>>())
        });
        assert!(all.iter().all(|rank| *rank == all[0]));
        all[0].clone()
    };
    let single = train(1, false);
    assert_eq!(single.0, [false, true, true, true]);
    for as_view in [false, true] {
        assert_eq!(train(2, as_view), single);
        assert_eq!(train(4, as_view), single);
    }
}

/// Case 029: 30 and 10 samples; and a rank with none at all.
#[test]
fn uneven_ranks_weighted_by_samples_equal_one_process() {
    let gradient = |counts: &[usize], equal: bool| {
        let global: usize = counts.iter().sum();
        let all = ranks(counts.len(), |rank, collective| {
            let mut ddp = DistributedDataParallel::new(mlp(0), collective, Options::default()).unwrap();
            for _ in 0..2 {
                let mine = counts[rank];
                let before: usize = counts[..rank].iter().sum();
                let x = noise(&[global as i64, 6], 9).narrow(0, before as i64, mine as i64);
                let share = if equal { Share::Equal } else { Share::Samples { mine, global } };
                let loss = (mine > 0)
                    .then(|| ddp.forward(|toy| Ok(mlp_forward(toy, &x).square().mean(Kind::Float))).unwrap());
                for parameter in ddp.parameters() {
                    crate::torch::grad::set_grad(&parameter, None).unwrap();
                }
                ddp.begin_backward(loss.as_ref(), share).unwrap();
                ddp.finish_backward().unwrap();
            }
            ddp.parameters().iter().flat_map(|p| floats(&grad(p).unwrap())).collect::<Vec<f32>>()
        });
        assert!(all.iter().all(|rank| *rank == all[0]));
        all[0].clone()
    };
    let single = gradient(&[40], true);
    assert_close(&gradient(&[30, 10], false), &single, 2e-6);
    assert_close(&gradient(&[0, 40], false), &single, 2e-6);
    assert_close(&gradient(&[30, 0, 9, 1], false), &single, 2e-6);
    let equal = gradient(&[30, 10], true);
    assert!(equal.iter().zip(&single).any(|(e, s)| (e - s).abs() > 1e-4), "PyTorch's rule differs here");
}

fn batch_norm(toy: &Toy, x: &Tensor) -> Tensor {
    let (weight, bias) = (toy.get("bn.weight"), toy.get("bn.bias"));
    x.batch_norm(
        Some(&weight),
        Some(&bias),
        Some(&toy.get("mean")),
        Some(&toy.get("var")),
        true,
        0.1,
        1e-5,
        false,
    )
}

fn normalised() -> Toy {
    Toy::default()
        .with("bn.weight", noise(&[3], 1) + 2.0)
        .with("bn.bias", noise(&[3], 2))
        .buffer("mean", Tensor::zeros([3], (Kind::Float, Device::Cpu)))
        .buffer("var", Tensor::ones([3], (Kind::Float, Device::Cpu)))
}

/// Case 031: buffers are not written to while a graph that may need them waits for its backward.
#[test]
fn two_forwards_and_one_backward_equal_the_run_without_buffer_sync() {
    let run = |broadcast_buffers: bool| {
        ranks(2, |rank, collective| {
            let options = Options { broadcast_buffers, ..Options::default() };
            let mut ddp = DistributedDataParallel::new(normalised(), collective, options).unwrap();
            let mut gradients = Vec::new();
            for step in 0..3 {
                let x = noise(&[5, 3], step * 7 + rank as i64);
                let first = ddp.forward(|toy| Ok(batch_norm(toy, &x))).unwrap();
                let second = ddp.forward(|toy| Ok(batch_norm(toy, &(&x * 2.0 + 1.0)))).unwrap();
                ddp.backward(&(first * second).square().mean(Kind::Float)).unwrap();
                for parameter in ddp.parameters() {
                    gradients.extend(floats(&grad(&parameter).unwrap()));
                    crate::torch::grad::set_grad(&parameter, None).unwrap();
                }
            }
            (gradients, floats(&ddp.module().get("mean")))
        })
    };
    let (with, without) = (run(true), run(false));
    assert_eq!(with[0].0, without[0].0);
    assert_eq!(with[0].1, with[1].1, "rank 0's statistics are everybody's");
    assert_ne!(without[0].1, without[1].1);
}

/// Case 032: a buffer that is replaced by a new tensor is still synchronised.
#[test]
fn replaced_buffers_are_looked_up_each_time() {
    let buffers = ranks(2, |rank, collective| {
        let toy = Toy::default().with("w", noise(&[2], 0)).buffer("seen", noise(&[2], 1));
        let mut ddp = DistributedDataParallel::new(toy, collective, Options::default()).unwrap();
        (0..3)
            .map(|step| {
                let loss = ddp
                    .forward(|toy| {
                        toy.buffers.borrow_mut()[0].1 = noise(&[2], 10 * step + rank as i64);
                        Ok((toy.get("w") * toy.get("seen")).sum(Kind::Float))
                    })
                    .unwrap();
                ddp.backward(&loss).unwrap();
                floats(&ddp.module().get("seen"))
            })
            .collect::<Vec<_>>()
    });
    assert_eq!(buffers[0], buffers[1]);
    assert_eq!(buffers[0][2], floats(&noise(&[2], 20)));
    let errors = ranks(2, |_, collective| {
        let toy = Toy::default().with("w", noise(&[2], 0)).buffer("seen", noise(&[2], 1));
        let mut ddp = DistributedDataParallel::new(toy, collective, Options::default()).unwrap();
        ddp.module().buffers.borrow_mut()[0].1 = noise(&[3], 1);
        let loss = ddp.forward(|toy| Ok(toy.get("w").sum(Kind::Float))).unwrap();
        ddp.backward(&loss).unwrap_err().to_string()
    });
    assert!(errors.iter().any(|error| error.contains("module's buffers changed")), "{errors:?}");
}

/// Case 049: the bucket holds values in the parameter's order whatever strides the gradient has.
#[test]
fn gradients_with_odd_strides_arrive_right() {
    let forward = |toy: &Toy, x: &Tensor| {
        let image = x.view([2, 3, 4, 4]).contiguous();
        let convolved = image.conv2d(&toy.get("conv"), None::<&Tensor>, [1], [0], [1], 1);
        // w.t() makes a transposed gradient.
        convolved.view([2, -1]).matmul(&toy.get("linear").transpose(0, 1)).square().mean(Kind::Float)
    };
    let build = || {
        let channels_last = |t: Tensor| t.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
        Toy::default()
            .with("conv", channels_last(noise(&[5, 3, 1, 1], 1)))
            .with("wide", channels_last(noise(&[4, 3, 2, 2], 3)))
            .with("linear", noise(&[80, 6], 2).transpose(0, 1))
    };
    let gradients = |world_size: usize, options: &Options| {
        ranks(world_size, |_, collective| {
            let mut ddp = DistributedDataParallel::new(build(), collective, options.clone()).unwrap();
            let x = noise(&[96], 5);
            let loss = ddp
                .forward(|toy| {
                    // Its gradient is the expanded, permuted constant itself.
                    let wide =
                        (toy.get("wide").permute([3, 2, 1, 0]) * noise(&[2, 2, 3, 4], 6)).sum(Kind::Float);
                    Ok(forward(toy, &x) + wide)
                })
                .unwrap();
            ddp.backward(&loss).unwrap();
            ddp.parameters().iter().map(|p| (p.size(), floats(&grad(p).unwrap()))).collect::<Vec<_>>()
        })
    };
    let toy = build();
    let loss = (toy.get("wide").permute([3, 2, 1, 0]) * noise(&[2, 2, 3, 4], 6)).sum(Kind::Float);
    (forward(&toy, &noise(&[96], 5)) + loss).backward();
    let alone: Vec<_> = toy.parameters.iter().map(|(_, p)| (p.size(), floats(&p.grad()))).collect();
    for options in ways() {
        for rank in gradients(2, &options) {
            for ((size, values), (expected_size, expected)) in rank.iter().zip(&alone) {
                assert_eq!(size, expected_size);
                assert_close(values, expected, 1e-6);
            }
        }
    }
}

/// Case 050.
#[test]
fn a_sparse_gradient_is_refused_by_name_on_every_rank() {
    let errors = ranks(2, |rank, collective| {
        let toy = Toy::default().with("table.weight", noise(&[10, 4], 0));
        let mut ddp = DistributedDataParallel::new(toy, collective, Options::default()).unwrap();
        let rows = Tensor::from_slice(&[rank as i64, 5]);
        let loss = ddp
            .forward(|toy| {
                Ok(Tensor::embedding(&toy.get("table.weight"), &rows, -1, false, true).sum(Kind::Float))
            })
            .unwrap();
        ddp.backward(&loss).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("`table.weight` has a sparse gradient"), "{error}");
    }
}

/// Case 052.
#[test]
fn types_never_share_a_bucket_and_integers_are_copied_not_averaged() {
    let got = ranks(2, |rank, collective| {
        let odd = rank == 1;
        let toy = Toy::default()
            .with("conv", noise(&[4], 0).to_kind(Kind::Half))
            .with("bn", noise(&[4], 1))
            .with("conv2", noise(&[4], 2).to_kind(Kind::BFloat16))
            .with("bn2", noise(&[4], 3))
            .buffer("count", Tensor::from_slice(&[if odd { 7i64 } else { 1 << 40 }]))
            .buffer("flag", Tensor::from_slice(&[!odd, true]));
        let mut ddp = DistributedDataParallel::new(toy, collective, Options::default()).unwrap();
        let loss = ddp
            .forward(|toy| {
                if odd {
                    let _ = no_grad(|| toy.get("count").fill_(3));
                    let _ = no_grad(|| toy.get("flag").fill_(0));
                }
                let sum = |name: &str| toy.get(name).sum(Kind::Float) * (rank as f64 + 1.0);
                Ok(sum("conv") + sum("bn") + sum("conv2") + sum("bn2"))
            })
            .unwrap();
        ddp.backward(&loss).unwrap();
        let gradients: Vec<_> =
            ddp.parameters().iter().map(|p| (grad(p).unwrap().kind(), floats(&grad(p).unwrap()))).collect();
        let toy = ddp.module();
        (ddp.buckets().to_vec(), gradients, toy.get("count").int64_value(&[0]), floats(&toy.get("flag")))
    });
    for (buckets, gradients, count, flag) in got {
        assert_eq!(buckets, [vec![3, 1], vec![2], vec![0]]);
        let kinds = [Kind::Half, Kind::Float, Kind::BFloat16, Kind::Float];
        for ((kind, values), expected) in gradients.into_iter().zip(kinds) {
            assert_eq!((kind, values), (expected, vec![1.5; 4]));
        }
        assert_eq!((count, flag), (1 << 40, vec![1.0, 1.0]));
    }
}

/// Case 061.
#[test]
fn nothing_to_train_is_passed_through() {
    for toy in [Toy::default, || Toy::default().frozen("w", noise(&[4], 0))] {
        let bytes = ranks(2, |_, collective| {
            let mut ddp = DistributedDataParallel::new(toy(), collective, Options::default()).unwrap();
            for step in 0..3 {
                let loss = ddp.forward(|_| Ok(noise(&[4], step).sum(Kind::Float))).unwrap();
                ddp.backward(&loss).unwrap();
            }
            (ddp.gradient_bytes(), ddp.buckets().len(), ddp.take_spans().len())
        });
        assert_eq!(bytes, [(0, 0, 0), (0, 0, 0)]);
    }
}

#[test]
fn a_plain_backward_is_an_error_not_a_silent_local_step() {
    let mut ddp = DistributedDataParallel::new(mlp(0), Box::new(Local::new()), Options::default()).unwrap();
    let loss = ddp.forward(|toy| Ok(mlp_forward(toy, &noise(&[2, 6], 1)).sum(Kind::Float))).unwrap();
    let error = crate::torch::grad::backward(&[&loss], &[None]).unwrap_err();
    assert!(error.to_string().contains("outside DistributedDataParallel::backward"), "{error}");
    assert_eq!(ddp.finish_backward().unwrap_err().to_string(), "rank 0: there is no backward to finish");
}

#[test]
fn an_error_of_one_rank_stops_the_others_with_its_reason() {
    let start = std::time::Instant::now();
    let errors = ranks(3, |rank, collective| {
        let mut ddp = DistributedDataParallel::new(mlp(0), collective, Options::default()).unwrap();
        let loss = ddp.forward(|toy| {
            if rank == 2 {
                Err(Error::new(ErrorKind::Torch, "no such image"))
            } else {
                Ok(mlp_forward(toy, &noise(&[2, 6], 1)).sum(Kind::Float))
            }
        });
        loss.and_then(|loss| ddp.backward(&loss)).unwrap_err().to_string()
    });
    assert_eq!(
        errors,
        ["stopped by rank 2: no such image", "stopped by rank 2: no such image", "no such image"]
    );
    assert!(start.elapsed() < PATIENCE / 2);
}

/// Parameters used in another order than they were made in.
#[test]
fn buckets_are_planned_anew_in_the_order_of_arrival_and_keep_what_was_accumulated() {
    let options = Options { first_bucket_mb: 1e-5, bucket_cap_mb: 1e-5, ..Options::default() };
    let results = ranks(2, |rank, collective| {
        let toy = Toy::default()
            .with("last", noise(&[4], 0))
            .with("first", noise(&[4], 1))
            .with("second", noise(&[4], 2));
        let mut ddp = DistributedDataParallel::new(toy, collective, options.clone()).unwrap();
        let mut plans = vec![ddp.buckets().to_vec()];
        for step in 0..3 {
            let x = noise(&[4], step + 10 * rank as i64);
            let loss = ddp
                .forward(|toy| {
                    Ok((((x * toy.get("first")).tanh() * toy.get("second")).tanh() * toy.get("last"))
                        .sum(Kind::Float))
                })
                .unwrap();
            // No zero_grad: gradients add up over the steps, across the new plan too.
            ddp.backward(&loss).unwrap();
            plans.push(ddp.buckets().to_vec());
        }
        (plans, ddp.parameters().iter().flat_map(|p| floats(&grad(p).unwrap())).collect::<Vec<_>>())
    });
    let toy = Toy::default()
        .with("last", noise(&[4], 0))
        .with("first", noise(&[4], 1))
        .with("second", noise(&[4], 2));
    for rank in 0..2 {
        for step in 0..3 {
            let x = noise(&[4], step + 10 * rank);
            ((((x * toy.get("first")).tanh() * toy.get("second")).tanh() * toy.get("last")).sum(Kind::Float)
                * 0.5)
                .backward();
        }
    }
    let expected: Vec<f32> = toy.parameters.iter().flat_map(|(_, p)| floats(&p.grad())).collect();
    for (plans, gradients) in results {
        assert_eq!(plans[0], [vec![2], vec![1], vec![0]], "reverse order at first");
        assert_eq!(plans[1], plans[0]);
        assert_eq!(plans[2], [vec![0], vec![2], vec![1]], "then as they arrive");
        assert_eq!(plans[3], plans[2]);
        assert_close(&gradients, &expected, 1e-6);
    }
}

#[test]
fn gradients_can_be_zeroed_in_place_as_tch_does() {
    for options in ways() {
        let mut ddp = DistributedDataParallel::new(mlp(0), Box::new(Local::new()), options).unwrap();
        let mut gradients = Vec::new();
        for _ in 0..2 {
            let loss = ddp.forward(|toy| Ok(mlp_forward(toy, &noise(&[2, 6], 1)).sum(Kind::Float))).unwrap();
            ddp.backward(&loss).unwrap();
            gradients.push(ddp.parameters().iter().flat_map(|p| floats(&p.grad())).collect::<Vec<_>>());
            ddp.parameters().iter_mut().for_each(Tensor::zero_grad);
        }
        assert_eq!(gradients[0], gradients[1]);
    }
}

#[test]
fn gradients_survive_the_wrapper() {
    let all = ranks(2, |_, collective| {
        let toy = Toy::default().with("w", noise(&[4], 0));
        let weight = toy.get("w");
        let mut ddp = DistributedDataParallel::new(toy, collective, Options::default()).unwrap();
        let loss = ddp.forward(|toy| Ok((toy.get("w") * 3.0).sum(Kind::Float))).unwrap();
        ddp.backward(&loss).unwrap();
        drop(ddp);
        floats(&grad(&weight).unwrap())
    });
    assert_eq!(all, [vec![3.0; 4], vec![3.0; 4]]);
}

#[test]
fn every_bucket_leaves_a_span_of_its_step_on_its_card() {
    let spans = ranks(2, |rank, collective| {
        let options =
            Options { card: rank, first_bucket_mb: 1e-5, bucket_cap_mb: 1e-5, ..Options::default() };
        let mut ddp = DistributedDataParallel::new(mlp(0), collective, options).unwrap();
        (0..2)
            .map(|step| {
                let x = noise(&[2, 6], step);
                let loss = ddp.forward(|toy| Ok(mlp_forward(toy, &x).sum(Kind::Float))).unwrap();
                ddp.backward(&loss).unwrap();
                settle(ddp.take_spans())
                    .unwrap()
                    .iter()
                    .map(|span| (span.step, span.card, span.phase.name()))
                    .collect::<Vec<_>>()
            })
            .collect::<Vec<_>>()
    });
    assert_eq!(spans[1][0], vec![(0, 1, "all_reduce"); 5]);
    assert_eq!(spans[1][1], vec![(1, 1, "all_reduce"); 5]);
}

/// Case 151: gradients and buckets are asked about while the other thread reduces; 149: nothing here is
/// shared but storage (Note [One thread a tensor]).
#[test]
fn a_thousand_steps_are_the_same_whatever_is_asked_meanwhile() {
    let run = || {
        ranks(2, |rank, collective| {
            let options = Options { first_bucket_mb: 1e-4, bucket_cap_mb: 2e-4, ..Options::default() };
            let mut ddp = DistributedDataParallel::new(mlp(0), collective, options).unwrap();
            let mut optimizer = sgd(0.01, 0.9, 0.0, &ddp);
            for step in 0..1000 {
                let x = noise(&[4, 6], step % 17 + rank as i64 * 100);
                let loss = ddp.forward(|toy| Ok(mlp_forward(toy, &x).square().mean(Kind::Float))).unwrap();
                ddp.begin_backward(Some(&loss), Share::Equal).unwrap();
                for parameter in ddp.parameters() {
                    let gradient = grad(&parameter).unwrap();
                    assert_eq!(gradient.size(), parameter.size());
                    assert!(gradient.is_contiguous() && gradient.stride().len() == gradient.dim());
                }
                ddp.finish_backward().unwrap();
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
            ddp.parameters().iter().flat_map(floats).map(f32::to_bits).collect::<Vec<_>>()
        })
    };
    let first = run();
    assert_eq!(first[0], first[1]);
    assert_eq!(first, run());
}
