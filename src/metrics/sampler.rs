//! The sampler: a thread of the parent that watches cards, not engines, and never stops anybody.
//!
//! Readings fall on absolute deadlines, so that a late one does not shift those after it; one that is a
//! whole period late is left out and counted. Rows leave through a bounded channel, so memory does not
//! grow with the length of a run. It accounts for its own CPU time.

use super::nvml::Watch;
use super::proc;
use super::record::{CardKind, Monitoring, SampleRow, Sampling};
use super::watched::{Point, Series};
use crate::card::Meter;
use crate::error::{Error, Kind, Result};
use crate::units::Nanos;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// What is believed of a utilisation. Readings jitter by a scheduler tick (4 ms in 100), so true values
/// stray a little past both ends; what lies further out is a fault of measuring.
const BELIEVABLE_PERCENT: std::ops::RangeInclusive<f64> = -5.0..=105.0;

/// A card that is watched.
#[derive(Debug, Clone)]
pub struct WatchedCard {
    /// Position in the run's card list.
    pub index: usize,
    /// What it is made of, and so who knows about it: the kernel, or NVML.
    pub kind: CardKind,
    /// What identifies it.
    pub uuid: String,
    /// Cores it has.
    pub cores: usize,
}

/// A process that works for cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchedProcess {
    /// Its number.
    pub pid: u32,
    /// Whom its threads work for.
    pub charge: Charge,
}

/// Whom a process's threads work for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Charge {
    /// Their names say it, and the process counts its cards' memory.
    ByThreadName,
    /// All for this card: a process that is not ours. Nobody counts its memory.
    All(usize),
}

/// What is watched.
#[derive(Debug)]
pub struct Subject {
    /// Engine that runs, for the rows.
    pub engine: String,
    /// Round, for the rows.
    pub round: usize,
    /// Cards the engine runs on.
    pub cards: Vec<WatchedCard>,
    /// Its processes.
    pub processes: Vec<WatchedProcess>,
    /// Its counters.
    pub meter: Arc<Meter>,
}

/// What the sampler did, for [`Sampling`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Account {
    /// Readings taken.
    pub ticks: u64,
    /// Readings left out.
    pub missed: u64,
    /// Values left out because they could not be true.
    pub rejected: u64,
    /// CPU time taken.
    pub cpu: Nanos,
    /// Time watched.
    pub wall: Nanos,
}

impl Account {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            ticks: self.ticks + other.ticks,
            missed: self.missed + other.missed,
            rejected: self.rejected + other.rejected,
            cpu: Nanos(self.cpu.0 + other.cpu.0),
            wall: Nanos(self.wall.0 + other.wall.0),
        }
    }

    /// As it stands in `results.json`.
    pub fn record(self, period: Duration) -> Sampling {
        Sampling {
            period_ms: period.as_millis() as u64,
            ticks: self.ticks,
            missed: self.missed,
            rejected: self.rejected,
            cpu_percent: (self.wall > Nanos(0)).then(|| 100.0 * self.cpu.0 as f64 / self.wall.0 as f64),
        }
    }
}

/// What a sampler brought home.
#[derive(Debug, Default)]
pub struct Sampled {
    /// What it did.
    pub account: Account,
    /// What came of watching CUDA cards; `None` where there were none.
    pub monitoring: Option<Monitoring>,
    /// The readings of each of them.
    pub series: Vec<Series>,
}

/// A running sampler; dropping it without [`stop`](Self::stop) ends it too.
#[derive(Debug)]
pub struct Sampler {
    stop: Sender<()>,
    thread: JoinHandle<Sampled>,
}

impl Sampler {
    /// Starts watching; rows go to `rows`, and readings it has no room for count as missed.
    pub fn start(subject: Subject, period: Duration, rows: SyncSender<SampleRow>) -> Result<Self> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("sampler".into())
            .spawn(move || watch(&subject, period, &rows, &stopped))
            .map_err(|source| {
                Error::new(Kind::Unavailable, format!("cannot start the sampler thread: {source}"))
            })?;
        Ok(Self { stop, thread })
    }

    /// Ends it and gives what it brought home.
    pub fn stop(self) -> Sampled {
        drop(self.stop);
        // A sampler that panicked has no account to give; the run is worth keeping all the same.
        self.thread.join().unwrap_or_default()
    }
}

fn watch(
    subject: &Subject,
    period: Duration,
    rows: &SyncSender<SampleRow>,
    stopped: &Receiver<()>,
) -> Sampled {
    let period = Nanos(u64::try_from(period.as_nanos()).unwrap_or(u64::MAX).max(1));
    let cpu_before = Nanos::thread_cpu();
    let start = Nanos::now();
    let mut deadline = start;
    let mut account = Account::default();
    let mut meters: Vec<_> = subject.cards.iter().map(|card| Utilisation::new(card.cores)).collect();
    let mut threads = BTreeMap::new();
    let mut gpus = Gpus::of(subject);
    // The sender is dropped when it is time to stop.
    while stopped.recv_timeout(left_until(deadline)) == Err(RecvTimeoutError::Timeout) {
        account.ticks += 1;
        read_threads(&subject.processes, &mut threads);
        for (card, utilisation) in subject.cards.iter().zip(&mut meters) {
            let row = match (&mut gpus, card.kind) {
                (Some(gpus), CardKind::Cuda) => gpus.read(subject, card),
                _ => {
                    let (row, rejected) = read_card(subject, card, &threads, utilisation);
                    account.rejected += u64::from(rejected);
                    row
                }
            };
            if rows.try_send(row).is_err() {
                account.missed += 1;
            }
        }
        let (next, skipped) = next_deadline(deadline, period, Nanos::now());
        account.missed += skipped;
        deadline = next;
    }
    // Once more: a counter has to be read on both sides of what it counts.
    for card in subject.cards.iter().filter(|card| card.kind == CardKind::Cuda) {
        if let Some(gpus) = &mut gpus {
            let row = gpus.read(subject, card);
            account.missed += u64::from(rows.try_send(row).is_err());
        }
    }
    account.cpu = Nanos::thread_cpu().since(cpu_before);
    account.wall = Nanos::now().since(start);
    let (monitoring, series) = gpus.map(|gpus| (gpus.watch.account(), gpus.series)).unzip();
    Sampled { account, monitoring, series: series.unwrap_or_default() }
}

/// The CUDA cards among those that are watched.
struct Gpus {
    watch: Watch,
    series: Vec<Series>,
    own: Vec<u32>,
}

impl Gpus {
    /// `None` where there are none.
    fn of(subject: &Subject) -> Option<Self> {
        let cards: Vec<&WatchedCard> =
            subject.cards.iter().filter(|card| card.kind == CardKind::Cuda).collect();
        (!cards.is_empty()).then(|| Self {
            watch: Watch::open(cards.iter().map(|card| (card.index, card.uuid.clone()))),
            series: cards.iter().map(|card| Series { card: card.index, points: Vec::new() }).collect(),
            own: subject.processes.iter().map(|process| process.pid).collect(),
        })
    }

    fn read(&mut self, subject: &Subject, card: &WatchedCard) -> SampleRow {
        let at = Nanos::now();
        let reading = self.watch.read(card.index, &self.own).unwrap_or_default();
        if let Some(series) = self.series.iter_mut().find(|series| series.card == card.index) {
            series.points.push(Point {
                at,
                utilisation_percent: reading.utilisation_percent,
                memory_used_bytes: reading.memory_used_bytes,
                energy_mj: reading.energy_mj,
                power_mw: reading.power_mw,
            });
        }
        SampleRow {
            engine: subject.engine.clone(),
            round: subject.round,
            t_ns: at.0,
            card: card.index,
            uuid: card.uuid.clone(),
            utilisation_percent: reading.utilisation_percent,
            memory_used_bytes: reading.memory_used_bytes,
            power_mw: reading.power_mw,
            memory_total_bytes: reading.memory_total_bytes,
            memory_controller_percent: reading.memory_controller_percent,
            energy_mj: reading.energy_mj,
            temperature_c: reading.temperature_c,
            sm_clock_mhz: reading.sm_clock_mhz,
            memory_clock_mhz: reading.memory_clock_mhz,
            throttle: reading.throttle,
            pcie_rx_kb_s: reading.pcie_rx_kb_s,
            pcie_tx_kb_s: reading.pcie_tx_kb_s,
            nvlink_rx_kb_s: reading.nvlink_rx_kb_s,
            nvlink_tx_kb_s: reading.nvlink_tx_kb_s,
            sm_activity_percent: reading.sm_activity_percent,
            sm_occupancy_percent: reading.sm_occupancy_percent,
            process_memory_bytes: reading.process_memory_bytes,
            process_utilisation_percent: reading.process_utilisation_percent,
            foreign_memory_bytes: reading.foreign_memory_bytes,
        }
    }
}

fn left_until(deadline: Nanos) -> Duration {
    Duration::from_nanos(deadline.since(Nanos::now()).0)
}

/// By process and thread.
type Threads = BTreeMap<(u32, u32), Watched>;

/// A thread that works, or worked, for a card. One that ended keeps its last figure: what it did was done.
#[derive(Debug, Clone, Copy)]
struct Watched {
    card: usize,
    on_cpu: Nanos,
    alive: bool,
}

fn read_threads(processes: &[WatchedProcess], threads: &mut Threads) {
    threads.values_mut().for_each(|thread| thread.alive = false);
    for &WatchedProcess { pid, charge } in processes {
        let process = proc::process(pid);
        let found = match charge {
            Charge::ByThreadName => proc::card_threads(&process),
            Charge::All(card) => proc::all_threads(&process, card),
        };
        // That a process has ended is for `launch` to say.
        for thread in found.unwrap_or_default() {
            let watched = Watched { card: thread.card, on_cpu: thread.on_cpu, alive: true };
            threads.insert((pid, thread.tid), watched);
        }
    }
}

fn read_card(
    subject: &Subject,
    card: &WatchedCard,
    threads: &Threads,
    utilisation: &mut Utilisation,
) -> (SampleRow, bool) {
    let now = Nanos::now();
    let mine = || threads.values().filter(|thread| thread.card == card.index);
    // Before the card's threads exist there is nothing to read. After they ended neither: what they did
    // since the last reading went with them, and would look like idleness.
    let seen = mine().any(|thread| thread.alive);
    let meter = subject.meter.cards().get(card.index);
    let counted = subject.processes.iter().all(|process| process.charge == Charge::ByThreadName);
    let reading = match meter {
        Some(meter) if seen => {
            let busy = mine().map(|thread| thread.on_cpu.0).sum::<u64>() as i64
                - meter.wait_cpu_ns.load(Relaxed) as i64;
            utilisation.read(now, busy)
        }
        _ => Reading::Missing,
    };
    let row = SampleRow {
        engine: subject.engine.clone(),
        round: subject.round,
        t_ns: now.0,
        card: card.index,
        uuid: card.uuid.clone(),
        utilisation_percent: match reading {
            Reading::Percent(value) => Some(value),
            Reading::Missing | Reading::Rejected => None,
        },
        memory_used_bytes: meter.filter(|_| seen && counted).map(|meter| meter.live_bytes.load(Relaxed)),
        ..SampleRow::default()
    };
    (row, reading == Reading::Rejected)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Reading {
    Percent(f64),
    Missing,
    Rejected,
}

/// Turns growing busy time into shares of wall time.
#[derive(Debug)]
struct Utilisation {
    cores: usize,
    last: Option<(Nanos, i64)>,
}

impl Utilisation {
    fn new(cores: usize) -> Self {
        Self { cores: cores.max(1), last: None }
    }

    /// The share of the card's cores that was busy since the last reading.
    fn read(&mut self, now: Nanos, busy_ns: i64) -> Reading {
        let Some((then, busy_then)) = self.last.replace((now, busy_ns)) else { return Reading::Missing };
        let wall = now.since(then);
        if wall == Nanos(0) {
            return Reading::Missing;
        }
        let percent = 100.0 * (busy_ns - busy_then) as f64 / (wall.0 as f64 * self.cores as f64);
        if !BELIEVABLE_PERCENT.contains(&percent) {
            return Reading::Rejected;
        }
        if percent < 0.0 {
            // Waiting was charged before the CPU time it burnt: an idle card. What is missing here is
            // left to the next reading, so that the sum stays true.
            self.last = Some((now, busy_then));
            return Reading::Percent(0.0);
        }
        Reading::Percent(percent)
    }
}

/// The first deadline after `now` on the grid of `deadline`, and how many were passed over.
fn next_deadline(deadline: Nanos, period: Nanos, now: Nanos) -> (Nanos, u64) {
    let skipped = now.since(deadline).0 / period.0;
    (Nanos(deadline.0 + (skipped + 1) * period.0), skipped)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn deadlines_stay_on_their_grid_and_missed_ones_are_counted() {
        assert_eq!(next_deadline(Nanos(100), Nanos(10), Nanos(103)), (Nanos(110), 0));
        assert_eq!(next_deadline(Nanos(100), Nanos(10), Nanos(137)), (Nanos(140), 3));
        assert_eq!(next_deadline(Nanos(100), Nanos(10), Nanos(110)), (Nanos(120), 1));
    }

    #[test]
    fn utilisation_is_busy_time_over_the_time_of_all_cores() {
        let mut card = Utilisation::new(2);
        assert_eq!(card.read(Nanos(0), 0), Reading::Missing);
        assert_eq!(card.read(Nanos(100 * MS), 150 * MS as i64), Reading::Percent(75.0));
        assert_eq!(card.read(Nanos(200 * MS), 150 * MS as i64), Reading::Percent(0.0));
    }

    #[test]
    fn impossible_values_are_rejected_not_clamped() {
        let mut card = Utilisation::new(1);
        card.read(Nanos(0), 0);
        assert_eq!(card.read(Nanos(100 * MS), 106 * MS as i64), Reading::Rejected);
        assert_eq!(card.read(Nanos(200 * MS), 100 * MS as i64), Reading::Rejected);
        assert_eq!(card.read(Nanos(300 * MS), 204 * MS as i64), Reading::Percent(104.0));
    }

    #[test]
    fn a_debt_of_busy_time_is_paid_by_the_next_reading() {
        let mut card = Utilisation::new(1);
        card.read(Nanos(0), 10 * MS as i64);
        assert_eq!(card.read(Nanos(100 * MS), 8 * MS as i64), Reading::Percent(0.0));
        assert_eq!(card.read(Nanos(200 * MS), 30 * MS as i64), Reading::Percent(20.0));
    }

    #[test]
    fn a_card_whose_threads_ended_has_no_reading_rather_than_an_idle_one() {
        let card = WatchedCard { index: 0, kind: CardKind::Virtual, uuid: "cores:0".into(), cores: 1 };
        let meter = Arc::new(Meter::create(1).unwrap());
        let subject =
            Subject { engine: "ddp".into(), round: 0, cards: vec![card.clone()], processes: vec![], meter };
        let mut utilisation = Utilisation::new(1);
        let mut threads = Threads::new();
        threads.insert((1, 1), Watched { card: 0, on_cpu: Nanos(MS), alive: true });
        read_card(&subject, &card, &threads, &mut utilisation);
        std::thread::sleep(Duration::from_millis(1));
        let (idle, _) = read_card(&subject, &card, &threads, &mut utilisation);
        assert_eq!((idle.utilisation_percent, idle.memory_used_bytes), (Some(0.0), Some(0)));
        // No process is left to be found.
        read_threads(&subject.processes, &mut threads);
        let (ended, rejected) = read_card(&subject, &card, &threads, &mut utilisation);
        assert_eq!((ended.utilisation_percent, ended.memory_used_bytes, rejected), (None, None, false));
    }

    #[test]
    fn watches_a_busy_thread_at_less_than_a_percent_of_a_core() {
        let (rows, received) = std::sync::mpsc::sync_channel(1024);
        let quit = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let flag = quit.clone();
        // A thread gives itself its name: it has one once it runs.
        let (running, started) = std::sync::mpsc::channel();
        let busy = std::thread::Builder::new()
            .name("card0".into())
            .spawn(move || {
                running.send(()).unwrap();
                while !flag.load(Relaxed) {}
            })
            .unwrap();
        started.recv().unwrap();
        let card = WatchedCard { index: 0, kind: CardKind::Virtual, uuid: "cores:0".into(), cores: 1 };
        let meter = Arc::new(Meter::create(1).unwrap());
        meter.card(0).live_bytes.store(4096, Relaxed);
        let subject = Subject {
            engine: "dp".into(),
            round: 3,
            cards: vec![card],
            processes: vec![WatchedProcess { pid: std::process::id(), charge: Charge::ByThreadName }],
            meter,
        };
        let sampler = Sampler::start(subject, Duration::from_millis(100), rows).unwrap();
        std::thread::sleep(Duration::from_millis(950));
        let account = sampler.stop().account;
        quit.store(true, Relaxed);
        busy.join().unwrap();
        let rows: Vec<_> = received.iter().collect();
        assert!((8..=10).contains(&account.ticks), "{account:?}");
        assert_eq!(rows.len() as u64, account.ticks);
        assert_eq!(rows[0].utilisation_percent, None);
        // Other tests share the cores, so only that the thread was seen to work is certain.
        assert!(rows[1..].iter().any(|row| row.utilisation_percent.is_some_and(|percent| percent > 20.0)));
        assert!(rows.iter().all(|row| row.memory_used_bytes == Some(4096) && row.round == 3));
        let percent = account.record(Duration::from_millis(100)).cpu_percent.unwrap();
        assert!(percent < 1.0, "the sampler took {percent} % of a core");
    }
}
