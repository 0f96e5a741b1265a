//! A whole training script on `DistributedDataParallel`: one process a card.
//!
//! ```text
//! cargo run --release --example ddp                 two processes, started by this one
//! cargo run --release --example ddp -- 4            four
//! torchrun --nproc-per-node 2 --no-python target/release/examples/ddp
//! ```
//!
//! A started rank finds itself by `RANK` and `WORLD_SIZE`, and the others through a store: the one that
//! torchrun made (`MASTER_ADDR`, `MASTER_PORT`), or a file when this program started its ranks itself.
//! The model is any tch network; it fits a noisy line through points in 16 dimensions.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a script talks to whoever runs it")]

use dp_vs_ddp::comm::{Member, Shm};
use dp_vs_ddp::ddp::{DistributedDataParallel, Options, Share};
use dp_vs_ddp::torch::store::Store;
use dp_vs_ddp::{Error, Result, error::Kind};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Tensor};

const PATIENCE: Duration = Duration::from_secs(60);
const SAMPLES: i64 = 4096;
const BATCH: i64 = 64;
const STEPS: i64 = 200;

fn main() -> ExitCode {
    let result = match number("RANK") {
        Some(rank) => train(rank, number("WORLD_SIZE").unwrap_or(1)),
        None => start(std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(2)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            if let Some(hint) = error.advice() {
                eprintln!("\nhint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}

fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

/// Starts this program once a rank, and waits for all of them.
fn start(world_size: usize) -> Result<()> {
    let failed = |error: std::io::Error| Error::new(Kind::Worker, format!("cannot start the ranks: {error}"));
    let program = std::env::current_exe().map_err(failed)?;
    let store = std::env::temp_dir().join(format!("ddp-example-{}", std::process::id()));
    let children: std::io::Result<Vec<_>> = (0..world_size)
        .map(|rank| {
            Command::new(&program)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", world_size.to_string())
                .env("DDP_EXAMPLE_STORE", &store)
                .spawn()
        })
        .collect();
    let mut ended = Ok(());
    for (rank, mut child) in children.map_err(failed)?.into_iter().enumerate() {
        let status = child.wait().map_err(failed)?;
        if !status.success() {
            ended = ended.and(Err(Error::new(Kind::Worker, format!("rank {rank} failed: {status}"))));
        }
    }
    let _ = std::fs::remove_file(&store);
    ended
}

fn store(world_size: usize) -> Result<Store> {
    if let Some(path) = std::env::var_os("DDP_EXAMPLE_STORE") {
        return Store::file(Path::new(&path), world_size, PATIENCE);
    }
    let host = std::env::var("MASTER_ADDR").unwrap_or_else(|_| "127.0.0.1".to_owned());
    let port = number("MASTER_PORT").and_then(|port| u16::try_from(port).ok()).unwrap_or(29500);
    // torchrun's agent serves already; started by hand, rank 0 does.
    let serve =
        number("RANK") == Some(0) && std::env::var("TORCHELASTIC_USE_AGENT_STORE").as_deref() != Ok("True");
    Store::tcp(&host, port, world_size, serve, PATIENCE)
}

/// Points on a plane, the same on every rank: the data set.
fn data() -> (Tensor, Tensor) {
    let steps = Tensor::arange(SAMPLES * 16, (tch::Kind::Double, Device::Cpu));
    let input = (steps * 12.9898).sin().to_kind(tch::Kind::Float).view([SAMPLES, 16]);
    let slope = Tensor::arange(16, (tch::Kind::Float, Device::Cpu)) / 16.0;
    let target = input.matmul(&slope.view([16, 1])) + 0.5;
    (input, target)
}

/// One rank.
fn train(rank: usize, world_size: usize) -> Result<()> {
    tch::set_num_threads(1);
    // Different seeds on purpose: rank 0's weights win.
    tch::manual_seed(rank as i64);
    let variables = nn::VarStore::new(Device::Cpu);
    let net = nn::seq()
        .add(nn::linear(variables.root() / "0", 16, 64, nn::LinearConfig::default()))
        .add_fn(Tensor::relu)
        .add(nn::linear(variables.root() / "2", 64, 1, nn::LinearConfig::default()));
    let mut optimizer = nn::Sgd { momentum: 0.9, ..nn::Sgd::default() }.build(&variables, 0.05)?;

    let member = Member { rank, world_size, deadline: PATIENCE, meter: None };
    // Kept to the end: the one that serves must outlive those who ask.
    let store = store(world_size)?;
    let group = Shm::connect(member, &store)?;
    let mut ddp = DistributedDataParallel::new(variables, Box::new(group), Options::default())?;

    let (input, target) = data();
    for step in 0..STEPS {
        // Every rank takes its own rows of the global batch; the last rank takes what does not divide.
        let first = step * BATCH % SAMPLES;
        let share = BATCH / world_size as i64;
        let mine = if rank + 1 == world_size { BATCH - share * rank as i64 } else { share };
        let at = first + share * rank as i64;
        let (x, y) = (input.narrow(0, at, mine), target.narrow(0, at, mine));

        let output = ddp.forward(|_| Ok(net.forward(&x)))?;
        let loss = output.mse_loss(&y, tch::Reduction::Mean);
        // `ddp.backward(&loss)` is the short form for equal shares.
        ddp.begin_backward(Some(&loss), Share::Samples { mine: mine as usize, global: BATCH as usize })?;
        ddp.finish_backward()?;
        optimizer.step();
        optimizer.zero_grad();
        if rank == 0 && step % 50 == 0 {
            println!("step {step:3}  loss {:.5}", loss.double_value(&[]));
        }
    }
    let sum: f64 =
        ddp.parameters().iter().map(|weight| weight.detach().sum(tch::Kind::Double).double_value(&[])).sum();
    println!("rank {rank} of {world_size}: sum of all weights {sum:.9}");
    Ok(())
}
