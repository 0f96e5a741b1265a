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
use serde_json::json;
use std::collections::BTreeSet;

/// An event of the trace; times in microseconds.
#[derive(Serialize)]
struct Event<'a> {
    ph: &'a str,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'a str>,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: serde_json::Value,
}

/// The trace file's bytes.
pub(super) fn trace(run: &Run) -> Result<Vec<u8>> {
    let mut events = Vec::new();
    let kinds = [EngineKind::Single, EngineKind::SinglePerCard, EngineKind::Dp, EngineKind::Ddp];
    for (pid, engine) in kinds.into_iter().enumerate() {
        engine_events(run, engine, pid + 1, &mut events);
    }
    let trace = json!({
        "displayTimeUnit": "ms",
        "otherData": { "note": "the last finished round of each engine; steps.csv has all rounds" },
        "traceEvents": events,
    });
    serde_json::to_vec(&trace).map_err(|e| Error::new(Kind::Io, format!("cannot make the trace: {e}")))
}

fn engine_events(run: &Run, engine: EngineKind, pid: usize, events: &mut Vec<serde_json::Value>) {
    let Some(record) = run.results.engines.get(engine.name()) else { return };
    let Some(round) = record.rounds.iter().rposition(|round| round.status == RoundStatus::Ok) else { return };
    let steps = || run.steps.iter().filter(move |row| row.engine == engine && row.round == round);
    let samples = || run.samples.iter().filter(move |row| row.engine == engine && row.round == round);
    // Each engine starts at zero: what compares them is the shape, and rounds are minutes apart.
    let Some(zero) = steps().map(|row| row.start_ns).min() else { return };
    let micros = |t: u64| (t as f64 - zero as f64) / 1e3;
    let mut push = |event: Event<'_>| events.extend(serde_json::to_value(event).ok());

    let name = format!("{}, round {}", text::engine(engine.name()), round + 1);
    push(named("process_name", pid, 0, json!({ "name": name })));
    push(named("process_sort_index", pid, 0, json!({ "sort_index": pid })));
    push(named("thread_name", pid, 0, json!({ "name": "steps" })));
    let mut threads = BTreeSet::new();
    for row in steps() {
        let (tid, cat) = match phase_named(&row.phase) {
            Some(phase) => {
                threads.insert((row.card, thread_of(phase)));
                (
                    track(row.card, thread_of(phase)),
                    if phase.is_communication() { "communication" } else { "phase" },
                )
            }
            // The whole step gets a track of its own: phases of other threads may outlive it.
            None if row.phase == "step" && row.card == 0 => (0, "step"),
            None => continue,
        };
        let step = format!("step {}", row.step);
        push(Event {
            ph: "X",
            name: if tid == 0 { &step } else { &row.phase },
            cat: Some(cat),
            pid,
            tid,
            ts: Some(micros(row.start_ns)),
            dur: Some(row.duration_ns as f64 / 1e3),
            args: json!({ "step": row.step, "rank": row.rank }),
        });
    }
    for (card, thread) in threads {
        let name = match thread {
            Thread::Own => format!("card {card}"),
            Thread::Communication => format!("card {card} communication"),
        };
        let tid = track(card, thread);
        push(named("thread_name", pid, tid, json!({ "name": name })));
        push(named("thread_sort_index", pid, tid, json!({ "sort_index": tid })));
    }
    for row in samples() {
        let readings = [
            ("busy %", row.utilisation_percent),
            ("memory MiB", row.memory_used_bytes.map(|bytes| bytes as f64 / f64::from(1 << 20))),
        ];
        for (what, value) in readings {
            let name = format!("card {} {what}", row.card);
            if let Some(value) = value.filter(|value| value.is_finite()) {
                let args = json!({ what: value });
                let ts = Some(micros(row.t_ns));
                push(Event { ph: "C", name: &name, cat: None, pid, tid: 0, ts, dur: None, args });
            }
        }
    }
}

fn track(card: usize, thread: Thread) -> usize {
    1 + card * 2 + usize::from(thread == Thread::Communication)
}

fn named(name: &str, pid: usize, tid: usize, args: serde_json::Value) -> Event<'_> {
    Event { ph: "M", name, cat: None, pid, tid, ts: None, dur: None, args }
}
