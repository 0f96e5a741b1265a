//! The communication thread of a rank: owns the collective, does jobs in the order they are given.
//!
//! Knows no gradients: a job is whatever a closure does with the collective and the buckets.
//!
//! Note [One thread a tensor]
//! libtorch's tensor metadata is not made for two threads, while its storage is plain memory. So the
//! bucket's own tensor stays with the communication thread, and the compute thread has views made from
//! it before it was handed over: two tensors over one memory, each touched by one thread. Who may touch
//! the memory is ordered by jobs: posted after the bucket was filled, waited for before it is read.

use super::hooks::{Bucket, CommHook};
use crate::card::{CardMeter, Meter};
use crate::comm::wait::{Waiter, signal};
use crate::comm::{Abort, Buffer, Collective};
use crate::error::Kind;
use crate::metrics::phase::{Phase, Recorder, Span};
use crate::units::Nanos;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use tch::Tensor;

/// What the communication thread works with.
pub(super) struct Desk {
    pub(super) collective: Box<dyn Collective>,
    /// Gradient buckets, in launch order.
    pub(super) buckets: Vec<Buffer>,
    /// The shapes of the parameters in each of them.
    pub(super) shapes: Vec<Vec<Vec<i64>>>,
    /// How they travel.
    pub(super) hook: Box<dyn CommHook>,
    /// Where the module's buffers are gathered for their broadcast.
    pub(super) staging: Vec<Buffer>,
    /// Where numbers are summed, by how many they are.
    sums: BTreeMap<usize, Buffer>,
    /// Bytes of gradients and of statistics given to the other ranks.
    sent: u64,
    recorder: Recorder,
}

impl Desk {
    pub(super) fn new(
        collective: Box<dyn Collective>,
        buckets: Vec<Buffer>,
        shapes: Vec<Vec<Vec<i64>>>,
        hook: Box<dyn CommHook>,
        staging: Vec<Buffer>,
        card: usize,
    ) -> Self {
        Self {
            collective,
            buckets,
            shapes,
            hook,
            staging,
            sums: BTreeMap::new(),
            sent: 0,
            recorder: Recorder::new(card),
        }
    }

    /// Averages a bucket over ranks.
    pub(super) fn reduce(&mut self, index: usize) -> Result<()> {
        let Self { collective, buckets, shapes, hook, sent, .. } = self;
        let last = index + 1 == buckets.len();
        let bucket = Bucket { index, last, buffer: &buckets[index], shapes: &shapes[index] };
        let bytes = hook.reduce(collective.as_mut(), bucket)?;
        *sent += if collective.world_size() > 1 { bytes as u64 } else { 0 };
        Ok(())
    }

    /// Sums numbers over ranks. Their memory stays, for the next time as many come.
    fn sum(&mut self, values: &[f64]) -> Result<Vec<f64>> {
        let Self { collective, sums, sent, .. } = self;
        if let Entry::Vacant(vacant) = sums.entry(values.len()) {
            vacant.insert(collective.allocate(values.len(), tch::Kind::Double)?);
        }
        let buffer = &sums[&values.len()];
        buffer.tensor.shallow_clone().f_copy_(&Tensor::f_from_slice(values)?)?;
        collective.all_reduce(buffer)?;
        *sent += if collective.world_size() > 1 { size_of_val(values) as u64 } else { 0 };
        Ok(Vec::try_from(&buffer.tensor)?)
    }

    /// Does some communication and records it as `phase` of `step`.
    pub(super) fn timed<T>(
        &mut self,
        phase: Phase,
        step: u64,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let start = Nanos::now();
        let result = work(self);
        self.recorder.set_step(step);
        self.recorder.push(phase, start, Nanos::now());
        result
    }
}

type Job = Box<dyn FnOnce(&mut Desk) -> Result<()> + Send>;

/// What the two threads share.
#[derive(Default)]
struct Progress {
    /// Jobs finished: the word that the compute thread waits on.
    done: AtomicU32,
    /// The first failure; all jobs after it are skipped.
    failure: Mutex<Option<Error>>,
    spans: Mutex<Vec<Span>>,
    /// [`Desk::sent`].
    sent: AtomicU64,
}

/// The compute thread's end.
pub(super) struct Communicator {
    jobs: Option<mpsc::Sender<Job>>,
    /// The step that is being worked on.
    step: AtomicU64,
    /// Jobs posted.
    posted: AtomicU32,
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
    abort: Abort,
    deadline: Duration,
    meter: Option<(Arc<Meter>, usize)>,
}

impl Communicator {
    /// Starts the thread, named `comm<card>`: that is how the sampler knows whom it works for.
    pub(super) fn start(desk: Desk, meter: Option<Arc<Meter>>) -> Result<Self> {
        let abort = desk.collective.abort_handle();
        let deadline = desk.collective.deadline();
        let card = desk.recorder.card();
        let progress = Arc::new(Progress::default());
        let (jobs, inbox) = mpsc::channel();
        let theirs = Arc::clone(&progress);
        let thread = std::thread::Builder::new()
            .name(format!("comm{card}"))
            .spawn(move || serve(desk, &inbox, &theirs))
            .map_err(|error| {
                Error::new(Kind::Unavailable, format!("cannot start the communication thread: {error}"))
                    .hint("raise the limit of processes and threads (`ulimit -u`)")
            })?;
        Ok(Self {
            jobs: Some(jobs),
            step: AtomicU64::new(0),
            posted: AtomicU32::new(0),
            progress,
            thread: Some(thread),
            abort,
            deadline,
            meter: meter.map(|meter| (meter, card)),
        })
    }

    /// Hands a job over without waiting.
    pub(super) fn post(&self, job: impl FnOnce(&mut Desk) -> Result<()> + Send + 'static) -> Result<()> {
        let gone = || Error::new(Kind::Worker, "the communication thread has ended");
        self.jobs.as_ref().ok_or_else(gone)?.send(Box::new(job)).map_err(|_| gone())?;
        self.posted.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Waits until everything posted is done; the first failure of any job.
    pub(super) fn wait(&self) -> Result<()> {
        let target = self.posted.load(Relaxed);
        let reached = |done: u32| done.wrapping_sub(target) as i32 >= 0;
        let outstanding = target.wrapping_sub(self.progress.done.load(Relaxed));
        let waiter = Waiter {
            meter: self.card_meter(),
            abort: None,
            // Each job ends at the collective's deadline by itself, with a better message than ours: this
            // is for a thread that hangs elsewhere.
            deadline: self.deadline.saturating_add(Duration::from_secs(5)).saturating_mul(outstanding.max(1)),
        };
        let waited = waiter.wait(&self.progress.done, reached);
        if let Some(failure) = lock(&self.progress.failure).as_ref() {
            let copy = Error::new(failure.kind(), failure.to_string());
            return Err(match failure.advice() {
                Some(hint) => copy.hint(hint),
                None => copy,
            });
        }
        waited.map_err(|_| Error::new(Kind::Timeout, "the communication thread hangs outside any collective"))
    }

    /// Does a job now, after all that were posted, and returns what it gives.
    pub(super) fn call<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Desk) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = mpsc::channel();
        self.post(move |desk| {
            // Nobody listens when the caller has given up.
            let _ = answer.send(job(desk)?);
            Ok(())
        })?;
        self.wait()?;
        answered.try_recv().map_err(|_| Error::new(Kind::Worker, "the communication thread gave no answer"))
    }

    /// Stops the group.
    pub(super) fn abort(&self, reason: &str) {
        self.abort.raise(reason);
    }

    /// Sums numbers over ranks, element by element: every rank calls it at the same place, with as many.
    pub(super) fn sum(&self, values: Vec<f64>) -> Result<Vec<f64>> {
        let step = self.step.load(Relaxed);
        self.call(move |desk| desk.timed(Phase::AllReduce, step, |desk| desk.sum(&values)))
    }

    /// A new step begins. Spans that nobody asked for are let go: they must not pile up for ever.
    pub(super) fn begin(&self, step: u64) {
        self.step.store(step, Relaxed);
        lock(&self.progress.spans).retain(|span| span.step >= step);
    }

    /// Bytes of gradients and of statistics that this rank gave to the others so far.
    pub(super) fn sent(&self) -> u64 {
        self.progress.sent.load(Relaxed)
    }

    /// What was recorded since the last call.
    pub(super) fn take_spans(&self) -> Vec<Span> {
        std::mem::take(&mut *lock(&self.progress.spans))
    }

    fn card_meter(&self) -> Option<&CardMeter> {
        self.meter.as_ref().map(|(meter, card)| meter.card(*card))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.progress.done.load(Acquire) != self.posted.load(Relaxed) {
            // Else the join below would last until the deadline, if a peer never comes.
            self.abort("the model was dropped in the middle of a step");
        }
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // Its panics were caught; one that escaped has nobody left to tell.
            let _ = thread.join();
        }
    }
}

fn serve(mut desk: Desk, inbox: &mpsc::Receiver<Job>, progress: &Progress) {
    while let Ok(job) = inbox.recv() {
        let failed = lock(&progress.failure).is_some();
        if !failed {
            let result = catch_unwind(AssertUnwindSafe(|| job(&mut desk))).unwrap_or_else(|_| {
                Err(Error::new(
                    Kind::Worker,
                    format!("rank {}: a communication job panicked", desk.collective.rank()),
                ))
            });
            if let Err(error) = result {
                desk.collective.abort(&error.to_string());
                *lock(&progress.failure) = Some(error);
            }
            lock(&progress.spans).extend(desk.recorder.drain());
            progress.sent.store(desk.sent, Relaxed);
        }
        signal(&progress.done, |done| {
            done.fetch_add(1, AcqRel);
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these hold is whole at every moment, whoever panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Local;

    fn start() -> Communicator {
        let hook = Box::new(crate::ddp::hooks::AllReduce);
        let desk = Desk::new(Box::new(Local::new()), Vec::new(), Vec::new(), hook, Vec::new(), 7);
        Communicator::start(desk, None).unwrap()
    }

    #[test]
    fn jobs_run_in_order_on_the_named_thread_and_are_recorded() {
        let communicator = start();
        let order = Arc::new(Mutex::new(Vec::new()));
        for i in 0..100 {
            let order = Arc::clone(&order);
            communicator
                .post(move |desk| {
                    desk.timed(Phase::AllReduce, i, |_| {
                        lock(&order).push(i);
                        Ok(())
                    })
                })
                .unwrap();
        }
        let name = communicator.call(|_| Ok(std::thread::current().name().map(str::to_owned))).unwrap();
        assert_eq!(name.as_deref(), Some("comm7"));
        assert_eq!(*lock(&order), (0..100).collect::<Vec<_>>());
        let spans = communicator.take_spans();
        assert_eq!((spans.len(), spans[99].step, spans[99].card), (100, 99, 7));
        assert!(communicator.take_spans().is_empty());
    }

    #[test]
    fn after_a_failure_or_panic_jobs_are_skipped_and_the_first_error_stays() {
        let communicator = start();
        communicator.post(|_| Err(Error::new(Kind::Timeout, "too late").hint("hurry"))).unwrap();
        communicator.post(|_| panic!("never reached")).unwrap();
        for _ in 0..2 {
            let error = communicator.wait().unwrap_err();
            assert_eq!((error.to_string().as_str(), error.kind()), ("too late", Kind::Timeout));
            assert_eq!(error.advice(), Some("hurry"));
        }
        let communicator = start();
        let error = communicator.call::<()>(|_| panic!("boom")).unwrap_err();
        assert_eq!(error.to_string(), "rank 0: a communication job panicked");
    }
}
