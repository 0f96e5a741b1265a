//! `worker`: one rank. Puts model, data, engine and collective together, which only this file knows how
//! to do, and runs them for the plan.
//!
//! The work goes on in a thread that bears its card's name, so that the sampler knows whom to charge.

use super::ExitStatus;
use super::args::WorkerArgs;
use super::printer::Printer;
use super::request::{self, Request};
use crate::card::cuda::driver;
use crate::card::{Card, Cores, Meter, VirtualCard};
use crate::comm::nccl::{self, Nccl};
use crate::comm::{Board, Collective, Local, Member, Rendezvous, Shm};
use crate::config::{DataPlan, EngineKind, Layout, ModelPlan, Plan, Uneven};
use crate::data::{self, Cut, Dataset, Loader, LoaderOptions, Part};
use crate::ddp::{self, DdpEngine};
use crate::dp::{self, DpEngine};
use crate::engine::{Engine, Event, Memory, Recipe, RunLoop, Single, StepEvent};
use crate::error::{Error, Kind, Result};
use crate::launch::{Job, Message, Mode, RankEnv, Reporter, StoreAddress, end_with_parent};
use crate::metrics::phase::{CardTotals, StepReport};
use crate::metrics::proc::own_card_cpu;
use crate::metrics::record::{CardInfo, CardKind};
use crate::model::checkpoint::{self, Progress, Resumed};
use crate::torch::seat::Seat;
use crate::torch::store::Store;
use crate::torch::{cuda, memory, precision, threads};
use crate::units::Nanos;
use crate::{model, torch};
use std::any::Any;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tch::Device;

/// Stack of the working thread: libtorch's backward recurses through deep graphs.
const STACK_BYTES: usize = 64 << 20;

/// Rows of a test batch on one card.
const TEST_BATCH: usize = 256;

/// An error in a build that cannot train; this one can.
pub(crate) fn require() -> Result<()> {
    Ok(())
}

/// The libtorch that was loaded.
pub(crate) fn libtorch_version() -> Option<String> {
    torch::loaded().ok().map(|loaded| loaded.version)
}

/// Whether libtorch has its CUDA half, so that CUDA cards can be used.
pub(crate) fn cuda_half() -> bool {
    // The wheel brings libtorch_cuda without what it needs; an archive brings all of it in that one file.
    torch::cuda::library().is_some_and(|path| {
        let archive = path.ancestors().nth(2).is_some_and(|root| root.join("build-version").exists());
        archive || nccl::beside_libtorch().is_some()
    })
}

/// The NCCL that `ddp` uses on CUDA cards, loaded to be asked; or why it cannot be.
pub(crate) fn nccl() -> Result<String, String> {
    nccl::library().map(nccl::Library::version).map_err(|error| error.to_string())
}

/// The weights that every engine of ours starts from, as a safetensors file: peers draw others.
pub(crate) fn initial_weights(plan: &Plan) -> Result<Vec<u8>> {
    model::build(&plan.model, Device::Cpu, plan.run.seed)?.state().to_safetensors(&[])
}

/// Whether every engine could start from this file: found out before anything is written.
pub(crate) fn check_weights(plan: &Plan, path: &Path) -> Result<()> {
    model::build(&plan.model, Device::Cpu, plan.run.seed)?.state().load(path)
}

/// Runs the verb.
pub(crate) fn run(args: &WorkerArgs) -> ExitStatus {
    let job = if args.job { end_with_parent() } else { job_by_hand(args) };
    match job.and_then(|job| Ok((job, Reporter::claim_stdout()?))) {
        Ok((job, mut reporter)) => match work_in_a_card_thread(&job, &mut reporter) {
            Ok(()) => ExitStatus::Success,
            Err(error) => {
                // A parent that does not listen any more has its own way to notice.
                let _ = reporter.send(&Message::from(&error));
                ExitStatus::Error
            }
        },
        Err(error) => {
            Printer::new().error(&error);
            ExitStatus::Error
        }
    }
}

/// The job of a rank that something else started: `ddp` on this host.
fn job_by_hand(args: &WorkerArgs) -> Result<Job> {
    let rank = RankEnv::read(|name| std::env::var(name).ok(), args.local_rank)?;
    if rank.local_rank != rank.rank {
        return Err(Error::new(
            Kind::Unavailable,
            format!(
                "rank {} is rank {} of its host: ranks on several hosts are not supported",
                rank.rank, rank.local_rank
            ),
        )
        .hint("start all ranks on one host, as `torchrun --nnodes 1` does"));
    }
    let mut overrides = request::overrides(&args.run)?;
    if args.run.cards.is_none() {
        overrides.flag("WORLD_SIZE", "run.cards", Some(rank.world_size));
    }
    if let Some(devices) = one_card_a_task(rank.world_size).filter(|_| args.run.devices.is_none()) {
        overrides.flag("CUDA_VISIBLE_DEVICES", "run.devices", Some(devices));
    }
    overrides.flag("worker", "run.engines", Some("ddp"));
    let Request { plan, cards, .. } =
        request::decide(args.run.config.as_deref(), &overrides, Uneven::Refuse)?;
    if plan.run.cards != rank.world_size {
        return Err(Error::usage(format!(
            "run.cards is {}, but WORLD_SIZE is {}",
            plan.run.cards, rank.world_size
        ))
        .hint("leave out --cards, or give both the same value"));
    }
    Ok(Job {
        plan,
        engine: EngineKind::Ddp,
        round: 0,
        rank: rank.rank,
        world_size: rank.world_size,
        cards,
        store: Some(rank.store),
        meter: None,
        init: None,
        save_initial: None,
        save_gradients: None,
        save_final: None,
        mode: Mode::Compare,
    })
}

/// Some schedulers show each task its own card alone: then that is this rank's, whatever its number among all. That
/// no two of them mean the same one is found out when ranks meet.
fn one_card_a_task(world_size: usize) -> Option<String> {
    let [card] = driver().ok()?.cards() else { return None };
    (world_size > 1).then(|| vec![card.uuid.as_str(); world_size].join(","))
}

fn work_in_a_card_thread(job: &Job, reporter: &mut Reporter) -> Result<()> {
    let card = own_card(job)?.index;
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name(format!("card{card}"))
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || work(job, reporter))
            .map_err(|source| {
                Error::new(Kind::Unavailable, format!("cannot start the thread of card {card}: {source}"))
            })?
            .join()
            .unwrap_or_else(|panic| Err(panicked(panic.as_ref())))
    })
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref().copied());
    // As with what libtorch throws: its C++ stack helps nobody.
    let text = text.unwrap_or("no reason given").split("\nException raised from").next().unwrap_or_default();
    Error::new(Kind::Torch, format!("panicked: {text}"))
        .hint("this is a fault of the program, please report it")
}

/// The card that the calling thread works for.
fn own_card(job: &Job) -> Result<&CardInfo> {
    job.own_cards().first().ok_or_else(|| {
        Error::new(Kind::Worker, format!("rank {} has no card among {}", job.rank, job.cards.len()))
    })
}

fn work(job: &Job, reporter: &mut Reporter) -> Result<()> {
    run_job(job, reporter).map_err(|error| match error.kind() {
        Kind::OutOfMemory => out_of_memory(job, &error),
        _ => error,
    })
}

/// What ran out, where, and at which batch: what decides whether less of it would fit.
fn out_of_memory(job: &Job, error: &Error) -> Error {
    let text = error.to_string();
    // DataParallel has several cards, and puts the one that failed before its words.
    let (card, what) = text
        .strip_prefix("card ")
        .and_then(|rest| rest.split_once(": "))
        .and_then(|(card, what)| Some((card.parse().ok()?, what)))
        .unwrap_or_else(|| (own_card(job).map_or(0, |card| card.index), text.as_str()));
    let batch = job.plan.batch;
    let size = match job.engine.layout() {
        Layout::OneCard if job.engine == EngineKind::SinglePerCard => format!("batch {}", batch.per_card),
        Layout::OneCard => format!("batch {}", batch.global),
        Layout::OneProcess | Layout::ProcessPerCard => {
            format!("batch {} ({} a card)", batch.global, batch.per_card)
        }
    };
    let what = what.strip_prefix("out of memory: ").unwrap_or(what);
    let error = Error::new(Kind::OutOfMemory, format!("out of memory on card {card} at {size}: {what}"));
    error.hint("make the batch or the model smaller, or use more cards")
}

fn run_job(job: &Job, reporter: &mut Reporter) -> Result<()> {
    let card = own_card(job)?;
    if card.kind == CardKind::Cuda {
        cuda::load()?;
    }
    // Before anything else asks for a device: this thread opens its own card, and no other one.
    let seat = Seat::take(&placed(card)?, deadline(job))?;
    // Before the first tensor, so that every block is counted.
    let meter = Arc::new(match &job.meter {
        Some(path) => Meter::open(path)?,
        None => Meter::create(job.cards.len())?,
    });
    memory::install(meter.clone())?;
    memory::set_process_card(card.index);
    memory::set_thread_card(card.index);
    threads::set_intra_op(job.plan.run.threads_per_card);
    precision::allow_tf32(job.plan.run.tf32);

    let (train, test) = data::open(&job.plan.data.source, wants_images(&job.plan.model), job.plan.run.seed)?;
    let first_epoch = match (&job.init, job.mode) {
        (Some(path), Mode::Train { .. }) => checkpoint::epochs_done(path)?,
        _ => 0,
    };
    let mut loader = Loader::new(Arc::new(train), LoaderOptions { first_epoch, ..loader_options(job) })?;
    let mut engine = engine(job, &meter, &loader, &seat)?;
    if let Some(path) = &job.init {
        match job.mode {
            Mode::Compare => engine.state().load(path)?,
            Mode::Train { .. } => resume(job, path, engine.as_mut(), reporter)?,
        }
    }
    let first_rank = job.rank == 0;
    if let Some(path) = job.save_initial.as_ref().filter(|_| first_rank) {
        engine.state().save(path)?;
    }
    reporter.send(&Message::Ready { link: engine.link().map(str::to_owned) })?;
    match job.mode {
        Mode::Compare => measure(job, &meter, engine.as_mut(), &mut loader, reporter)?,
        Mode::Train { epochs } => {
            let epochs = first_epoch + 1..=first_epoch + epochs;
            train_and_test(job, epochs, engine.as_mut(), &mut loader, &test, reporter)?;
        }
    }
    // Ranks whose buffers are not broadcast keep their own: only their weights have to agree.
    let digest = match job.plan.ddp.broadcast_buffers {
        true => engine.state().digest()?,
        false => engine.state().digest_without_buffers()?,
    };
    reporter.send(&Message::Weights { digest, skipped_steps: engine.skipped_steps() })?;
    // A training has saved after each of its epochs.
    if let Some(path) = job.save_final.as_ref().filter(|_| first_rank && job.mode == Mode::Compare) {
        engine.state().save(path)?;
    }
    reporter.send(&Message::Done)
}

/// Weights, and all else that a training goes on from if it is there.
fn resume(job: &Job, path: &Path, engine: &mut dyn Engine, reporter: &mut Reporter) -> Result<()> {
    let Some(Resumed { progress, memory }) = checkpoint::load(path, engine.state())? else { return Ok(()) };
    let beside = checkpoint::resume_path(path);
    let samples = samples(&job.plan);
    if progress.samples != samples {
        return Err(Error::usage(format!(
            "`{}` is of a training on other samples: {}; this one is on {samples}",
            beside.display(),
            progress.samples
        ))
        .hint("give the same data, batch and seed; or move that file away to start from the weights alone"));
    }
    engine.restore(&Memory { fields: memory, scale: progress.scale });
    reporter.send(&Message::Resumed { epochs: progress.epochs })
}

/// What decides which samples which epoch has.
fn samples(plan: &Plan) -> String {
    let DataPlan { source, shuffle, drop_last, .. } = &plan.data;
    format!(
        "{source:?}, global batch {}, shuffle {shuffle}, drop_last {drop_last}, seed {}",
        plan.batch.global, plan.run.seed
    )
}

/// Convolutions see images, the others flat samples.
fn wants_images(model: &ModelPlan) -> bool {
    match model {
        ModelPlan::Convnet { .. } | ModelPlan::Resnet18 { .. } => true,
        ModelPlan::Mlp { .. } | ModelPlan::Gpt { .. } => false,
    }
}

/// All engines see the same global batches; `single_per_card` sees batches of one card's size.
fn loader_options(job: &Job) -> LoaderOptions {
    let (run, data, batch) = (&job.plan.run, &job.plan.data, job.plan.batch);
    let world_size = match job.engine {
        EngineKind::SinglePerCard => 1,
        _ => run.cards,
    };
    LoaderOptions {
        world_size,
        cut: match job.mode {
            Mode::Compare if job.plan.ddp.join => Cut::PerRankUneven(batch.per_card),
            Mode::Compare => Cut::PerRank(batch.per_card),
            Mode::Train { .. } => Cut::Global(batch.global),
        },
        part: match job.engine.layout() {
            Layout::ProcessPerCard => Part::Rank(job.rank),
            Layout::OneCard | Layout::OneProcess => Part::Whole,
        },
        shuffle: data.shuffle,
        drop_last: data.drop_last,
        seed: run.seed,
        workers: data.workers,
        first_epoch: 0,
    }
}

fn engine(job: &Job, meter: &Arc<Meter>, loader: &Loader, seat: &Seat) -> Result<Box<dyn Engine>> {
    let plan = &job.plan;
    let (model, seed) = (plan.model.clone(), plan.run.seed);
    let recipe = Recipe::from(plan);
    let build = move |device| model::build(&model, device, seed);
    Ok(match job.engine {
        EngineKind::Single | EngineKind::SinglePerCard => {
            Box::new(Single::at(seat.clone(), build(seat.device())?, recipe))
        }
        EngineKind::Dp => {
            let cards: Vec<usize> = job.cards.iter().map(|card| card.index).collect();
            let options = dp::Options {
                chunk_weights: plan.dp.weights_of(&cards),
                threads_per_card: plan.run.threads_per_card,
                deadline: deadline(job),
                meter: Some(meter.clone()),
                inject: plan.inject,
                ..dp::Options::default()
            };
            let cards: Vec<Card> = job.cards.iter().map(placed).collect::<Result<_>>()?;
            let devices = cards.iter().map(|card| Ok((card.index(), device_of(card)?)));
            let devices: BTreeMap<usize, Device> = devices.collect::<Result<_>>()?;
            let factory = move |card| build(devices.get(&card).copied().unwrap_or(Device::Cpu));
            Box::new(DpEngine::new(&cards, options, recipe, factory)?)
        }
        EngineKind::Ddp => {
            let collective = collective(job, meter, loader, seat)?;
            let options = ddp::Options {
                card: own_card(job)?.index,
                meter: Some(meter.clone()),
                seat: seat.clone(),
                ..ddp::Options::from(&plan.ddp)
            };
            let engine = DdpEngine::new(build(seat.device())?, collective, options, recipe)?;
            Box::new(engine.following(&plan.ddp))
        }
        EngineKind::TorchSingle | EngineKind::TorchDp | EngineKind::TorchDdp => {
            return Err(Error::new(Kind::Worker, format!("{} is not run by this program", job.engine)));
        }
    })
}

/// A card as this process reaches it: the same card, whatever number it has here.
fn placed(card: &CardInfo) -> Result<Card> {
    let index = card.index;
    if card.kind == CardKind::Virtual {
        let cores = Cores(card.cores.clone().unwrap_or_default());
        return Ok(VirtualCard { index, cores }.into());
    }
    let cards = driver()?.cards();
    match cards.iter().find(|here| here.uuid == card.uuid) {
        Some(here) => Ok(Card::Cuda { index, ordinal: here.ordinal }),
        None => Err(Error::new(
            Kind::Unavailable,
            format!("card {index} ({}) is not visible to its worker", card.uuid),
        )
        .hint("check CUDA_VISIBLE_DEVICES, and whether the card is still there (`nvidia-smi`)")),
    }
}

/// Where libtorch's tensors of a card live.
fn device_of(card: &Card) -> Result<Device> {
    match card {
        Card::Virtual(_) => Ok(Device::Cpu),
        Card::Cuda { ordinal, .. } => cuda::device(*ordinal),
    }
}

fn deadline(job: &Job) -> Duration {
    Duration::from_secs_f64(job.plan.run.deadline_s)
}

/// The connection between the ranks of `ddp`, tried out: all of them must share the data in the same
/// way, and mean the same number of steps, or the last ones would wait for peers that have gone home.
fn collective(job: &Job, meter: &Arc<Meter>, loader: &Loader, seat: &Seat) -> Result<Box<dyn Collective>> {
    let deadline = deadline(job);
    let member = Member {
        rank: job.rank,
        world_size: job.world_size,
        deadline,
        meter: Some((meter.clone(), own_card(job)?.index)),
    };
    let store: Option<Box<dyn Rendezvous>> = match &job.store {
        None => None,
        Some(StoreAddress::File(path)) => Some(Box::new(Store::file(path, job.world_size, deadline)?)),
        Some(StoreAddress::Tcp { host, port, serve }) => {
            Some(Box::new(Store::tcp(host, *port, job.world_size, *serve, deadline)?))
        }
    };
    let mut collective: Box<dyn Collective> = match (store, seat.stream()) {
        (None, None) => Box::new(Local::new()),
        // Nothing is bypassed for a single rank: what it costs is part of what is measured.
        (None, Some(_)) => Box::new(Nccl::connect(member, &Board::new(deadline), seat.clone())?),
        (Some(store), Some(_)) => Box::new(Nccl::connect(member, &*store, seat.clone())?),
        (Some(store), None) => Box::new(Shm::connect(member, &*store)?),
    };
    ddp::same_sampler(collective.as_mut(), loader.sampler())?;
    let steps = collective.exchange(&(loader.steps_per_epoch() as u64).to_le_bytes())?;
    if steps.iter().any(|other| *other != steps[0]) {
        let counts: Vec<u64> = steps.iter().map(|bytes| u64_from(bytes)).collect();
        return Err(Error::new(
            Kind::Worker,
            format!("ranks have different numbers of steps an epoch, by rank: {counts:?}"),
        )
        .hint("give all ranks the same data, batch and seed"));
    }
    Ok(collective)
}

fn u64_from(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

/// Warm-up and measured steps, and what each of this process's cards did during the latter.
fn measure(
    job: &Job,
    meter: &Meter,
    engine: &mut dyn Engine,
    loader: &mut Loader,
    reporter: &mut Reporter,
) -> Result<()> {
    let run_loop = RunLoop {
        warmup: job.plan.run.warmup,
        steps: job.plan.run.steps,
        save_gradients: job.save_gradients.clone().filter(|_| job.rank == 0),
    };
    let mut window = Vec::new();
    run_loop.run(engine, loader, &mut |event| match event {
        Event::MeasuringStarts => {
            reporter.send(&Message::MeasuringStarts)?;
            for card in job.own_cards() {
                memory::reset_peak(meter, card.index);
                cuda::reset_peak(device_of(&placed(card)?)?)?;
                window.push(Border::at(meter, card)?);
            }
            Ok(())
        }
        Event::Step(step) => reporter.send(&Message::Step(report(step))),
        Event::MeasuringEnds => {
            let totals = job
                .own_cards()
                .iter()
                .zip(&window)
                .map(|(card, start)| start.totals_until(&Border::at(meter, card)?, meter, card))
                .collect::<Result<Vec<_>>>()?;
            reporter.send(&Message::MeasuringEnds)?;
            totals.into_iter().try_for_each(|totals| reporter.send(&Message::CardTotals(totals)))
        }
    })
}

/// A card's counters at one end of the measured window.
#[derive(Debug, Clone, Copy)]
struct Border {
    time: Nanos,
    on_cpu: Nanos,
    wait_cpu: Nanos,
}

impl Border {
    fn at(meter: &Meter, card: &CardInfo) -> Result<Self> {
        let on_cpu = own_card_cpu(card.index).map_err(|source| {
            Error::new(
                Kind::Unavailable,
                format!("cannot read the CPU time of card {}: {source}", card.index),
            )
        })?;
        let wait_cpu = Nanos(meter.card(card.index).wait_cpu_ns.load(Relaxed));
        Ok(Self { time: Nanos::now(), on_cpu, wait_cpu })
    }

    fn totals_until(&self, end: &Self, meter: &Meter, card: &CardInfo) -> Result<CardTotals> {
        // A CUDA card has no cores: how busy the host's are says nothing about it.
        let tensors = cuda::peak_bytes(device_of(&placed(card)?)?)?;
        let host = || meter.card(card.index).peak_bytes.load(Relaxed);
        Ok(CardTotals {
            card: card.index,
            cores: card.cores.as_ref().map_or(0, Vec::len),
            wall: end.time.since(self.time),
            on_cpu: end.on_cpu.since(self.on_cpu),
            wait_cpu: end.wait_cpu.since(self.wait_cpu),
            memory_peak_bytes: Some(tensors.unwrap_or_else(host)),
        })
    }
}

fn report(step: StepEvent) -> StepReport {
    StepReport {
        step: step.step,
        loss: (step.samples > 0).then_some(step.loss),
        samples: step.samples as u64,
        repeated: step.repeated as u64,
        sent_bytes: step.sent_bytes,
        start: step.start,
        end: step.end,
        spans: step.spans,
    }
}

/// Whole epochs; after each, this rank's share of the test data.
fn train_and_test(
    job: &Job,
    epochs: RangeInclusive<u64>,
    engine: &mut dyn Engine,
    loader: &mut Loader,
    test: &Dataset,
    reporter: &mut Reporter,
) -> Result<()> {
    let steps = loader.steps_per_epoch();
    let mut first_step = (epochs.start() - 1) * steps as u64;
    let mut digest = String::new();
    for epoch in epochs {
        let run_loop = RunLoop { steps, ..RunLoop::default() };
        run_loop.run(engine, loader, &mut |event| match event {
            Event::Step(step) => {
                // Nobody draws the phases of a training.
                let report = StepReport { step: first_step + step.step, spans: Vec::new(), ..report(step) };
                reporter.send(&Message::Step(report))
            }
            Event::MeasuringStarts | Event::MeasuringEnds => Ok(()),
        })?;
        first_step += steps as u64;
        let (correct, total) = evaluate(job, engine, test)?;
        if let Some(path) = job.save_final.as_ref().filter(|_| job.rank == 0) {
            let Memory { fields, scale } = engine.memory();
            let progress = Progress { epochs: epoch, samples: samples(&job.plan), scale };
            digest = checkpoint::save(path, engine.state(), &fields, &progress, &digest)?;
        }
        reporter.send(&Message::Evaluated { epoch, correct, total })?;
    }
    Ok(())
}

/// Every sample is tested by exactly one rank: nothing is repeated to even them out.
fn evaluate(job: &Job, engine: &mut dyn Engine, test: &Dataset) -> Result<(u64, u64)> {
    let share: Vec<usize> = (job.rank..test.len()).step_by(job.world_size).collect();
    let mut sums = (0, 0);
    for rows in share.chunks(TEST_BATCH * job.own_cards().len()) {
        let batch = test.batch(rows)?.to_device(engine.batch_device())?;
        let (correct, total) = engine.evaluate(batch)?;
        sums = (sums.0 + correct, sums.1 + total);
    }
    Ok(sums)
}
