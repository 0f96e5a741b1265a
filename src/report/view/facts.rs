//! What was run on what, in words.

use crate::config::{DataSource, ModelPlan, OptimizerPlan, Precision};
use crate::metrics::record::{CardKind, Results};
use crate::report::text::{count, number};
use crate::units::bytes;
use serde::Serialize;

/// A line of the "what was run" list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(in crate::report) struct Fact {
    pub(in crate::report) name: &'static str,
    pub(in crate::report) value: String,
}

/// Names the run.
pub(super) fn title(results: &Results) -> String {
    let plan = &results.plan;
    format!("{} on {}, {}", plan.model.name(), plan.data.source.name(), cards_in_words(results))
}

fn cards_in_words(results: &Results) -> String {
    let n = results.plan.run.cards;
    match results.environment.cards.first().map(|card| card.kind) {
        Some(CardKind::Virtual) => count(n, "virtual card"),
        Some(CardKind::Cuda) => count(n, "GPU"),
        None => count(n, "card"),
    }
}

/// Plan, machine and method; `readings` is the number of rows the sampler left.
pub(super) fn facts(results: &Results, readings: usize) -> Vec<Fact> {
    let (plan, environment) = (&results.plan, &results.environment);
    let mut facts = vec![
        Fact { name: "Model", value: model(&plan.model) },
        Fact { name: "Data", value: data(results) },
        Fact {
            name: "Batch",
            value: format!("{} global, {} per card", plan.batch.global, plan.batch.per_card),
        },
        Fact { name: "Optimizer", value: optimizer(&plan.optimizer) },
        Fact {
            name: "Rounds",
            value: format!(
                "{} of each engine in alternation, fresh processes each; {} warm-up and {} measured steps",
                plan.run.rounds, plan.run.warmup, plan.run.steps
            ),
        },
        Fact {
            name: "Numbers",
            value: format!(
                "{}, seed {}",
                match plan.run.precision {
                    Precision::Fp32 => "32-bit floats",
                    Precision::Bf16 => "32-bit floats, bfloat16 autocast",
                    Precision::Fp16 => "32-bit floats, float16 autocast with a scaled loss",
                },
                plan.run.seed
            ),
        },
        Fact { name: "DDP", value: ddp(results) },
        Fact { name: "Links", value: links(results) },
        Fact { name: "Cards", value: environment.cards.iter().map(card).collect::<Vec<_>>().join("; ") },
        Fact { name: "Machine", value: machine(results) },
        Fact { name: "Software", value: software(results) },
        Fact { name: "Sampling", value: sampling(results, readings) },
        Fact {
            name: "Monitoring",
            value: results.monitoring.as_ref().map(super::monitoring::in_short).unwrap_or_default(),
        },
        Fact {
            name: "When",
            value: match &results.finished_at {
                Some(end) => format!("{} to {end}", results.started_at),
                None => format!("{}, not finished", results.started_at),
            },
        },
        Fact { name: "Command", value: results.argv.join(" ") },
    ];
    if let Some(inject) = &plan.inject {
        facts.push(Fact {
            name: "Slowed down",
            value: format!("{:?} by {} %", inject.phase, number(inject.percent)),
        });
    }
    facts.retain(|fact| !fact.value.is_empty());
    facts
}

fn model(model: &ModelPlan) -> String {
    match model {
        ModelPlan::Mlp { input, hidden, classes } => format!("mlp, {input}-{hidden}-{hidden}-{classes}"),
        ModelPlan::Convnet { channels, classes, batch_norm } => format!(
            "convnet {} BatchNorm, {channels} channels in, {classes} classes",
            if *batch_norm { "with" } else { "without" }
        ),
        ModelPlan::Resnet18 { channels, classes } => {
            format!("resnet18 (32x32 stem), {channels} channels in, {classes} classes")
        }
        ModelPlan::Gpt { width, heads, layers, context, vocabulary } => format!(
            "gpt, width {width}, {heads} heads, {layers} layers, context {context}, vocabulary {vocabulary}"
        ),
    }
}

fn data(results: &Results) -> String {
    let data = &results.plan.data;
    let order = if data.shuffle { "shuffled every epoch" } else { "in file order" };
    let loading =
        if data.workers == 0 { "loaded in line".to_owned() } else { count(data.workers, "loader thread") };
    let shape = match &data.source {
        DataSource::Synthetic { shape, classes, samples } => {
            format!(" {shape:?}, {classes} classes, {}", count(*samples, "sample"))
        }
        DataSource::Tokens { samples, .. } => format!(", {}", count(*samples, "sequence")),
        DataSource::Digits | DataSource::Mnist10k => String::new(),
    };
    format!("{}{shape}, {order}, {loading}", data.source.name())
}

fn optimizer(optimizer: &OptimizerPlan) -> String {
    match optimizer {
        OptimizerPlan::Sgd { lr, momentum, weight_decay } => {
            format!("SGD, rate {lr}, momentum {momentum}, weight decay {weight_decay}")
        }
        OptimizerPlan::Adam { lr, weight_decay } => format!("Adam, rate {lr}, weight decay {weight_decay}"),
    }
}

fn ddp(results: &Results) -> String {
    let ddp = &results.plan.ddp;
    format!(
        "buckets up to {} MiB, the first {} MiB; {}",
        ddp.bucket_cap_mb,
        ddp.first_bucket_mb,
        if ddp.overlap { "all-reduce while backward runs" } else { "all-reduce after backward" }
    )
}

/// How each engine's weights and gradients travelled, where it is not always the same: between CUDA cards.
fn links(results: &Results) -> String {
    let travelled = results.engines.iter().filter_map(|(name, record)| {
        let link = record.rounds.iter().find_map(|round| round.link.as_deref())?;
        let how = match link {
            "nccl" => "through NCCL",
            "peer" => "by copies from card to card",
            _ => return None,
        };
        Some(format!("{} {how}", crate::report::text::engine(name)))
    });
    travelled.collect::<Vec<_>>().join(", ")
}

fn sampling(results: &Results, readings: usize) -> String {
    let period = results.sampling.map_or(results.plan.sample.period_ms, |sampling| sampling.period_ms);
    let meaning = match results.environment.cards.first().map(|card| card.kind) {
        Some(CardKind::Cuda) => "by NVML",
        _ => "a reading is the mean since the one before",
    };
    let mut parts = vec![format!("a reading of each card every {period} ms, {readings} in all; {meaning}")];
    if let Some(sampling) = &results.sampling {
        parts.push(format!("{} too late and {} impossible, left out", sampling.missed, sampling.rejected));
        parts.extend(sampling.cpu_percent.map(|cost| format!("cost {} % of a core", number(cost))));
    }
    parts.join("; ")
}

fn card(card: &crate::metrics::record::CardInfo) -> String {
    let memory = card.memory_bytes.map(|b| format!(", {}", bytes(b))).unwrap_or_default();
    format!("{}: {}, {}{memory}", card.index, card.name, card.uuid)
}

fn machine(results: &Results) -> String {
    let environment = &results.environment;
    let cpu = environment.cpu.as_deref().unwrap_or("unknown CPU");
    let os = environment.os.as_deref().map(|os| format!(", {os}")).unwrap_or_default();
    format!("{cpu}, {}{os}", count(environment.cores, "core"))
}

fn software(results: &Results) -> String {
    let software = &results.environment.software;
    let versions = [
        ("libtorch", &software.libtorch),
        ("NCCL", &software.nccl),
        ("driver", &software.driver),
        ("CUDA", &software.cuda),
    ];
    let mut parts = vec![format!("dp-vs-ddp {}", software.version)];
    parts.extend(versions.iter().filter_map(|(name, v)| v.as_ref().map(|v| format!("{name} {v}"))));
    parts.join(", ")
}
