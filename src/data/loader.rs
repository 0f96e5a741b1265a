//! Batches prepared ahead by worker threads, delivered in order.
//!
//! Goes on for ever, epoch after epoch, in the order of [`super::DistributedSampler`] for `seed + epoch`.
//! What is delivered does not depend on how many workers prepare it.

use super::sampler::{DistributedSampler, Shares, batches, chunks, uneven_batches};
use super::{Batch, Dataset};
use crate::error::{Error, Kind, Result};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Which part of each global batch this process loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All of it, in rank order: `single` and `dp`.
    Whole,
    /// One rank's share: `ddp`.
    Rank(usize),
}

/// How an epoch is cut into global batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// This many samples for every rank, the epoch's tail filled up or dropped as DistributedSampler does.
    PerRank(usize),
    /// The same, but no sample twice: towards the end of an epoch ranks get fewer rows, or none.
    PerRankUneven(usize),
    /// This many samples in all, each global batch cut as `tensor.chunk` does; ranks may get nothing.
    Global(usize),
}

/// What a loader delivers.
#[derive(Debug, Clone)]
pub struct LoaderOptions {
    /// Ranks (cards) that share a global batch.
    pub world_size: usize,
    /// How global batches are cut.
    pub cut: Cut,
    /// Which part of them is wanted here.
    pub part: Part,
    /// New order every epoch.
    pub shuffle: bool,
    /// Drop the tail of an epoch instead of filling it up.
    pub drop_last: bool,
    /// Same on all ranks.
    pub seed: u64,
    /// Threads that prepare batches ahead; 0 prepares them in line.
    pub workers: usize,
    /// Epoch to begin with.
    pub first_epoch: u64,
}

/// Batches that each worker may have ready.
const AHEAD: usize = 2;

/// Longest wait for a batch.
const DEADLINE: Duration = Duration::from_secs(60);

/// Delivers the batches of all epochs, one after another.
#[derive(Debug)]
pub struct Loader {
    schedule: Schedule,
    start: u64,
    next: u64,
    workers: Vec<Worker>,
}

#[derive(Debug)]
struct Worker {
    // Dropped before joining: a worker that cannot deliver any more ends.
    batches: Option<Receiver<Result<Batch>>>,
    thread: Option<JoinHandle<()>>,
}

impl Loader {
    /// A loader over this data set.
    pub fn new(data: Arc<Dataset>, options: LoaderOptions) -> Result<Self> {
        let (workers, first_epoch) = (options.workers, options.first_epoch);
        let schedule = Schedule::new(data, options)?;
        let start = first_epoch * schedule.steps;
        let workers = (0..workers)
            .map(|first| {
                let (sender, receiver) = sync_channel(AHEAD);
                let mut schedule = schedule.clone();
                let thread = std::thread::Builder::new()
                    .name("loader".into())
                    .spawn(move || prepare(&mut schedule, start + first as u64, workers as u64, &sender))
                    .map_err(|error| {
                        Error::new(
                            Kind::Unavailable,
                            format!("cannot start data worker {first} of {workers}: {error}"),
                        )
                        .hint("lower data.workers")
                    })?;
                Ok(Worker { batches: Some(receiver), thread: Some(thread) })
            })
            .collect::<Result<_>>()?;
        Ok(Self { schedule, start, next: start, workers })
    }

    /// How the data set is shared by ranks.
    pub fn sampler(&self) -> &DistributedSampler {
        &self.schedule.sampler
    }

    /// Global batches in an epoch.
    pub fn steps_per_epoch(&self) -> usize {
        self.schedule.steps as usize
    }

    /// The next batch; there is always one.
    #[expect(clippy::should_implement_trait, reason = "an endless, fallible sequence, not an iterator")]
    pub fn next(&mut self) -> Result<Batch> {
        let number = self.next;
        let batch = if self.workers.is_empty() {
            self.schedule.batch(number)?
        } else {
            let worker = ((number - self.start) % self.workers.len() as u64) as usize;
            self.workers[worker].receive(worker)?
        };
        self.next += 1;
        Ok(batch)
    }
}

impl Worker {
    fn receive(&self, index: usize) -> Result<Batch> {
        let received = self
            .batches
            .as_ref()
            .map_or(Err(RecvTimeoutError::Disconnected), |batches| batches.recv_timeout(DEADLINE));
        match received {
            Ok(batch) => batch,
            Err(RecvTimeoutError::Timeout) => Err(Error::new(
                Kind::Timeout,
                format!("data worker {index} delivered no batch for {} s", DEADLINE.as_secs()),
            )),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Error::new(Kind::Worker, format!("data worker {index} died"))
                    .hint("set data.workers = 0 to see why"))
            }
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.batches = None;
        }
        for thread in self.workers.iter_mut().filter_map(|worker| worker.thread.take()) {
            // A worker that panicked was reported when its batch was asked for.
            let _ = thread.join();
        }
    }
}

/// Prepares every `stride`th batch from `first` on until nobody wants them or one fails.
fn prepare(schedule: &mut Schedule, first: u64, stride: u64, sender: &SyncSender<Result<Batch>>) {
    let mut number = first;
    loop {
        let batch = schedule.batch(number);
        let failed = batch.is_err();
        if sender.send(batch).is_err() || failed {
            return;
        }
        number += stride;
    }
}

/// Which rows make which batch, with the current epoch's at hand.
#[derive(Debug, Clone)]
struct Schedule {
    data: Arc<Dataset>,
    sampler: DistributedSampler,
    cut: Cut,
    part: Part,
    steps: u64,
    epoch: u64,
    shares: Vec<Shares>,
}

impl Schedule {
    fn new(data: Arc<Dataset>, options: LoaderOptions) -> Result<Self> {
        let LoaderOptions { world_size, cut, part, shuffle, drop_last, seed, .. } = options;
        let (Cut::PerRank(size) | Cut::PerRankUneven(size) | Cut::Global(size)) = cut;
        if world_size == 0 || size == 0 {
            return Err(Error::usage(format!(
                "batches of {size} samples for {world_size} cards: both must be 1 or more"
            )));
        }
        if let Part::Rank(rank) = part
            && rank >= world_size
        {
            return Err(Error::usage(format!("rank {rank} of a world of {world_size}")));
        }
        let sampler = DistributedSampler { samples: data.len(), world_size, shuffle, drop_last, seed };
        let mut schedule = Self { data, sampler, cut, part, steps: 0, epoch: 0, shares: Vec::new() };
        schedule.enter(0);
        schedule.steps = schedule.shares.len() as u64;
        if schedule.steps == 0 {
            let samples = schedule.sampler.samples;
            let error = Error::usage(format!(
                "a data set of {samples} samples gives no batch for {world_size} cards"
            ));
            return Err(if samples > 0 {
                error.hint("lower the batch, or set data.drop_last = false")
            } else {
                error
            });
        }
        Ok(schedule)
    }

    fn enter(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.shares = match self.cut {
            Cut::PerRank(per_rank) => batches(&self.sampler, epoch, per_rank),
            Cut::PerRankUneven(per_rank) => uneven_batches(&self.sampler, epoch, per_rank),
            Cut::Global(global) => chunks(&self.sampler, epoch, global),
        };
    }

    fn batch(&mut self, number: u64) -> Result<Batch> {
        let epoch = number / self.steps;
        if epoch != self.epoch {
            self.enter(epoch);
        }
        let step = (number % self.steps) as usize;
        let shares = &self.shares[step];
        let mut batch = match self.part {
            Part::Whole => self.data.batch(&shares.concat())?,
            Part::Rank(rank) => self.data.batch(&shares[rank])?,
        };
        batch.global_samples = shares.iter().map(Vec::len).sum();
        batch.repeated = self.repeated(step);
        Ok(batch)
    }

    /// Rows of this step's part that only fill up the epoch: the last `repeated()` of it, dealt to ranks in turn.
    fn repeated(&self, step: usize) -> usize {
        let Cut::PerRank(per_rank) = self.cut else { return 0 };
        let rows = step * per_rank..step * per_rank + self.shares[step][0].len();
        let real = |rank: usize| {
            // Row `i` of rank `r` is sample `i * world + r` of the epoch.
            rows.clone().filter(|row| row * self.sampler.world_size + rank < self.sampler.samples).count()
        };
        match self.part {
            Part::Whole => (0..self.sampler.world_size).map(|rank| rows.len() - real(rank)).sum(),
            Part::Rank(rank) => rows.len() - real(rank),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(samples: i64) -> Arc<Dataset> {
        let input = (0..samples).map(|value| value as f32).collect();
        Arc::new(Dataset::from_floats(input, &[1], (0..samples).collect()).unwrap())
    }

    fn options(world_size: usize, cut: Cut, part: Part) -> LoaderOptions {
        LoaderOptions {
            world_size,
            cut,
            part,
            shuffle: false,
            drop_last: false,
            seed: 0,
            workers: 0,
            first_epoch: 0,
        }
    }

    fn labels(batch: &Batch) -> Vec<i64> {
        Vec::try_from(&batch.target).unwrap()
    }

    fn take(loader: &mut Loader, count: usize) -> Vec<Vec<i64>> {
        (0..count).map(|_| labels(&loader.next().unwrap())).collect()
    }

    #[test]
    fn the_whole_batch_is_the_ranks_parts_one_after_another() {
        let mut whole = Loader::new(numbers(12), options(2, Cut::PerRank(3), Part::Whole)).unwrap();
        assert_eq!(whole.steps_per_epoch(), 2);
        assert_eq!(take(&mut whole, 2), [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]]);
        let mut rank = Loader::new(numbers(12), options(2, Cut::PerRank(3), Part::Rank(1))).unwrap();
        assert_eq!(take(&mut rank, 3), [[1, 3, 5], [7, 9, 11], [1, 3, 5]]);
    }

    #[test]
    fn epochs_follow_each_other_reshuffled() {
        let shuffled = LoaderOptions { shuffle: true, seed: 5, ..options(1, Cut::PerRank(8), Part::Whole) };
        let mut loader = Loader::new(numbers(8), shuffled).unwrap();
        let epochs = take(&mut loader, 3);
        for (epoch, seen) in epochs.iter().enumerate() {
            let expected: Vec<i64> =
                super::super::randperm(8, 5 + epoch as u64).into_iter().map(|index| index as i64).collect();
            assert_eq!(seen, &expected);
        }
    }

    #[test]
    fn workers_change_nothing_but_when_batches_are_made() {
        let with = |workers| {
            let options = LoaderOptions {
                shuffle: true,
                workers,
                first_epoch: 0,
                ..options(2, Cut::PerRank(3), Part::Whole)
            };
            take(&mut Loader::new(numbers(20), options).unwrap(), 25)
        };
        let in_line = with(0);
        assert_eq!(with(1), in_line);
        assert_eq!(with(3), in_line);
    }

    #[test]
    fn a_global_cut_may_leave_ranks_empty_and_says_how_many_rows_there_are() {
        let mut loader = Loader::new(numbers(10), options(4, Cut::Global(9), Part::Rank(3))).unwrap();
        let batch = loader.next().unwrap();
        assert_eq!((batch.samples, batch.global_samples), (0, 9));
        let batch = loader.next().unwrap();
        assert_eq!((batch.samples, batch.global_samples), (0, 1));
    }

    // Field case 056: padding is not counted as real samples.
    #[test]
    fn rows_that_fill_up_the_last_batch_are_counted() {
        // 5 samples on 3 ranks, 1 each: 0 1 2 | 3 4 0.
        let repeated = |part| {
            let mut loader = Loader::new(numbers(5), options(3, Cut::PerRank(1), part)).unwrap();
            [loader.next().unwrap().repeated, loader.next().unwrap().repeated]
        };
        assert_eq!(repeated(Part::Whole), [0, 1]);
        assert_eq!(repeated(Part::Rank(1)), [0, 0]);
        assert_eq!(repeated(Part::Rank(2)), [0, 1]);
    }

    #[test]
    fn a_loader_that_could_never_deliver_is_refused() {
        let error = |data, options| Loader::new(data, options).unwrap_err().to_string();
        assert_eq!(
            error(numbers(0), options(2, Cut::PerRank(1), Part::Whole)),
            "a data set of 0 samples gives no batch for 2 cards"
        );
        let dropping = LoaderOptions { drop_last: true, ..options(2, Cut::Global(9), Part::Whole) };
        assert_eq!(error(numbers(8), dropping), "a data set of 8 samples gives no batch for 2 cards");
        assert_eq!(error(numbers(8), options(2, Cut::PerRank(1), Part::Rank(2))), "rank 2 of a world of 2");
        assert!(error(numbers(8), options(2, Cut::PerRank(0), Part::Whole)).contains("must be 1 or more"));
    }

    #[test]
    fn dropping_a_loader_ends_its_threads() {
        let data = numbers(100);
        let options =
            LoaderOptions { workers: 3, first_epoch: 0, ..options(1, Cut::PerRank(4), Part::Whole) };
        let mut loader = Loader::new(Arc::clone(&data), options).unwrap();
        loader.next().unwrap();
        drop(loader);
        // Every worker held a handle.
        assert_eq!(Arc::strong_count(&data), 1);
    }

    #[test]
    fn a_dead_worker_is_an_error_and_not_an_endless_wait() {
        let (sender, receiver) = sync_channel(AHEAD);
        drop(sender);
        let worker = Worker { batches: Some(receiver), thread: None };
        assert_eq!(worker.receive(2).unwrap_err().to_string(), "data worker 2 died");
    }
}
