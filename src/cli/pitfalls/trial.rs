//! What the cases train with: ranks as threads, the wrapper as a user drives it, a small model on digits.

use crate::comm::{Collective, Local, Shm};
use crate::config::{DataSource, ModelPlan, OptimizerPlan};
use crate::data::{self, Batch, Cut, Dataset, Loader, LoaderOptions, Part};
use crate::ddp::{DistributedDataParallel, Options};
use crate::error::{Error, Kind, Result};
use crate::model::{self, Model, State};
use crate::torch::optim::Optimizer;
use crate::torch::{no_grad, threads};
use std::sync::Arc;
use std::time::Duration;
use tch::{Device, Tensor};

/// The longest a rank waits for another.
pub(super) const DEADLINE: Duration = Duration::from_secs(20);

/// Pixels of a digit.
const PIXELS: i64 = 64;

/// Runs `work` as every rank, each on its own thread; results by rank.
pub(super) fn outcomes<T: Send>(
    world_size: usize,
    work: impl Fn(usize, Box<dyn Collective>) -> Result<T> + Sync,
) -> Result<Vec<Result<T>>> {
    let group: Vec<Box<dyn Collective>> = match world_size {
        1 => vec![Box::new(Local::new())],
        _ => Shm::threads(world_size, DEADLINE)?.into_iter().map(|shm| Box::new(shm) as _).collect(),
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = group
            .into_iter()
            .enumerate()
            .map(|(rank, collective)| {
                let work = &work;
                std::thread::Builder::new().name(format!("card{rank}")).spawn_scoped(scope, move || {
                    threads::set_intra_op(1);
                    work(rank, collective)
                })
            })
            .collect();
        threads
            .into_iter()
            .enumerate()
            .map(|(rank, thread)| {
                let thread = thread.map_err(|source| {
                    Error::new(Kind::Unavailable, format!("cannot start the thread of rank {rank}: {source}"))
                })?;
                Ok(thread
                    .join()
                    .unwrap_or_else(|_| Err(Error::new(Kind::Torch, format!("rank {rank} panicked")))))
            })
            .collect()
    })
}

/// The same for work that must succeed on all of them.
pub(super) fn ranks<T: Send>(
    world_size: usize,
    work: impl Fn(usize, Box<dyn Collective>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    outcomes(world_size, work)?.into_iter().collect()
}

/// The real digits.
pub(super) struct Digits {
    pub(super) train: Arc<Dataset>,
    pub(super) test: Dataset,
}

impl Digits {
    pub(super) fn open() -> Result<Self> {
        let (train, test) = data::open(&DataSource::Digits, false, 0)?;
        Ok(Self { train: Arc::new(train), test })
    }

    /// A shuffled loader of one part of the batches that `world_size` ranks share, without repetitions.
    pub(super) fn loader(&self, world_size: usize, cut: Cut, part: Part) -> Result<Loader> {
        let options = LoaderOptions {
            world_size,
            cut,
            part,
            shuffle: true,
            drop_last: true,
            seed: 0,
            first_epoch: 0,
            workers: 0,
        };
        Loader::new(Arc::clone(&self.train), options)
    }
}

/// A perceptron for digits, its weights drawn from `seed`.
pub(super) fn perceptron(hidden: i64, seed: u64) -> Result<Box<dyn Model>> {
    model::build(&ModelPlan::Mlp { input: PIXELS, hidden, classes: 10 }, Device::Cpu, seed)
}

/// One rank of a training, written as users write it.
pub(super) struct Trainee {
    ddp: DistributedDataParallel<Box<dyn Model>>,
    optimizer: Optimizer,
}

impl Trainee {
    /// Plain SGD, so that what is seen is the mistake and not the optimiser's memory.
    pub(super) fn new(
        model: Box<dyn Model>,
        collective: Box<dyn Collective>,
        options: Options,
        lr: f64,
    ) -> Result<Self> {
        let ddp = DistributedDataParallel::new(model, collective, options)?;
        let rule = OptimizerPlan::Sgd { lr, momentum: 0.0, weight_decay: 0.0 };
        let optimizer = Optimizer::new(rule, ddp.parameters());
        Ok(Self { ddp, optimizer })
    }

    /// One step on this rank's batch, the mean loss multiplied with `factor`.
    pub(super) fn step(&mut self, batch: &Batch, factor: f64) -> Result<()> {
        let output = self.ddp.forward(|model| model.forward(&batch.input, true))?;
        let loss = model::loss(&output, &batch.target)?.f_mul_scalar(factor)?;
        self.ddp.backward(&loss)?;
        self.optimizer.step()?;
        self.optimizer.zero_grad()
    }

    /// Steps on what the loader gives next.
    pub(super) fn steps(&mut self, count: usize, loader: &mut Loader) -> Result<()> {
        (0..count).try_for_each(|_| self.step(&loader.next()?, 1.0))
    }

    pub(super) fn state(&self) -> &State {
        self.ddp.module().state()
    }

    /// Logits of these rows, and their targets.
    pub(super) fn predict(&self, data: &Dataset, rows: &[usize]) -> Result<(Tensor, Tensor)> {
        let batch = data.batch(rows)?;
        let output = no_grad(|| self.ddp.module().forward(&batch.input, false))?;
        Ok((output, batch.target))
    }
}

/// All trained weights in one row.
pub(super) fn flat(state: &State) -> Result<Tensor> {
    let rows = state.parameters().map(|entry| Ok(entry.tensor.f_detach()?.f_reshape([-1])?));
    Ok(Tensor::f_cat(&rows.collect::<Result<Vec<_>>>()?, 0)?)
}

/// Euclidean distance.
pub(super) fn distance(left: &Tensor, right: &Tensor) -> Result<f64> {
    Ok(left.f_sub(right)?.f_norm()?.f_double_value(&[])?)
}
