//! One engine for one stretch of work, in fresh processes: jobs out, logs back. What `compare` and
//! `train` have in common.

use super::peers;
use super::request::Request;
use super::row::Row;
use crate::card::Meter;
use crate::config::{EngineKind, Layout};
use crate::error::{Error, Result};
use crate::launch::{Group, Job, Limits, MemoryFile, Message, Mode, Program, StoreAddress};
use crate::metrics::record::{CardInfo, SampleRow};
use crate::metrics::round::RankLog;
use crate::metrics::sampler::{Charge, Sampled, Sampler, Subject, WatchedCard, WatchedProcess};
use crate::units::Nanos;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

/// Sample rows on their way to the file: more than a slow disk should ever hold up.
const ROWS_IN_FLIGHT: usize = 4096;

/// What a rank may take, past the deadline of its own waits, to say so.
const SILENCE_PAST_DEADLINE: Duration = Duration::from_secs(15);

/// What is run.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    pub(crate) row: Row,
    pub(crate) round: usize,
    pub(crate) mode: Mode,
    pub(crate) init: Option<PathBuf>,
    pub(crate) save_initial: Option<PathBuf>,
    pub(crate) save_gradients: Option<PathBuf>,
    pub(crate) save_final: Option<PathBuf>,
}

/// How it went.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// By rank, as far as they came.
    pub(crate) logs: Vec<RankLog>,
    pub(crate) sampled: Sampled,
    pub(crate) result: Result<()>,
}

/// Cards an engine runs on, of those of the run.
pub(crate) fn cards_of(engine: EngineKind, cards: &[CardInfo]) -> &[CardInfo] {
    &cards[..engine.layout().cards(cards.len())]
}

/// Runs it to its end. `write_samples` gets the sampler's rows on a thread of its own, `observe` every
/// message in the order in which they arrive.
pub(crate) fn run(
    cell: &Cell,
    request: &Request,
    grace: Duration,
    stop: &AtomicUsize,
    write_samples: impl FnOnce(Receiver<SampleRow>) -> Result<()> + Send,
    observe: &mut dyn FnMut(usize, &Message) -> Result<()>,
) -> Outcome {
    let engine = cell.row.engine;
    let cards = cards_of(engine, &request.cards);
    let world_size = engine.layout().processes(cards.len());
    let mut outcome = Outcome { logs: Vec::new(), sampled: Sampled::default(), result: Ok(()) };
    outcome.logs.resize_with(world_size, RankLog::default);
    let (logs, sampled) = (&mut outcome.logs, &mut outcome.sampled);
    outcome.result = std::thread::scope(|scope| {
        let meter = Arc::new(Meter::create(request.cards.len())?);
        // Libtorch's file store on memory without a name: nothing is left behind, whoever is killed.
        let store = (world_size > 1).then(MemoryFile::create).transpose()?;
        let jobs = jobs(cell, request, world_size, &meter, store.as_ref());
        for (log, job) in logs.iter_mut().zip(&jobs) {
            log.cards = job.own_cards().iter().map(|card| card.index).collect();
            log.weights = match engine {
                EngineKind::Dp => job.plan.dp.weights_of(&log.cards),
                _ => None,
            };
        }
        let limits = Limits {
            grace,
            silence: Duration::from_secs_f64(request.plan.run.deadline_s) + SILENCE_PAST_DEADLINE,
        };
        let started = Nanos::now();
        let group = Group::spawn(&program(engine, request)?, &jobs, limits)?;
        let (rows, received) = sync_channel(ROWS_IN_FLIGHT);
        let writer = scope.spawn(move || write_samples(received));
        let subject = Subject {
            engine: cell.row.name.clone(),
            round: cell.round,
            cards: cards.iter().map(watched).collect(),
            processes: processes(engine, &group.pids()),
            meter,
        };
        let period = Duration::from_millis(request.plan.sample.period_ms);
        let sampler = Sampler::start(subject, period, rows)?;
        let ended = group.run(stop, &mut |rank, message| {
            observe(rank, &message)?;
            keep(&mut logs[rank], message, started);
            Ok(())
        });
        *sampled = sampler.stop();
        let written = writer.join().unwrap_or_else(|_| {
            Err(Error::new(crate::error::Kind::Worker, "the writer of samples panicked"))
        });
        ended.and(written)
    });
    outcome
}

fn jobs(
    cell: &Cell,
    request: &Request,
    world_size: usize,
    meter: &Meter,
    store: Option<&MemoryFile>,
) -> Vec<Job> {
    let job = |rank| Job {
        plan: cell.row.plan.clone(),
        engine: cell.row.engine,
        round: cell.round,
        rank,
        world_size,
        cards: in_order(&cell.row, cards_of(cell.row.engine, &request.cards)),
        store: store.map(|store| StoreAddress::File(store.path())),
        meter: Some(meter.path()),
        init: cell.init.clone(),
        save_initial: cell.save_initial.clone(),
        save_gradients: cell.save_gradients.clone(),
        save_final: cell.save_final.clone(),
        mode: cell.mode,
    };
    (0..world_size).map(job).collect()
}

/// A row's cards, in the order in which its engine lists them.
fn in_order(row: &Row, cards: &[CardInfo]) -> Vec<CardInfo> {
    match row.engine.layout() {
        Layout::OneProcess => row.plan.dp.order(cards.to_vec()),
        Layout::OneCard | Layout::ProcessPerCard => cards.to_vec(),
    }
}

/// Whom the processes of an engine work for: ours say it by thread.
fn processes(engine: EngineKind, pids: &[u32]) -> Vec<WatchedProcess> {
    let charge = |rank| if engine.is_peer() { Charge::All(rank) } else { Charge::ByThreadName };
    pids.iter().enumerate().map(|(rank, &pid)| WatchedProcess { pid, charge: charge(rank) }).collect()
}

/// This program, or PyTorch's, as a worker, with the variables that would make OpenMP break the rules of virtual cards:
/// threads that spin while they wait would count as work, and its own pinning would undo ours.
fn program(engine: EngineKind, request: &Request) -> Result<Program> {
    let mut program = if engine.is_peer() { peers::program()? } else { Program::this(["worker", "--job"]) };
    program.set = vec![
        ("OMP_NUM_THREADS".into(), request.plan.run.threads_per_card.to_string().into()),
        ("OMP_WAIT_POLICY".into(), "PASSIVE".into()),
    ];
    program.unset = ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "GOMP_SPINCOUNT"]
        .map(Into::into)
        .to_vec();
    Ok(program)
}

fn watched(card: &CardInfo) -> WatchedCard {
    let cores = card.cores.as_ref().map_or(1, Vec::len);
    WatchedCard { index: card.index, kind: card.kind, uuid: card.uuid.clone(), cores }
}

fn keep(log: &mut RankLog, message: Message, started: Nanos) {
    match message {
        Message::Ready { link } => {
            log.ready_after = Some(Nanos::now().since(started));
            log.link = link;
        }
        Message::Step(step) => log.steps.push(step),
        Message::CardTotals(totals) => log.totals.push(totals),
        Message::Weights { digest, skipped_steps } => {
            log.weights_digest = Some(digest);
            log.skipped_steps = skipped_steps;
        }
        Message::MeasuringStarts
        | Message::Resumed { .. }
        | Message::MeasuringEnds
        | Message::Evaluated { .. }
        | Message::Failed { .. }
        | Message::Done => {}
    }
}
