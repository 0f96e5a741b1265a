//! A made-up run that looks like a real one: under `dp` card 0 works and the others wait, under `ddp`
//! all work. Rows come first; what a round says is computed from them.

use dp_vs_ddp::config::{
    BatchPlan, CommHookPlan, DataPlan, DataSource, DdpPlan, DeviceChoice, DpPlan, EngineKind, ModelPlan,
    OptimizerPlan, Plan, Precision, RunPlan, SamplePlan,
};
use dp_vs_ddp::metrics::phase::Phase;
use dp_vs_ddp::metrics::record::{
    CardInfo, CardKind, CardRound, Comparison, EngineRecord, Environment, Results, Round, RoundStatus,
    SCHEMA, SampleRow, Sampling, Software, Status, StepRow, Warning,
};
use dp_vs_ddp::metrics::stats;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A run folder's contents.
pub(crate) struct Fixture {
    pub(crate) results: Results,
    pub(crate) steps: Vec<StepRow>,
    pub(crate) samples: Vec<SampleRow>,
}

/// How large a run to make up.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) cards: usize,
    pub(crate) rounds: usize,
    pub(crate) warmup: usize,
    pub(crate) steps: usize,
    pub(crate) period_ms: u64,
}

impl Default for Size {
    fn default() -> Self {
        Self { cards: 2, rounds: 5, warmup: 5, steps: 100, period_ms: 100 }
    }
}

const ENGINES: [EngineKind; 4] =
    [EngineKind::Single, EngineKind::SinglePerCard, EngineKind::Dp, EngineKind::Ddp];

impl Fixture {
    pub(crate) fn new(size: Size) -> Self {
        let mut noise = Noise(7);
        let (mut steps, mut samples) = (Vec::new(), Vec::new());
        let mut engines: BTreeMap<String, EngineRecord> = BTreeMap::new();
        let mut clock = 1_000_000_000_000u64;
        for round in 0..size.rounds {
            for engine in ENGINES {
                let cards = if matches!(engine, EngineKind::Dp | EngineKind::Ddp) { size.cards } else { 1 };
                let first = steps.len();
                clock += 400_000_000;
                let start = clock;
                let drift = 1.0 + 0.02 * noise.next();
                for step in 0..size.warmup + size.steps {
                    clock = one_step(engine, cards, round, step as u64, clock, drift, &mut noise, &mut steps);
                }
                let rows = &steps[first..];
                let round_record = summarise_round(engine, cards, size, rows, &mut noise);
                sample(engine, round, cards, size, start, clock, &round_record, &mut noise, &mut samples);
                let global = if engine == EngineKind::SinglePerCard { 64 / size.cards } else { 64 };
                let record = engines.entry(engine.name().to_owned()).or_insert_with(|| EngineRecord {
                    tried: None,
                    cards,
                    global_batch: global,
                    batch_per_card: global / cards,
                    rounds: vec![],
                    summary: None,
                });
                record.rounds.push(round_record);
            }
        }
        let mut results = Results {
            monitoring: None,
            schema: SCHEMA.to_owned(),
            argv: vec!["dp-vs-ddp".into(), "compare".into(), "--cards".into(), size.cards.to_string()],
            started_at: "2026-03-01T10:00:00Z".into(),
            finished_at: Some("2026-03-01T10:00:41Z".into()),
            status: Status::Complete,
            environment: environment(size.cards),
            plan: plan(size),
            engines,
            comparison: Comparison::default(),
            sampling: Some(Sampling {
                period_ms: size.period_ms,
                ticks: samples.len() as u64,
                missed: 2,
                rejected: 0,
                cpu_percent: Some(0.21),
            }),
            warnings: vec![Warning {
                code: "hyperthreads".into(),
                message: "cores 0 and 1 may be two threads of one physical core".into(),
                hint: Some("give each card a core of its own, or read the ratios with care".into()),
            }],
        };
        stats::conclude(&mut results).unwrap();
        Self { results, steps, samples }
    }

    /// Writes the three files that a report is made from.
    pub(crate) fn write(&self, folder: &Path) {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("results.json"), serde_json::to_vec_pretty(&self.results).unwrap())
            .unwrap();
        write_csv(&folder.join("steps.csv"), &self.steps);
        write_csv(&folder.join("samples.csv"), &self.samples);
    }
}

fn write_csv<T: Serialize>(path: &Path, rows: &[T]) {
    let mut writer = csv::Writer::from_path(path).unwrap();
    rows.iter().for_each(|row| writer.serialize(row).unwrap());
    writer.flush().unwrap();
}

/// Deterministic, between -1 and 1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as f64 / f64::from(1u32 << 30) - 1.0
    }
}

/// Phases of one thread in order, in milliseconds.
type Script = Vec<(Phase, f64)>;

fn script(engine: EngineKind, card: usize, cards: usize) -> Script {
    use Phase::{Backward, Data, Forward, Gather, Loss, Reduce, Replicate, Scatter, Update, Wait};
    let share = 1.0 / cards as f64;
    match engine {
        EngineKind::Single => vec![(Data, 0.2), (Forward, 6.0), (Loss, 0.3), (Backward, 12.0), (Update, 2.0)],
        EngineKind::SinglePerCard => {
            vec![(Data, 0.1), (Forward, 3.4), (Loss, 0.2), (Backward, 6.9), (Update, 2.0)]
        }
        EngineKind::Dp => {
            let (forward, backward) = (6.0 * share + 0.4, 12.0 * share + 0.9);
            if card == 0 {
                vec![
                    (Data, 0.2),
                    (Scatter, 0.4),
                    (Replicate, 0.2),
                    (Forward, forward),
                    (Wait, 1.6),
                    (Gather, 0.2),
                    (Loss, 0.3),
                    (Backward, backward),
                    (Wait, 0.9),
                    (Reduce, 2.2),
                    (Update, 2.0),
                ]
            } else {
                vec![
                    (Wait, 0.3),
                    (Scatter, 0.3),
                    (Replicate, 1.9),
                    (Forward, forward),
                    (Wait, 0.5),
                    (Backward, backward),
                    (Wait, 5.0),
                ]
            }
        }
        EngineKind::Ddp => vec![
            (Data, 0.15),
            (Forward, 6.0 * share + 0.4),
            (Loss, 0.2),
            (Backward, 12.0 * share + 1.2),
            (Wait, 0.7),
            (Update, 2.0),
        ],
        EngineKind::TorchSingle | EngineKind::TorchDp | EngineKind::TorchDdp => Vec::new(),
    }
}

/// Adds a step's rows; when it ended.
#[expect(clippy::too_many_arguments, reason = "a fixture's inner loop")]
fn one_step(
    engine: EngineKind,
    cards: usize,
    round: usize,
    step: u64,
    start: u64,
    drift: f64,
    noise: &mut Noise,
    rows: &mut Vec<StepRow>,
) -> u64 {
    let mut end = start;
    for card in 0..cards {
        let rank = if engine == EngineKind::Ddp { card } else { 0 };
        let mut row = |phase: &str, start_ns: u64, end_ns: u64, samples: Option<u64>| {
            rows.push(StepRow {
                engine: engine.to_string(),
                round,
                rank,
                card,
                step,
                phase: phase.to_owned(),
                start_ns,
                duration_ns: end_ns - start_ns,
                samples,
                issue_ns: None,
            });
        };
        let mut at = start;
        let mut backward = (start, start);
        for (phase, ms) in script(engine, card, cards) {
            let from = at;
            at += (ms * drift * (1.0 + 0.06 * noise.next()) * 1e6) as u64;
            row(phase.name(), from, at, None);
            if phase == Phase::Backward {
                backward = (from, at);
            }
        }
        if engine == EngineKind::Ddp {
            let length = backward.1 - backward.0;
            for bucket in 0..3u64 {
                let from = backward.0 + length * (3 + bucket * 3) / 10;
                row("all_reduce", from, from + length / 4, None);
            }
        }
        row("step", start, at, Some((64 / cards) as u64));
        end = end.max(at);
    }
    end
}

fn summarise_round(
    engine: EngineKind,
    cards: usize,
    size: Size,
    rows: &[StepRow],
    noise: &mut Noise,
) -> Round {
    let measured = || rows.iter().filter(|row| row.step >= size.warmup as u64);
    let step_rows: Vec<&StepRow> = measured().filter(|row| row.phase == "step" && row.card == 0).collect();
    let step_ms: Vec<f64> = step_rows.iter().map(|row| row.duration_ns as f64 / 1e6).collect();
    let wall = step_ms.iter().sum::<f64>() / 1e3;
    let global = if engine == EngineKind::SinglePerCard { 64 / size.cards } else { 64 };
    let per_step = |card: usize, wanted: &dyn Fn(&str) -> bool| {
        let sum: u64 =
            measured().filter(|row| row.card == card && wanted(&row.phase)).map(|row| row.duration_ns).sum();
        sum as f64 / 1e6 / size.steps as f64
    };
    let communication = |name: &str| Phase::ALL.iter().any(|p| p.name() == name && p.is_communication());
    let cards_round = (0..cards).map(|card| {
        let wait = per_step(card, &|name| name == "wait");
        let step = per_step(card, &|name| name == "step");
        let extra = if engine == EngineKind::Dp && card == 0 { 150 << 20 } else { 0 };
        CardRound {
            index: card,
            utilisation_percent_mean: Some(100.0 * (1.0 - wait / step) * (0.97 + 0.01 * noise.next())),
            compute_ms: Some(per_step(card, &|n| n != "step" && n != "wait" && !communication(n))),
            communication_ms: (cards > 1).then(|| per_step(card, &communication)),
            wait_ms: Some(wait),
            memory_peak_bytes: Some((180 << 20) + extra + (noise.next() * 1e6) as i64 as u64 % (1 << 20)),
            energy_source: None,
            memory_used_peak_bytes: None,
            energy_joules: None,
        }
    });
    let exposed = (cards > 1).then(|| per_step(0, &|name| name == "wait"));
    let all = (cards > 1).then(|| per_step(0, &communication));
    Round {
        status: RoundStatus::Ok,
        error: None,
        samples_per_second: Some(global as f64 * size.steps as f64 / wall),
        step_ms: stats::spread("step_ms", &step_ms).unwrap(),
        phases_ms: Phase::ALL
            .into_iter()
            .map(|p| (p, per_step(0, &|n| n == p.name())))
            .filter(|e| e.1 > 0.0)
            .collect(),
        issue_ms: Default::default(),
        losses: (0..size.warmup + size.steps)
            .map(|step| 0.15 + 2.2 * (-(step as f64) / 22.0).exp() * (1.0 + 0.05 * (step as f64 * 0.9).sin()))
            .collect(),
        communication_ms: all,
        gradient_bytes: None,
        exposed_communication_ms: if engine == EngineKind::Dp { all } else { exposed },
        overlap: match engine {
            EngineKind::Dp => Some(0.0),
            EngineKind::Ddp => exposed.zip(all).map(|(exposed, all)| 1.0 - exposed / all),
            _ => None,
        },
        cards: cards_round.collect(),
        joules_per_sample: None,
        link: None,
        weights_digests: vec!["f00d".into(); if engine == EngineKind::Ddp { cards } else { 1 }],
        skipped_steps: 0,
        start_ms: Some(300.0),
    }
}

#[expect(clippy::too_many_arguments, reason = "a fixture's inner loop")]
fn sample(
    engine: EngineKind,
    round: usize,
    cards: usize,
    size: Size,
    start: u64,
    end: u64,
    record: &Round,
    noise: &mut Noise,
    samples: &mut Vec<SampleRow>,
) {
    let period = size.period_ms * 1_000_000;
    for t_ns in (start + period..end + period).step_by(period as usize) {
        for card in 0..cards {
            let busy = record.cards[card].utilisation_percent_mean.unwrap_or(0.0);
            samples.push(SampleRow {
                engine: engine.to_string(),
                round,
                t_ns,
                card,
                uuid: format!("cores:{card}"),
                utilisation_percent: Some((busy + 4.0 * noise.next()).clamp(0.0, 100.0)),
                memory_used_bytes: record.cards[card]
                    .memory_peak_bytes
                    .map(|peak| (peak as f64 * (0.88 + 0.1 * noise.next())) as u64),
                ..SampleRow::default()
            });
        }
    }
}

fn environment(cards: usize) -> Environment {
    Environment {
        links: None,
        fingerprint: "0123456789abcdef".into(),
        cards: (0..cards)
            .map(|index| CardInfo {
                index,
                kind: CardKind::Virtual,
                name: format!("virtual card {index}"),
                uuid: format!("cores:{index}"),
                memory_bytes: None,
                cores: Some(vec![index]),
            })
            .collect(),
        software: Software {
            version: "0.1.0".into(),
            libtorch: Some("2.11.0".into()),
            ..Software::default()
        },
        cpu: Some("AMD EPYC 7B13".into()),
        cores: cards,
        os: Some("Debian GNU/Linux 12".into()),
        visible_devices: None,
    }
}

fn plan(size: Size) -> Plan {
    Plan {
        run: RunPlan {
            devices: None,
            device: DeviceChoice::Cpu,
            cards: size.cards,
            engines: ENGINES.to_vec(),
            rounds: size.rounds,
            warmup: size.warmup,
            steps: size.steps,
            seed: 1,
            threads_per_card: 1,
            precision: Precision::Fp32,
            tf32: false,
            deadline_s: 30.0,
            ab: vec![],
        },
        model: ModelPlan::Mlp { input: 784, hidden: 2048, classes: 10 },
        data: DataPlan { source: DataSource::Mnist10k, shuffle: true, drop_last: true, workers: 1 },
        batch: BatchPlan { global: 64, per_card: 64 / size.cards },
        optimizer: OptimizerPlan::Sgd { lr: 0.05, momentum: 0.9, weight_decay: 0.0 },
        clip_norm: None,
        dp: DpPlan { output_card: 0, chunk_weights: None },
        ddp: DdpPlan {
            bucket_cap_mb: 25.0,
            first_bucket_mb: 1.0,
            overlap: true,
            gradient_as_bucket_view: false,
            find_unused_parameters: false,
            static_graph: false,
            broadcast_buffers: true,
            init_sync: true,
            comm_hook: CommHookPlan::None,
            accumulate: 1,
            join: false,
            sync_batch_norm: false,
        },
        sample: SamplePlan { period_ms: size.period_ms, require_nvml: false },
        inject: None,
    }
}
