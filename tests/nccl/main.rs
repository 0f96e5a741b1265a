//! The NCCL collective, called as a library over scripted NCCL and CUDA: sums, order, deadlines, failures.
//! Ranks are threads of one process here, and processes in tests/cuda.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic, in its helpers too")]

#[path = "../scripted/mod.rs"]
mod scripted;

use dp_vs_ddp::card::Card;
use dp_vs_ddp::comm::nccl::Nccl;
use dp_vs_ddp::comm::{Board, Collective, Local, Member, Reduction, Shm};
use dp_vs_ddp::ddp::{DistributedDataParallel, Options};
use dp_vs_ddp::error::Kind as ErrorKind;
use dp_vs_ddp::torch::seat::Seat;
use dp_vs_ddp::{Error, Result};
use scripted::{Library, Machine, cards, inside};
use std::time::{Duration, Instant};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const PATIENT: Duration = Duration::from_secs(30);

fn machine(scenario: &'static str) -> impl FnOnce() -> Machine {
    move || {
        let text = format!(
            "{}[cuda]\nlog = \"{{dir}}/cuda.log\"\n[nccl]\nlog = \"{{dir}}/nccl.log\"\n{scenario}",
            cards(4)
        );
        Machine::new(&[Library::Cuda, Library::Nccl], &text)
    }
}

/// Runs `work` on every rank, each in a thread of its own with a card of its own; what they give, by rank.
fn ranks<T: Send>(
    world_size: usize,
    deadline: Duration,
    work: impl Fn(usize, Result<Nccl>) -> T + Sync,
) -> Vec<T> {
    let board = Board::new(deadline);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size)
            .map(|rank| {
                let (board, work) = (board.clone(), &work);
                scope.spawn(move || {
                    let connect = || {
                        let seat = Seat::take(&Card::Cuda { index: rank, ordinal: rank }, deadline)?;
                        let member = Member { rank, world_size, deadline, meter: None };
                        let mut nccl = Nccl::connect(member, &board, seat)?;
                        nccl.enter()?;
                        Ok(nccl)
                    };
                    work(rank, connect())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

fn filled(collective: &mut dyn Collective, values: &[f32], kind: Kind) -> dp_vs_ddp::comm::Buffer {
    let buffer = collective.allocate(values.len(), kind).unwrap();
    buffer.tensor.shallow_clone().f_copy_(&Tensor::from_slice(values)).unwrap();
    buffer
}

fn values(buffer: &dp_vs_ddp::comm::Buffer) -> Vec<f32> {
    Vec::try_from(&buffer.tensor.to_kind(Kind::Float)).unwrap()
}

#[test]
fn sums_and_means_are_right_for_every_type_and_number_of_ranks() {
    if !inside("sums_and_means_are_right_for_every_type_and_number_of_ranks", machine("")) {
        return;
    }
    for world_size in 1..=4 {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double] {
            let all = ranks(world_size, PATIENT, |rank, nccl| {
                let mut nccl = nccl.unwrap();
                assert!(nccl.averages());
                // An odd length, and values that all these types hold exactly.
                let mine: Vec<f32> = (0..7).map(|i| (i * 4 + rank as i32 * 4) as f32).collect();
                let sum = filled(&mut nccl, &mine, kind);
                nccl.all_reduce(&sum).unwrap();
                let mean = filled(&mut nccl, &[4.0 * rank as f32, 8.0], kind);
                nccl.start_all_reduce(&mean, Reduction::Mean).unwrap();
                nccl.complete().unwrap();
                (values(&sum), values(&mean))
            });
            let ranks = world_size as f32;
            let of_ranks = 4.0 * (0..world_size).sum::<usize>() as f32;
            let sum: Vec<f32> = (0..7).map(|i| i as f32 * 4.0 * ranks + of_ranks).collect();
            for (told, mean) in all {
                assert_eq!(told, sum, "{kind:?} on {world_size}");
                assert_eq!(mean, [of_ranks / ranks, 8.0], "{kind:?} on {world_size}");
            }
        }
    }
}

#[test]
fn a_broadcast_and_an_exchange_reach_all() {
    if !inside("a_broadcast_and_an_exchange_reach_all", machine("")) {
        return;
    }
    let all = ranks(3, PATIENT, |rank, nccl| {
        let mut nccl = nccl.unwrap();
        let buffer = filled(&mut nccl, &[rank as f32; 5], Kind::Float);
        nccl.broadcast(&buffer, 1).unwrap();
        assert!(nccl.broadcast(&buffer, 7).unwrap_err().to_string().contains("no rank 7 in a group of 3"));
        nccl.barrier().unwrap();
        (values(&buffer), nccl.exchange(&[rank as u8]).unwrap())
    });
    for told in all {
        assert_eq!(told, (vec![1.0; 5], vec![vec![0], vec![1], vec![2]]));
    }
}

// What is asked for waits for the events it is told to, and what comes after waits for it.
#[test]
fn many_collectives_in_a_row_keep_their_order() {
    if !inside("many_collectives_in_a_row_keep_their_order", machine("")) {
        return;
    }
    let all = ranks(2, PATIENT, |rank, nccl| {
        let mut nccl = nccl.unwrap();
        let buffers: Vec<_> =
            (0..40).map(|i| filled(&mut nccl, &[(i + rank) as f32; 3], Kind::Float)).collect();
        for buffer in &buffers {
            nccl.start_all_reduce(buffer, Reduction::Sum).unwrap();
        }
        nccl.complete().unwrap();
        buffers.iter().map(|buffer| values(buffer)[0]).collect::<Vec<_>>()
    });
    let expected: Vec<f32> = (0..40).map(|i| (2 * i + 1) as f32).collect();
    assert_eq!(all, [expected.clone(), expected]);
}

/// Looks after the collective until it fails, as the communication thread does.
fn until_it_fails(nccl: &mut Nccl) -> Error {
    loop {
        if let Err(error) = nccl.watch() {
            return error;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    if !inside("a_rank_that_does_not_come_is_named_at_the_deadline", machine("")) {
        return;
    }
    let start = Instant::now();
    let all = ranks(3, Duration::from_secs(1), |rank, nccl| {
        let mut nccl = nccl.unwrap();
        let buffer = filled(&mut nccl, &[1.0], Kind::Float);
        nccl.all_reduce(&buffer).unwrap();
        if rank == 1 {
            // It goes on to something else.
            std::thread::sleep(Duration::from_secs(3));
            return nccl.watch().unwrap_err();
        }
        nccl.start_all_reduce(&buffer, Reduction::Sum)
            .map_or_else(|error| error, |()| until_it_fails(&mut nccl))
    });
    assert!(start.elapsed() < PATIENT);
    let text = all[0].to_string();
    assert!(text.contains("collective 2: all_reduce of 1 Float"), "{text}");
    assert!(text.contains("rank 1 (process ") && text.contains("last seen at collective 1"), "{text}");
    assert!(all.iter().all(|error| error.kind() == ErrorKind::Timeout), "{all:?}");
}

#[test]
fn ranks_that_ask_for_different_things_are_told_apart() {
    if !inside("ranks_that_ask_for_different_things_are_told_apart", machine("")) {
        return;
    }
    let all = ranks(2, PATIENT, |rank, nccl| {
        let mut nccl = nccl.unwrap();
        let small = filled(&mut nccl, &[1.0; 3], Kind::Float);
        // NCCL itself would mix them up or hang. Here it would reduce what lengths allow; the control side sees it.
        if rank == 0 { nccl.broadcast(&small, 0) } else { nccl.all_reduce(&small) }
            .map_or_else(|error| error.to_string(), |()| until_it_fails(&mut nccl).to_string())
    });
    assert!(
        all[0].contains("ranks disagree at collective 1: rank 0 calls broadcast of 3 Float from rank 0"),
        "{all:?}"
    );
}

#[test]
fn an_error_behind_the_callers_back_stops_all_ranks() {
    let scenario = "[[nccl.wrong]]\nrank = 1\ncollective = 2\ncode = 6\n";
    if !inside("an_error_behind_the_callers_back_stops_all_ranks", machine(scenario)) {
        return;
    }
    let all = ranks(2, PATIENT, |_, nccl| {
        let mut nccl = nccl.unwrap();
        let buffer = filled(&mut nccl, &[1.0], Kind::Float);
        nccl.all_reduce(&buffer).unwrap();
        nccl.all_reduce(&buffer).unwrap_err().to_string()
    });
    assert!(all[1].contains("remote process exited or network error (NCCL error 6)"), "{all:?}");
    assert!(all[0].contains("rank 1") && all[0].contains("NCCL error 6"), "{all:?}");
    assert_aborted();
}

/// Every communicator was aborted, and nothing was destroyed afterwards.
fn assert_aborted() {
    let folder = std::env::var("SCRIPTED_INSIDE").unwrap();
    let log = std::fs::read_to_string(format!("{folder}/nccl.log")).unwrap();
    let count = |what: &str| log.lines().filter(|line| line.contains(&format!(" {what} "))).count();
    assert_eq!((count("abort"), count("destroy")), (count("join"), 0), "{log}");
}

#[test]
fn a_kernel_that_hangs_is_aborted_at_the_deadline() {
    let scenario = "[[nccl.wrong]]\nrank = 0\ncollective = 1\n";
    if !inside("a_kernel_that_hangs_is_aborted_at_the_deadline", machine(scenario)) {
        return;
    }
    let all = ranks(2, Duration::from_secs(1), |_, nccl| {
        let mut nccl = nccl.unwrap();
        let buffer = filled(&mut nccl, &[1.0], Kind::Float);
        nccl.all_reduce(&buffer).unwrap_err().to_string()
    });
    // All had asked for it: it is nobody's fault that can be seen from here.
    assert!(all[0].contains("all ranks had asked their cards for it"), "{all:?}");
    assert_aborted();
}

#[test]
fn a_group_that_never_connects_is_left_at_the_deadline() {
    let scenario = "[[nccl.wrong]]\nrank = 1\ncollective = 0\n";
    if !inside("a_group_that_never_connects_is_left_at_the_deadline", machine(scenario)) {
        return;
    }
    let all = ranks(2, Duration::from_secs(1), |_, nccl| {
        let mut nccl = nccl.unwrap();
        let buffer = filled(&mut nccl, &[1.0], Kind::Float);
        nccl.all_reduce(&buffer).unwrap_err()
    });
    assert!(all.iter().all(|error| error.kind() == ErrorKind::Timeout), "{all:?}");
    assert_aborted();
}

#[test]
fn a_rank_that_fails_tells_the_others_why() {
    if !inside("a_rank_that_fails_tells_the_others_why", machine("")) {
        return;
    }
    let all = ranks(2, PATIENT, |rank, nccl| {
        let mut nccl = nccl.unwrap();
        let buffer = filled(&mut nccl, &[1.0], Kind::Float);
        nccl.all_reduce(&buffer).unwrap();
        nccl.barrier().unwrap();
        if rank == 1 {
            nccl.abort("the loss is NaN");
            return String::new();
        }
        nccl.start_all_reduce(&buffer, Reduction::Sum)
            .map_or_else(|error| error, |()| until_it_fails(&mut nccl))
            .to_string()
    });
    assert_eq!(all[0], "stopped by rank 1: the loss is NaN");
}

#[test]
fn a_call_that_fails_is_reported_with_ncclss_own_words() {
    let scenario = "[[nccl.fail]]\ncall = \"ncclAllReduce\"\nat = 1\ncode = 5\n";
    if !inside("a_call_that_fails_is_reported_with_ncclss_own_words", machine(scenario)) {
        return;
    }
    let all = ranks(1, PATIENT, |_, nccl| {
        let mut nccl = nccl.unwrap();
        let buffer = filled(&mut nccl, &[1.0], Kind::Float);
        nccl.all_reduce(&buffer).unwrap_err()
    });
    let text = all[0].to_string();
    assert!(
        text.contains("ncclAllReduce failed: invalid usage (NCCL error 5): injected into ncclAllReduce"),
        "{text}"
    );
    assert!(all[0].advice().unwrap().contains("NCCL_DEBUG=WARN"));
}

#[test]
fn an_nccl_that_is_too_old_is_refused_by_its_version() {
    let scenario = "version = 21203\n";
    if !inside("an_nccl_that_is_too_old_is_refused_by_its_version", machine(scenario)) {
        return;
    }
    let all = ranks(1, PATIENT, |_, nccl| nccl.map(|_| ()).unwrap_err().to_string());
    assert_eq!(all[0], "NCCL 2.12.3 is older than 2.14");
}

/// Losses and weights of a small network after some steps of DDP.
fn train(
    rank: usize,
    world_size: usize,
    collective: Box<dyn Collective>,
    options: Options,
) -> (Vec<f64>, Vec<f32>) {
    let store = nn::VarStore::new(Device::Cpu);
    let net = nn::seq()
        .add(nn::linear(store.root() / "a", 6, 32, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(store.root() / "b", 32, 3, Default::default()));
    for (i, mut tensor) in store.trainable_variables().into_iter().enumerate() {
        let len = tensor.numel() as i64;
        let fill = (Tensor::arange(len, (Kind::Float, Device::Cpu)) + 100 * i as i64).sin() * 0.3;
        tch::no_grad(|| tensor.copy_(&fill.view(tensor.size().as_slice())));
    }
    let mut optimizer = nn::Sgd { momentum: 0.9, ..Default::default() }.build(&store, 0.05).unwrap();
    let mut ddp = DistributedDataParallel::new(store, collective, options).unwrap();
    let mut losses = Vec::new();
    for step in 0..6i64 {
        let rows = (Tensor::arange(8 * 6, (Kind::Float, Device::Cpu)) + 7 * step).cos().view([8, 6]);
        let labels = (Tensor::arange(8, (Kind::Int64, Device::Cpu)) + step).remainder(3);
        let share = 8 / world_size as i64;
        let (x, y) =
            (rows.narrow(0, rank as i64 * share, share), labels.narrow(0, rank as i64 * share, share));
        let output = ddp.forward(|_| Ok(net.forward(&x))).unwrap();
        let loss = output.cross_entropy_for_logits(&y);
        ddp.backward(&loss).unwrap();
        ddp.synchronize().unwrap();
        optimizer.step();
        optimizer.zero_grad();
        losses.push(loss.double_value(&[]));
    }
    let weights = ddp.parameters().iter().map(|p| p.flatten(0, -1)).collect::<Vec<_>>();
    (losses, Vec::try_from(&Tensor::cat(&weights, 0)).unwrap())
}

#[test]
fn ddp_over_nccl_trains_as_over_shared_memory() {
    if !inside("ddp_over_nccl_trains_as_over_shared_memory", machine("")) {
        return;
    }
    for world_size in [1, 2, 4] {
        let over_nccl = ranks(world_size, PATIENT, |rank, nccl| {
            let seat = Seat::take(&Card::Cuda { index: rank, ordinal: rank }, PATIENT).unwrap();
            // Several buckets, so that order matters.
            let options = Options {
                card: rank,
                bucket_cap_mb: 5e-4,
                first_bucket_mb: 1e-4,
                seat,
                ..Options::default()
            };
            train(rank, world_size, Box::new(nccl.unwrap()), options)
        });
        let groups: Vec<Box<dyn Collective>> = match world_size {
            1 => vec![Box::new(Local::new())],
            _ => {
                Shm::threads(world_size, PATIENT).unwrap().into_iter().map(|shm| Box::new(shm) as _).collect()
            }
        };
        let over_shm: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = groups
                .into_iter()
                .enumerate()
                .map(|(rank, group)| {
                    let options = Options {
                        card: rank,
                        bucket_cap_mb: 5e-4,
                        first_bucket_mb: 1e-4,
                        ..Options::default()
                    };
                    scope.spawn(move || train(rank, world_size, group, options))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for rank in 0..world_size {
            // Ranks hold the same weights, to the bit.
            assert_eq!(over_nccl[rank].1, over_nccl[0].1);
            for (a, b) in over_nccl[rank].0.iter().zip(&over_shm[rank].0) {
                assert!((a - b).abs() <= 1e-6 * b.abs(), "{world_size} ranks: {a} and {b}");
            }
        }
        assert!(over_nccl[0].0[5] < over_nccl[0].0[0]);
    }
}
