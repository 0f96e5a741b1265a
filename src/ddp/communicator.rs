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
use crate::card::cuda::{Event, Timing};
use crate::card::{CardMeter, Meter};
use crate::comm::wait::{Waiter, signal};
use crate::comm::{Abort, Buffer, Collective, Reduction};
use crate::error::Kind;
use crate::metrics::phase::{Phase, Recorder, Timed};
use crate::torch::seat::Seat;
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

/// How often a card that is communicating is looked after.
const WATCH: Duration = Duration::from_millis(5);

/// What the communication thread works with.
pub(super) struct Desk {
    pub(super) collective: Box<dyn Collective>,
    /// Gradient buckets, in launch order.
    pub(super) buckets: Vec<Buffer>,
    /// The shapes of the parameters in each of them.
    pub(super) shapes: Vec<Vec<Vec<i64>>>,
    /// How they travel.
    pub(super) hook: Box<dyn CommHook>,
    /// What makes averages of them.
    pub(super) reduction: Reduction,
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
        reduction: Reduction,
        staging: Vec<Buffer>,
        card: usize,
    ) -> Self {
        let recorder = Recorder::of(card, collective.stream());
        Self {
            collective,
            buckets,
            shapes,
            hook,
            reduction,
            staging,
            sums: BTreeMap::new(),
            sent: 0,
            recorder,
        }
    }

    /// Averages a bucket over ranks.
    pub(super) fn reduce(&mut self, index: usize) -> Result<()> {
        let Self { collective, buckets, shapes, hook, sent, reduction, .. } = self;
        let last = index + 1 == buckets.len();
        let (buffer, shapes) = (&buckets[index], shapes[index].as_slice());
        let bucket = Bucket { index, last, buffer, shapes, reduction: *reduction };
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
        self.recorder.set_step(step);
        let begun = self.recorder.begin();
        let result = work(self);
        self.recorder.end(phase, begun);
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
    spans: Mutex<Vec<Timed>>,
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
    seat: Seat,
    /// Whether what jobs ask for goes on after they have ended.
    asynchronous: bool,
}

impl Communicator {
    /// Starts the thread, named `comm<card>`: that is how the sampler knows whom it works for.
    pub(super) fn start(desk: Desk, meter: Option<Arc<Meter>>, seat: Seat) -> Result<Self> {
        let abort = desk.collective.abort_handle();
        let deadline = desk.collective.deadline();
        let card = desk.recorder.card();
        let asynchronous = desk.collective.stream().is_some();
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
            seat,
            asynchronous,
        })
    }

    /// Hands a job over without waiting. What it asks the card for comes after what the calling thread has
    /// asked it for so far.
    pub(super) fn post(&self, job: impl FnOnce(&mut Desk) -> Result<()> + Send + 'static) -> Result<()> {
        match self.ready()? {
            None => self.hand_over(Box::new(job)),
            Some(ready) => self.hand_over(Box::new(move |desk| {
                desk.collective.after(&ready)?;
                job(desk)
            })),
        }
    }

    /// Where the calling thread's work stands in its card's stream, if it has one.
    fn ready(&self) -> Result<Option<Event>> {
        let Some(stream) = self.seat.stream().filter(|_| self.asynchronous) else { return Ok(None) };
        let ready = Event::new(stream.context(), Timing::No)?;
        stream.record(&ready)?;
        Ok(Some(ready))
    }

    fn hand_over(&self, job: Job) -> Result<()> {
        let gone = || Error::new(Kind::Worker, "the communication thread has ended");
        self.jobs.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())?;
        self.posted.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Waits until everything posted is done; the first failure of any job. Where jobs only ask a card for
    /// something, the calling thread's stream is what waits for that.
    pub(super) fn wait(&self) -> Result<()> {
        if self.asynchronous {
            self.hand_over(Box::new(|desk| desk.collective.complete()))?;
        }
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
        self.failure()?;
        waited.map_err(|_| Error::new(Kind::Timeout, "the communication thread hangs outside any collective"))
    }

    /// The first failure so far, if there was one.
    fn failure(&self) -> Result<()> {
        let failure = lock(&self.progress.failure);
        let Some(failure) = failure.as_ref() else { return Ok(()) };
        let copy = Error::new(failure.kind(), failure.to_string());
        Err(match failure.advice() {
            Some(hint) => copy.hint(hint),
            None => copy,
        })
    }

    /// Waits until the card has done all that the calling thread asked it for, or communication has failed:
    /// then the card may never come to it.
    pub(super) fn synchronize(&self) -> Result<()> {
        let synchronized = self.seat.synchronize_unless(&mut || self.failure());
        self.failure()?;
        synchronized
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
        lock(&self.progress.spans).retain(|span| span.step() >= step);
    }

    /// Bytes of gradients and of statistics that this rank gave to the others so far.
    pub(super) fn sent(&self) -> u64 {
        self.progress.sent.load(Relaxed)
    }

    /// What was recorded since the last call.
    pub(super) fn take_spans(&self) -> Vec<Timed> {
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
    let entered = desk.collective.enter();
    keep(&mut desk, progress, |_| entered);
    while let Some(job) = next(&mut desk, inbox, progress) {
        keep(&mut desk, progress, job);
        lock(&progress.spans).extend(desk.recorder.drain());
        progress.sent.store(desk.sent, Relaxed);
        signal(&progress.done, |done| {
            done.fetch_add(1, AcqRel);
        });
    }
}

/// The next job; looks after what the card was asked for meanwhile. `None` when nobody will give any more.
fn next(desk: &mut Desk, inbox: &mpsc::Receiver<Job>, progress: &Progress) -> Option<Job> {
    if desk.collective.stream().is_none() {
        return inbox.recv().ok();
    }
    loop {
        match inbox.recv_timeout(WATCH) {
            Ok(job) => return Some(job),
            Err(mpsc::RecvTimeoutError::Disconnected) => return None,
            Err(mpsc::RecvTimeoutError::Timeout) => keep(desk, progress, |desk| desk.collective.watch()),
        }
    }
}

/// Does a job, unless one has failed before, and keeps the first failure.
fn keep(desk: &mut Desk, progress: &Progress, job: impl FnOnce(&mut Desk) -> Result<()>) {
    if lock(&progress.failure).is_some() {
        return;
    }
    let result = catch_unwind(AssertUnwindSafe(|| job(desk))).unwrap_or_else(|_| {
        let rank = desk.collective.rank();
        Err(Error::new(Kind::Worker, format!("rank {rank}: a communication job panicked")))
    });
    if let Err(error) = result {
        desk.collective.abort(&error.to_string());
        *lock(&progress.failure) = Some(error);
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
        let local = Box::new(Local::new());
        let desk = Desk::new(local, Vec::new(), Vec::new(), hook, Reduction::Sum, Vec::new(), 7);
        Communicator::start(desk, None, Seat::default()).unwrap()
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
        let spans: Vec<_> =
            communicator.take_spans().into_iter().map(|timed| timed.span().unwrap()).collect();
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
