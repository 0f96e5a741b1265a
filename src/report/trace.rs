//! Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.
//!
//! Holds the last finished round of each engine, so that it stays small; `steps.csv` has them all. An
//! engine is a process, a card a thread, its communication thread another; readings are counters.

use super::load::Run;
use super::text;
use super::view::{Thread, phase_named, thread_of};
use crate::config::EngineKind;
use crate::error::Kind;
use crate::metrics::record::RoundStatus;
use crate::{Error, Result};
use serde::Serialize;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// The file. Keys are the format's, not ours.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace<'a> {
    display_time_unit: &'a str,
    other_data: BTreeMap<&'a str, &'a str>,
    trace_events: Vec<Event<'a>>,
}

/// An event of the trace; times in microseconds.
#[derive(Serialize)]
struct Event<'a> {
    ph: &'a str,
    name: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'a str>,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Args,
}

/// What belongs to an event, by its kind.
#[derive(Serialize)]
#[serde(untagged)]
enum Args {
    Span { step: u64, rank: usize },
    Reading { value: f64 },
    Name { name: String },
    Order { sort_index: usize },
}

/// The trace file's bytes.
pub(super) fn trace(run: &Run) -> Result<Vec<u8>> {
    let mut trace_events = Vec::new();
    for (place, engine) in EngineKind::ALL.into_iter().enumerate() {
        engine_events(run, engine, place + 1, &mut trace_events);
    }
    let note = "the last finished round of each engine; steps.csv has all rounds";
    let trace = Trace { display_time_unit: "ms", other_data: BTreeMap::from([("note", note)]), trace_events };
    serde_json::to_vec(&trace).map_err(|e| Error::new(Kind::Io, format!("cannot make the trace: {e}")))
}

fn engine_events<'a>(run: &'a Run, engine: EngineKind, pid: usize, events: &mut Vec<Event<'a>>) {
    let Some(record) = run.results.engines.get(engine.name()) else { return };
    let Some(round) = record.rounds.iter().rposition(|round| round.status == RoundStatus::Ok) else { return };
    let steps = || run.steps.iter().filter(move |row| row.engine == engine.name() && row.round == round);
    let samples = || run.samples.iter().filter(move |row| row.engine == engine.name() && row.round == round);
    // Each engine starts at zero: what compares them is the shape, and rounds are far apart.
    let Some(zero) = steps().map(|row| row.start_ns).min() else { return };
    let micros = |t: u64| (t as f64 - zero as f64) / 1e3;
    let describe = |name: &'static str, tid, args| Event {
        ph: "M",
        name: name.into(),
        cat: None,
        pid,
        tid,
        ts: None,
        dur: None,
        args,
    };

    let name = format!("{}, round {}", text::engine(engine.name()), round + 1);
    events.push(describe("process_name", 0, Args::Name { name }));
    events.push(describe("process_sort_index", 0, Args::Order { sort_index: pid }));
    events.push(describe("thread_name", 0, Args::Name { name: "steps".to_owned() }));
    let mut threads = BTreeSet::new();
    for row in steps() {
        let (tid, cat, name) = match phase_named(&row.phase) {
            Some(phase) => {
                let thread = thread_of(phase);
                threads.insert((row.card, thread));
                let cat = if phase.is_communication() { "communication" } else { "phase" };
                (track(row.card, thread), cat, Cow::Borrowed(phase.name()))
            }
            // The whole step gets a track of its own: phases of other threads may outlive it.
            None if row.phase == "step" && row.card == 0 => (0, "step", format!("step {}", row.step).into()),
            None => continue,
        };
        events.push(Event {
            ph: "X",
            name,
            cat: Some(cat),
            pid,
            tid,
            ts: Some(micros(row.start_ns)),
            dur: Some(row.duration_ns as f64 / 1e3),
            args: Args::Span { step: row.step, rank: row.rank },
        });
    }
    for (card, thread) in threads {
        let name = match thread {
            Thread::Own => format!("card {card}"),
            Thread::Communication => format!("card {card} communication"),
        };
        let tid = track(card, thread);
        events.push(describe("thread_name", tid, Args::Name { name }));
        events.push(describe("thread_sort_index", tid, Args::Order { sort_index: tid }));
    }
    for row in samples() {
        let memory = row.memory_used_bytes.map(|bytes| bytes as f64 / f64::from(1 << 20));
        for (what, value) in [("busy %", row.utilisation_percent), ("memory MiB", memory)] {
            if let Some(value) = value.filter(|value| value.is_finite()) {
                events.push(Event {
                    ph: "C",
                    name: format!("card {} {what}", row.card).into(),
                    cat: None,
                    pid,
                    tid: 0,
                    ts: Some(micros(row.t_ns)),
                    dur: None,
                    args: Args::Reading { value },
                });
            }
        }
    }
}

/// Track number: 0 is the steps', then two for each card.
fn track(card: usize, thread: Thread) -> usize {
    1 + card * 2 + usize::from(thread == Thread::Communication)
}
