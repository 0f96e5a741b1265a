//! Ranks that run out of batches at different times (case 028).

use super::*;
use crate::config::CommHookPlan;

/// Weights and the buffer after training on `batches[rank]` batches, by rank.
fn joined(batches: &[i64], divide: Divide, options: &Options) -> Vec<(Vec<f32>, Vec<f32>)> {
    ranks(batches.len(), |rank, collective| {
        let toy = mlp(rank as i64).buffer("seen", Tensor::zeros([1], (Kind::Float, Device::Cpu)));
        let mut ddp = DistributedDataParallel::new(toy, collective, options.clone()).unwrap();
        let mut optimizer = sgd(0.2, 0.0, 0.0, &ddp);
        ddp.join((0..batches[rank]).map(Ok), divide, |ddp, batch| {
            // As most loops do: what the last step left is there until the next one begins.
            optimizer.zero_grad()?;
            let x = noise(&[4, 6], batch * 10 + rank as i64);
            let loss = ddp.forward(|toy| {
                let _ = no_grad(|| toy.get("seen").fill_((rank as i64 + 1) * 100 + batch));
                Ok(mlp_forward(toy, &x).square().mean(Kind::Float))
            })?;
            ddp.backward(&loss)?;
            optimizer.step()
        })
        .unwrap();
        let weights = ddp.parameters().iter().flat_map(floats).collect();
        (weights, floats(&ddp.module().get("seen")))
    })
}

/// The same on one rank.
fn alone(batches: &[i64], divide: Divide) -> Vec<f32> {
    let mut ddp = DistributedDataParallel::new(mlp(0), Box::new(Local::new()), Options::default()).unwrap();
    let mut optimizer = sgd(0.2, 0.0, 0.0, &ddp);
    for batch in 0..batches.iter().copied().max().unwrap() {
        let active: Vec<i64> = (0..batches.len()).filter(|r| batches[*r] > batch).map(|r| r as i64).collect();
        let divisor = match divide {
            Divide::InitialWorldSize => batches.len(),
            Divide::Remaining => active.len(),
        };
        let loss = ddp
            .forward(|toy| {
                let of = |rank: &i64| mlp_forward(toy, &noise(&[4, 6], batch * 10 + rank)).square();
                let losses: Vec<Tensor> = active.iter().map(|rank| of(rank).mean(Kind::Float)).collect();
                Ok(Tensor::stack(&losses, 0).sum(Kind::Float) / divisor as f64)
            })
            .unwrap();
        ddp.backward(&loss).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
    ddp.parameters().iter().flat_map(floats).collect()
}

#[test]
fn ranks_that_ran_out_end_with_the_weights_of_those_that_went_on() {
    for batches in [vec![5, 6], vec![6, 5], vec![0, 1], vec![1, 0], vec![2, 0, 4], vec![3, 3]] {
        for divide in [Divide::InitialWorldSize, Divide::Remaining] {
            let all = joined(&batches, divide, &Options::default());
            assert!(all.iter().all(|rank| *rank == all[0]), "{batches:?}: equal on all ranks");
            assert_close(&all[0].0, &alone(&batches, divide), 1e-6);
            // The buffer of the highest rank that had a batch in the last step.
            let longest = batches.iter().max().unwrap();
            let last = batches.iter().rposition(|count| count == longest).unwrap() as i64;
            assert_eq!(all[0].1, [((last + 1) * 100 + longest - 1) as f32], "{batches:?}");
        }
    }
}

#[test]
fn joining_goes_with_every_way_gradients_can_travel() {
    let batches = [4, 1];
    let expected = alone(&batches, Divide::InitialWorldSize);
    let fixed = [false, true].map(|static_graph| Options { static_graph, ..Options::default() });
    for options in ways().iter().chain(&fixed) {
        let all = joined(&batches, Divide::InitialWorldSize, options);
        assert_eq!(all[0], all[1], "{options:?}");
        assert_close(&all[0].0, &expected, 1e-6);
    }
    let rounded = Options { comm_hook: CommHookPlan::Bf16, ..Options::default() };
    let all = joined(&batches, Divide::InitialWorldSize, &rounded);
    assert_eq!(all[0], all[1]);
    assert_close(&all[0].0, &expected, 1e-2);
}

#[test]
fn nobody_with_a_batch_changes_nothing() {
    let all = joined(&[0, 0], Divide::default(), &Options::default());
    assert_eq!(all[1].0, mlp(0).parameters.iter().flat_map(|(_, p)| floats(p)).collect::<Vec<_>>());
}

#[test]
fn a_batch_that_cannot_be_read_stops_all_ranks() {
    let errors = ranks(2, |rank, collective| {
        let mut ddp = DistributedDataParallel::new(mlp(0), collective, Options::default()).unwrap();
        let broken = Err(Error::new(ErrorKind::Torch, "no such image"));
        let batches = [Ok(0i64), if rank == 1 { broken } else { Ok(1) }];
        let step = |ddp: &mut DistributedDataParallel<Toy>, batch: i64| {
            let x = noise(&[4, 6], batch);
            let loss = ddp.forward(|toy| Ok(mlp_forward(toy, &x).square().mean(Kind::Float)))?;
            ddp.backward(&loss)
        };
        ddp.join(batches, Divide::default(), step).unwrap_err().to_string()
    });
    assert_eq!(errors, ["stopped by rank 1: no such image", "no such image"]);
}

#[test]
fn a_step_that_reduces_twice_or_never_is_named() {
    for reductions in [0, 2] {
        let mut ddp =
            DistributedDataParallel::new(mlp(0), Box::new(Local::new()), Options::default()).unwrap();
        let error = ddp
            .join([Ok(())], Divide::default(), |ddp, ()| {
                for _ in 0..reductions {
                    let x = noise(&[4, 6], 1);
                    let loss = ddp.forward(|toy| Ok(mlp_forward(toy, &x).sum(Kind::Float)))?;
                    ddp.backward(&loss)?;
                }
                Ok(())
            })
            .unwrap_err();
        let expected = format!("rank 0: a step of join called backward {reductions} times");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn shared_statistics_are_refused() {
    let mut ddp = DistributedDataParallel::new(mlp(0), Box::new(Local::new()), Options::default()).unwrap();
    let _sums = ddp.sums_over_ranks();
    let error = ddp.join([Ok(())], Divide::default(), |_, ()| Ok(())).unwrap_err();
    assert!(error.to_string().contains("sync_batch_norm"), "{error}");
}
