//! Settings to plan: defaults, and every rule that needs more than one key.

use super::schema::{self, MAX_CARDS};
use super::settings::{Overrides, Settings};
use super::{
    AbPlan, BatchPlan, CommHookPlan, DataPlan, DataSource, DdpPlan, DeviceChoice, DpPlan, EngineKind,
    InjectPhase, InjectPlan, ModelPlan, OptimizerPlan, Plan, Precision, RunPlan, SamplePlan,
};
use crate::{Error, Result};

/// What the machine suggests where the user said nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Cards to use.
    pub cards: usize,
    /// Cores that virtual cards share.
    pub cores: usize,
}

/// What to do with a global batch that the cards do not divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uneven {
    /// Refuse it: engines are compared on equal shards.
    Refuse,
    /// Some cards get one share, the last ones less.
    Allow,
}

/// Most training steps of one engine in one run: more would not fit a report.
const MOST_STEPS: usize = 1_000_000;
/// Most parameters of a model: 16 GiB of fp32.
const MOST_PARAMETERS: u128 = 1 << 32;
/// Most numbers in a generated data set: 16 GiB of fp32.
const MOST_ELEMENTS: u128 = 1 << 32;

/// Decides everything about a run. `name` is the config's name in messages; `text` is its TOML, which
/// may be empty. Reads no file and no clock: what the machine has comes in as values.
///
/// # Errors
/// `Kind::Usage`, naming the place (file and line, or flag), the key, its value and what is allowed.
pub fn resolve(
    name: &str,
    text: &str,
    overrides: &Overrides,
    machine: Machine,
    uneven: Uneven,
) -> Result<Plan> {
    let settings = Settings::merge(name, text, overrides)?;
    let run = run(&settings, machine)?;
    let data = data(&settings)?;
    let model = model(&settings, &data.source)?;
    let batch = batch(&settings, run.cards, uneven, &data.source)?;
    Ok(Plan {
        optimizer: optimizer(&settings)?,
        clip_norm: settings.number("optimizer.clip_norm"),
        dp: dp(&settings, run.cards)?,
        ddp: ddp(&settings, batch)?,
        sample: SamplePlan {
            period_ms: settings.size("sample.period_ms").map_or(100, |ms| ms as u64),
            require_nvml: settings.switch("sample.require_nvml").unwrap_or(false),
        },
        inject: inject(&settings, run.cards)?,
        run,
        model,
        data,
        batch,
    })
}

fn run(settings: &Settings, machine: Machine) -> Result<RunPlan> {
    let devices: Option<Vec<String>> = settings.parsed("run.devices")?;
    let named = devices.as_ref().map(Vec::len);
    if let (Some(cards), Some(named)) = (settings.size("run.cards"), named)
        && cards != named
    {
        return Err(Error::usage(format!("`run.cards` is {cards}, but `run.devices` names {named}"))
            .hint("give only one of them"));
    }
    let cards = settings.size("run.cards").or(named).unwrap_or(machine.cards).clamp(1, MAX_CARDS as usize);
    let rounds = settings.size("run.rounds").unwrap_or(5);
    let warmup = settings.size("run.warmup").unwrap_or(4);
    let steps = settings.size("run.steps").unwrap_or(16);
    let total = warmup.checked_add(steps).and_then(|round| round.checked_mul(rounds));
    if total.is_none_or(|total| total > MOST_STEPS) {
        return Err(Error::usage(format!(
            "`run.rounds` {rounds} x (`run.warmup` {warmup} + `run.steps` {steps}) is more than {MOST_STEPS} steps"
        ))
        .hint("lower `run.rounds`, `run.warmup` or `run.steps`"));
    }
    let mut engines: Vec<EngineKind> = settings
        .parsed("run.engines")?
        .unwrap_or_else(|| vec![EngineKind::Single, EngineKind::Dp, EngineKind::Ddp]);
    if settings.word("run.peers") == Some("torch") {
        engines = with_peers(&engines);
    }
    let ab: Vec<String> = settings.parsed("run.ab")?.unwrap_or_default();
    if let Some(twice) = (1..ab.len()).find(|&i| ab[..i].contains(&ab[i])) {
        return Err(Error::usage(format!("`run.ab` has \"{}\" twice", ab[twice])).hint("give it once"));
    }
    Ok(RunPlan {
        device: settings.parsed("run.device")?.unwrap_or(DeviceChoice::Auto),
        devices,
        cards,
        ab: ab.iter().map(|set| ab_plan(set, &engines)).collect::<Result<_>>()?,
        engines,
        rounds,
        warmup,
        steps,
        seed: settings.integer("run.seed").unwrap_or(0).unsigned_abs(),
        threads_per_card: settings.size("run.threads_per_card").unwrap_or((machine.cores / cards).max(1)),
        precision: settings.parsed("run.precision")?.unwrap_or(Precision::Fp32),
        tf32: settings.switch("run.tf32").unwrap_or(false),
        deadline_s: settings.number("run.deadline_s").unwrap_or(60.0),
    })
}

/// Each engine followed by PyTorch's of the same kind, so that what is compared runs side by side.
fn with_peers(engines: &[EngineKind]) -> Vec<EngineKind> {
    let mut all = Vec::new();
    for &engine in engines {
        for engine in std::iter::once(engine).chain(engine.peer()) {
            if !all.contains(&engine) {
                all.push(engine);
            }
        }
    }
    all
}

/// Keys outside `ddp` and `dp` that an A/B may change: what they change is how a step is done, not on what.
const AB_KEYS: [&str; 4] = ["run.precision", "run.tf32", "optimizer.clip_norm", "data.workers"];

/// Which of the run's engines these options mean something to. Values are checked when the plan of the
/// row is resolved.
fn ab_plan(set: &str, engines: &[EngineKind]) -> Result<AbPlan> {
    let mut touched = engines.to_vec();
    for pair in set.split_whitespace() {
        let key = pair.split('=').next().unwrap_or_default();
        let fits = |engine: &EngineKind| match key.split_once('.') {
            Some(("ddp", _)) => matches!(engine, EngineKind::Ddp | EngineKind::TorchDdp),
            Some(("dp", _)) => *engine == EngineKind::Dp,
            _ => *engine != EngineKind::SinglePerCard,
        };
        if !key.starts_with("ddp.") && !key.starts_with("dp.") && !AB_KEYS.contains(&key) {
            return Err(Error::usage(format!("`run.ab`: `{key}` cannot be tried beside its other value"))
                .hint(format!("use a key of ddp or dp, or one of {}", AB_KEYS.join(", "))));
        }
        touched.retain(fits);
    }
    if touched.is_empty() {
        return Err(Error::usage(format!("`run.ab`: \"{set}\" means nothing to any engine of the run"))
            .hint("add its engine with --engines, or leave it out"));
    }
    Ok(AbPlan { set: set.split_whitespace().collect::<Vec<_>>().join(" "), engines: touched })
}

fn data(settings: &Settings) -> Result<DataPlan> {
    let fitting = if schema::reads_tokens(settings.word("model.name")) { "tokens" } else { "mnist10k" };
    let name = settings.word("data.name").unwrap_or(fitting);
    settings.check_scope("data", name)?;
    let samples = settings.size("data.samples").unwrap_or(8192);
    let source = match name {
        "digits" => DataSource::Digits,
        "synthetic" => DataSource::Synthetic {
            shape: settings.parsed("data.shape")?.unwrap_or_else(|| vec![1, 28, 28]),
            classes: settings.integer("data.classes").unwrap_or(10),
            samples,
        },
        "tokens" => DataSource::Tokens {
            context: agreed(settings, "data.context", "model.context", 64)?,
            vocabulary: agreed(settings, "data.vocabulary", "model.vocabulary", 512)?,
            samples,
        },
        _ => DataSource::Mnist10k,
    };
    let elements = elements(&source.sample_shape()).saturating_mul(source.samples() as u128);
    if elements > MOST_ELEMENTS {
        return Err(Error::usage(format!(
            "`data.samples` {} of shape {:?} is {elements} numbers, more than {MOST_ELEMENTS}",
            source.samples(),
            source.sample_shape()
        ))
        .hint("lower `data.samples` or the size of a sample"));
    }
    Ok(DataPlan {
        source,
        shuffle: settings.switch("data.shuffle").unwrap_or(true),
        drop_last: settings.switch("data.drop_last").unwrap_or(false),
        workers: settings.size("data.workers").unwrap_or(1),
    })
}

fn model(settings: &Settings, source: &DataSource) -> Result<ModelPlan> {
    let name = settings.word("model.name").unwrap_or("mlp");
    settings.check_scope("model", name)?;
    let shape = source.sample_shape();
    if schema::reads_tokens(Some(name)) != matches!(source, DataSource::Tokens { .. }) {
        let (wanted, flag) =
            if name == "gpt" { ("tokens", "--data tokens") } else { ("images", "--data mnist10k") };
        return Err(Error::usage(format!(
            "model \"{name}\" needs {wanted}, but `data.name` is \"{}\"",
            source.name()
        ))
        .hint(format!("add `{flag}`, or choose another model with --model")));
    }
    let channels = || match shape[..] {
        [channels, _, _] => follows(settings, "model.channels", channels, source),
        _ => Err(Error::usage(format!("model \"{name}\" needs images, but samples have shape {shape:?}"))
            .hint("give `data.shape` as channels, height, width")),
    };
    let classes = || follows(settings, "model.classes", source.classes(), source);
    let model = match name {
        "convnet" => ModelPlan::Convnet {
            channels: channels()?,
            classes: classes()?,
            batch_norm: settings.switch("model.batch_norm").unwrap_or(false),
        },
        "resnet18" => ModelPlan::Resnet18 { channels: channels()?, classes: classes()? },
        "gpt" => gpt(settings, source)?,
        _ => ModelPlan::Mlp {
            input: follows(settings, "model.input", shape.iter().product(), source)?,
            hidden: settings.integer("model.hidden").unwrap_or(2048),
            classes: classes()?,
        },
    };
    if model.parameters() > MOST_PARAMETERS {
        return Err(Error::usage(format!(
            "model \"{name}\" would have {} parameters, more than {MOST_PARAMETERS}",
            model.parameters()
        ))
        .hint("choose smaller dimensions"));
    }
    Ok(model)
}

fn gpt(settings: &Settings, source: &DataSource) -> Result<ModelPlan> {
    let width = settings.integer("model.width").unwrap_or(256);
    let heads = settings.integer("model.heads").unwrap_or(4);
    if width % heads != 0 {
        return Err(Error::usage(format!(
            "`model.width` {width} is not a multiple of `model.heads` {heads}"
        ))
        .hint(format!(
            "use a width of {} or {}",
            (width / heads).max(1) * heads,
            (width / heads + 1) * heads
        )));
    }
    Ok(ModelPlan::Gpt {
        width,
        heads,
        layers: settings.integer("model.layers").unwrap_or(4),
        context: source.sample_shape().iter().product(),
        vocabulary: source.classes(),
    })
}

/// A model dimension that the data decides; saying it in the config is allowed as long as it is true.
fn follows(settings: &Settings, key: &'static str, from_data: i64, source: &DataSource) -> Result<i64> {
    match settings.cite(key) {
        Some(cited) if settings.integer(key) != Some(from_data) => {
            Err(Error::usage(format!("{cited}, but data \"{}\" has {from_data}", source.name()))
                .hint(format!("remove `{key}`: it follows the data")))
        }
        _ => Ok(from_data),
    }
}

/// A size that data and model share and either may give.
fn agreed(settings: &Settings, one: &'static str, other: &'static str, default: i64) -> Result<i64> {
    match (settings.integer(one), settings.integer(other)) {
        (Some(a), Some(b)) if a != b => {
            Err(Error::usage(format!("`{one}` is {a}, but `{other}` is {b}")).hint("give one of them"))
        }
        (a, b) => Ok(a.or(b).unwrap_or(default)),
    }
}

fn batch(settings: &Settings, cards: usize, uneven: Uneven, source: &DataSource) -> Result<BatchPlan> {
    let batch = match (settings.size("batch.global"), settings.size("batch.per_card")) {
        (Some(global), Some(per_card)) => {
            return Err(Error::usage(format!(
                "both `batch.global` ({global}) and `batch.per_card` ({per_card}) are given"
            ))
            .hint("keep one of them; `batch.global` = `batch.per_card` x cards"));
        }
        (Some(global), None) => BatchPlan { global, per_card: global.div_ceil(cards) },
        (None, per_card) => {
            let per_card = per_card.unwrap_or(64);
            BatchPlan { global: per_card * cards, per_card }
        }
    };
    if batch.global % cards != 0 && uneven == Uneven::Refuse {
        let below = batch.global / cards * cards;
        let nearest = match below {
            0 => format!("{cards}"),
            below => format!("{below} or {}", below + cards),
        };
        return Err(Error::usage(format!(
            "`batch.global` {} cannot be divided evenly among {cards} cards",
            batch.global
        ))
        .hint(format!("use --batch {nearest}, or say it for one card with --batch-per-card")));
    }
    if batch.global > source.samples() {
        return Err(Error::usage(format!(
            "a global batch of {} ({} a card x {cards} cards) is more than the {} samples of data \"{}\"",
            batch.global,
            batch.per_card,
            source.samples(),
            source.name()
        ))
        .hint("lower --batch or --batch-per-card, or use fewer cards"));
    }
    Ok(batch)
}

fn optimizer(settings: &Settings) -> Result<OptimizerPlan> {
    let name = settings.word("optimizer.name").unwrap_or("sgd");
    settings.check_scope("optimizer", name)?;
    let weight_decay = settings.number("optimizer.weight_decay").unwrap_or(0.0);
    let lr = settings.number("optimizer.lr");
    Ok(match name {
        "adam" => OptimizerPlan::Adam { lr: lr.unwrap_or(0.001), weight_decay },
        _ => OptimizerPlan::Sgd {
            lr: lr.unwrap_or(0.05),
            momentum: settings.number("optimizer.momentum").unwrap_or(0.9),
            weight_decay,
        },
    })
}

fn dp(settings: &Settings, cards: usize) -> Result<DpPlan> {
    let output_card = settings.size("dp.output_card").unwrap_or(0);
    if output_card >= cards {
        return Err(Error::usage(format!(
            "`dp.output_card` is {output_card}, but the run has {cards} cards"
        ))
        .hint(format!("use 0 to {}", cards - 1)));
    }
    let chunk_weights: Option<Vec<f64>> = settings.parsed("dp.chunk_weights")?;
    if let Some(weights) = chunk_weights.as_ref().filter(|weights| weights.len() != cards) {
        return Err(Error::usage(format!(
            "`dp.chunk_weights` has {} weights, but the run has {cards} cards",
            weights.len()
        ))
        .hint("give one weight a card, as in `--set dp.chunk_weights=1,2` for two"));
    }
    Ok(DpPlan { output_card, chunk_weights })
}

fn ddp(settings: &Settings, batch: BatchPlan) -> Result<DdpPlan> {
    let (rank, start_step) =
        (settings.integer("ddp.powersgd_rank"), settings.size("ddp.powersgd_start_step"));
    let comm_hook = match settings.word("ddp.comm_hook") {
        Some("bf16") => CommHookPlan::Bf16,
        Some("fp16") => CommHookPlan::Fp16,
        Some("powersgd") => CommHookPlan::Powersgd {
            rank: rank.unwrap_or(1),
            start_step: start_step.map_or(2, |step| step as u64),
        },
        _ => CommHookPlan::None,
    };
    if !matches!(comm_hook, CommHookPlan::Powersgd { .. }) && (rank.is_some() || start_step.is_some()) {
        return Err(Error::usage(
            "`ddp.powersgd_rank` and `ddp.powersgd_start_step` need `ddp.comm_hook` powersgd",
        )
        .hint("add `--set ddp.comm_hook=powersgd`, or leave them out"));
    }
    let accumulate = settings.size("ddp.accumulate").unwrap_or(1);
    if accumulate > batch.per_card {
        return Err(Error::usage(format!(
            "`ddp.accumulate` is {accumulate}, but a card has {} samples a step",
            batch.per_card
        ))
        .hint(format!("use 1 to {}", batch.per_card)));
    }
    Ok(DdpPlan {
        bucket_cap_mb: settings.number("ddp.bucket_cap_mb").unwrap_or(25.0),
        first_bucket_mb: settings.number("ddp.first_bucket_mb").unwrap_or(1.0),
        overlap: settings.switch("ddp.overlap").unwrap_or(true),
        gradient_as_bucket_view: settings.switch("ddp.gradient_as_bucket_view").unwrap_or(false),
        find_unused_parameters: settings.switch("ddp.find_unused_parameters").unwrap_or(false),
        static_graph: settings.switch("ddp.static_graph").unwrap_or(false),
        broadcast_buffers: settings.switch("ddp.broadcast_buffers").unwrap_or(true),
        init_sync: settings.switch("ddp.init_sync").unwrap_or(true),
        comm_hook,
        accumulate,
        join: settings.switch("ddp.join").unwrap_or(false),
        sync_batch_norm: settings.switch("ddp.sync_batch_norm").unwrap_or(false),
    })
}

fn inject(settings: &Settings, cards: usize) -> Result<Option<InjectPlan>> {
    let phase: Option<InjectPhase> = settings.parsed("inject.phase")?;
    let (percent, rank) = (settings.number("inject.percent"), settings.size("inject.rank"));
    let (phase, percent) = match (phase, percent) {
        (Some(phase), Some(percent)) => (phase, percent),
        (None, None) if rank.is_none() => return Ok(None),
        _ => {
            return Err(Error::usage("`inject` needs both `inject.phase` and `inject.percent`").hint(
                "as in `--set inject.phase=backward --set inject.percent=20`, or leave out all of `inject`",
            ));
        }
    };
    if let Some(rank) = rank.filter(|rank| *rank >= cards) {
        return Err(Error::usage(format!("`inject.rank` is {rank}, but the run has {cards} cards"))
            .hint(format!("use 0 to {}", cards - 1)));
    }
    Ok(Some(InjectPlan { phase, percent, rank }))
}

fn elements(shape: &[i64]) -> u128 {
    shape.iter().map(|n| u128::from(n.unsigned_abs())).fold(1, u128::saturating_mul)
}

#[cfg(test)]
mod tests {
    use super::super::BUILTIN;
    use super::*;

    const TWO: Machine = Machine { cards: 2, cores: 4 };

    fn with(text: &str, sets: &[&str]) -> Result<Plan> {
        let mut overrides = Overrides::default();
        for pair in sets {
            overrides.set(pair)?;
        }
        resolve("c.toml", text, &overrides, TWO, Uneven::Refuse)
    }

    /// The whole text a user would see, hint included.
    fn refusal(text: &str, sets: &[&str]) -> String {
        let error = with(text, sets).expect_err("this must be refused");
        assert_eq!(error.kind(), crate::error::Kind::Usage);
        format!("{error} | {}", error.advice().expect("every refusal has a hint"))
    }

    #[test]
    fn an_empty_config_is_the_documented_default() {
        let quick = crate::config::builtin("quick").expect("quick is built in");
        assert_eq!(with("", &[]).unwrap(), with(quick, &[]).unwrap());
    }

    #[test]
    fn defaults_follow_the_machine() {
        let plan = with("", &[]).unwrap();
        assert_eq!((plan.run.cards, plan.run.threads_per_card), (2, 2));
        assert_eq!(plan.batch, BatchPlan { global: 128, per_card: 64 });
        // More cards than cores still get a thread each.
        assert_eq!(with("", &["run.cards=8"]).unwrap().run.threads_per_card, 1);
    }

    #[test]
    fn quick_explains_every_key() {
        let quick = crate::config::builtin("quick").expect("quick is built in");
        let mut section = "";
        let mut explained = Vec::new();
        for line in quick.lines().map(|line| line.trim_start_matches("# ")) {
            if let Some(name) = line.strip_prefix('[') {
                section = name.split(']').next().unwrap();
            } else if let Some((key, value)) = line.split_once(" = ") {
                assert!(value.contains('#'), "{section}.{key} has no explanation");
                explained.push(format!("{section}.{key}"));
            }
        }
        for key in schema::KEYS {
            assert!(explained.iter().any(|name| name == key.name), "{} is not in quick.toml", key.name);
        }
    }

    #[test]
    fn the_folder_and_the_built_in_list_agree_and_resolve() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        files.sort();
        let names: Vec<&str> = BUILTIN.iter().map(|(name, _)| *name).collect();
        assert_eq!(files, names);
        for (name, text) in BUILTIN {
            for cards in [1, 2, 4] {
                let machine = Machine { cards, cores: 4 };
                resolve(name, text, &Overrides::default(), machine, Uneven::Refuse).unwrap();
            }
        }
    }

    #[test]
    fn every_key_changes_the_plan() {
        // What has to be chosen first for the key to mean something, and a value that is not the default.
        let cases: &[(&[&str], &str)] = &[
            (&[], "run.device=cpu"),
            (&[], "run.cards=4"),
            (&[], "sample.require_nvml=true"),
            (&[], "run.devices=1,GPU-8932"),
            (&[], "run.engines=ddp"),
            (&[], "run.rounds=2"),
            (&[], "run.warmup=0"),
            (&[], "run.steps=3"),
            (&[], "run.seed=7"),
            (&[], "run.threads_per_card=3"),
            (&[], "run.deadline_s=5"),
            (&[], "model.name=convnet"),
            (&[], "model.hidden=64"),
            (&["model.name=convnet"], "model.batch_norm=true"),
            (&["model.name=gpt", "data.name=tokens"], "model.width=64"),
            (&["model.name=gpt", "data.name=tokens"], "model.heads=8"),
            (&["model.name=gpt", "data.name=tokens"], "model.layers=2"),
            (&["model.name=gpt", "data.name=tokens"], "model.context=32"),
            (&["model.name=gpt", "data.name=tokens"], "model.vocabulary=99"),
            (&[], "data.name=digits"),
            (&[], "data.shuffle=false"),
            (&[], "data.drop_last=true"),
            (&[], "data.workers=0"),
            (&["data.name=synthetic"], "data.shape=3,8,8"),
            (&["data.name=synthetic"], "data.classes=5"),
            (&["data.name=synthetic"], "data.samples=1000"),
            (&["model.name=gpt", "data.name=tokens"], "data.context=32"),
            (&["model.name=gpt", "data.name=tokens"], "data.vocabulary=99"),
            (&[], "batch.global=64"),
            (&[], "batch.per_card=32"),
            (&[], "optimizer.name=adam"),
            (&[], "optimizer.lr=1"),
            (&[], "optimizer.momentum=0"),
            (&[], "optimizer.weight_decay=0.1"),
            (&[], "ddp.bucket_cap_mb=1"),
            (&[], "ddp.first_bucket_mb=0.5"),
            (&[], "ddp.overlap=false"),
            (&[], "ddp.gradient_as_bucket_view=true"),
            (&[], "ddp.find_unused_parameters=true"),
            (&[], "ddp.static_graph=true"),
            (&[], "ddp.broadcast_buffers=false"),
            (&[], "ddp.init_sync=false"),
            (&[], "ddp.comm_hook=bf16"),
            (&["ddp.comm_hook=powersgd"], "ddp.powersgd_rank=3"),
            (&["ddp.comm_hook=powersgd"], "ddp.powersgd_start_step=5"),
            (&[], "ddp.accumulate=2"),
            (&[], "ddp.join=true"),
            (&[], "ddp.sync_batch_norm=true"),
            (&[], "run.precision=bf16"),
            (&[], "run.tf32=true"),
            (&[], "run.ab=ddp.overlap=false"),
            (&[], "run.peers=torch"),
            (&[], "optimizer.clip_norm=1"),
            (&[], "dp.output_card=1"),
            (&[], "dp.chunk_weights=1,2"),
            (&[], "sample.period_ms=50"),
            (&["inject.percent=5"], "inject.phase=forward"),
            (&["inject.phase=forward"], "inject.percent=5"),
            (&["inject.phase=forward", "inject.percent=5"], "inject.rank=1"),
        ];
        for (first, pair) in cases {
            let plain = with("", first).ok();
            let set = with("", &[first, &[*pair][..]].concat()).unwrap();
            assert_ne!(plain, Some(set), "{pair}");
        }
        // These have one value, or repeat what the data says: they can only be refused.
        let fixed = ["model.input", "model.classes", "model.channels"].map(str::to_owned);
        let tried = cases.iter().map(|(_, pair)| pair.split('=').next().unwrap().to_owned()).chain(fixed);
        let mut tried: Vec<String> = tried.collect();
        tried.sort();
        let mut known: Vec<&str> = schema::KEYS.iter().map(|key| key.name).collect();
        known.sort_unstable();
        assert_eq!(tried, known);
    }

    #[test]
    fn unknown_keys_are_named_with_their_line_and_the_nearest_key() {
        assert_eq!(
            refusal("[run]\nseed = 1\nrouns = 3\n", &[]),
            "c.toml:3: unknown key `run.rouns` | did you mean `run.rounds`?"
        );
        assert_eq!(
            refusal("[modle]\nname = \"mlp\"", &[]),
            "c.toml:2: unknown key `modle.name` | did you mean `model.name`?"
        );
        assert_eq!(refusal("cards = 2", &[]), "c.toml:1: unknown key `cards` | did you mean `run.cards`?");
        assert_eq!(refusal("", &["lr=1"]), "--set: unknown key `lr` | did you mean `optimizer.lr`?");
        assert!(refusal("run = 3", &[]).contains("write `[run]`"));
        assert!(refusal("[nonsense]", &[]).starts_with("c.toml:1: unknown key `nonsense`"));
        assert!(refusal("[run.cards]\nx = 1", &[]).starts_with("c.toml:1: `run.cards` is"));
        assert!(refusal("", &["run.cards.x=1"]).contains("unknown key `run.cards.x`"));
    }

    #[test]
    fn values_out_of_range_or_of_the_wrong_type_are_refused() {
        assert_eq!(
            refusal("[run]\n\ncards = -1", &[]),
            "c.toml:3: `run.cards` is -1, but must be an integer from 1 to 1024 | \
             change line 3 of c.toml, or override it with `--set run.cards=VALUE`"
        );
        for pair in [
            "run.cards=0",
            "run.devices=-1",
            "run.devices=0,-1",
            "run.devices=0,0",
            "run.devices=",
            "run.devices=1024",
            "run.devices=one",
            "run.devices=GPU-",
            "run.cards=1025",
            "run.cards=2.0",
            "run.cards=two",
            "run.cards=",
            "run.cards=true",
            "run.cards=99999999999999999999",
            "run.engines=",
            "run.engines=[]",
            "run.engines=dp,dp",
            "run.engines=ddq",
            "run.steps=0",
            "run.rounds=-5",
            "run.seed=-1",
            "run.deadline_s=0",
            "run.deadline_s=inf",
            "run.precision=fp8",
            "run.ab=overlap",
            "optimizer.clip_norm=0",
            "dp.chunk_weights=1,0",
            "ddp.comm_hook=fp8",
            "ddp.powersgd_start_step=1",
            "ddp.accumulate=0",
            "run.device=gpu",
            "model.hidden=0",
            "model.hidden=99999999",
            "model.name=vgg",
            "data.shuffle=1",
            "data.shuffle=yes",
            "data.workers=-1",
            "batch.global=0",
            "batch.per_card=-64",
            "batch.per_card=1e3",
            "optimizer.lr=0",
            "optimizer.lr=-0.1",
            "optimizer.lr=nan",
            "optimizer.lr=inf",
            "optimizer.lr=fast",
            "optimizer.momentum=1",
            "optimizer.momentum=-0.1",
            "optimizer.weight_decay=-1",
            "optimizer.weight_decay=nan",
            "dp.output_card=-1",
            "ddp.bucket_cap_mb=0",
            "ddp.first_bucket_mb=-1",
            "sample.period_ms=0",
            "inject.percent=0",
            "inject.rank=-1",
            "inject.phase=wait",
            "run.seed=1979-05-27",
        ] {
            let key = pair.split('=').next().unwrap();
            let text = refusal("", &[pair]);
            assert!(text.starts_with(&format!("--set: `{key}` is ")) && text.contains("must be"), "{text}");
        }
        assert!(refusal("", &["model.name=convent"]).ends_with("did you mean `convnet`?"));
        assert!(refusal("", &["data.name=synthetic", "data.shape=[3,0,3]"]).contains("`data.shape`"));
    }

    #[test]
    fn broken_toml_is_named_by_its_line() {
        assert!(refusal("[run]\ncards = \n", &[]).starts_with("c.toml:2: not valid TOML"));
        assert!(refusal("[run]\nseed = 1\nseed = 2\n", &[]).starts_with("c.toml:3: not valid TOML"));
        assert!(refusal("[run]\nseed = 99999999999999999999\n", &[]).starts_with("c.toml:2: not valid TOML"));
        assert!(refusal("", &["run.cards"]).contains("no `=`"));
    }

    #[test]
    fn products_that_would_be_enormous_are_refused() {
        assert!(refusal("", &["run.rounds=1000", "run.steps=1000000"]).contains("more than 1000000 steps"));
        assert!(refusal("", &["model.hidden=65536", "run.cards=1"]).contains("parameters, more than"));
        let wide = ["data.name=synthetic", "data.shape=65536,65536,65536,65536", "data.samples=1073741824"];
        assert!(refusal("", &wide).contains("`data.samples`"));
        assert!(
            refusal("", &["batch.per_card=16777216", "run.cards=1024"])
                .contains("more than the 9000 samples")
        );
    }

    #[test]
    fn the_command_line_overrides_the_file() {
        let file = "[model]\nname = \"mlp\"\nhidden = 64\n[batch]\nglobal = 32\n[optimizer]\nmomentum = 0.5";
        assert_eq!(with(file, &["batch.per_card=8"]).unwrap().batch, BatchPlan { global: 16, per_card: 8 });
        // What the file said about its own model and optimiser does not follow to another one.
        let other = with(file, &["model.name=convnet", "optimizer.name=adam"]).unwrap();
        assert_eq!(other.model, ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: false });
        assert_eq!(other.optimizer, OptimizerPlan::Adam { lr: 0.001, weight_decay: 0.0 });
        assert_eq!(with(file, &["model.name=mlp"]).unwrap().model, with(file, &[]).unwrap().model);
    }

    #[test]
    fn data_that_the_command_line_leaves_open_follow_its_model() {
        let images = "[model]\nname = \"mlp\"\n[data]\nname = \"synthetic\"\nshape = [1, 4, 4]\nworkers = 3";
        let plan = with(images, &["model.name=gpt"]).unwrap();
        assert_eq!((plan.data.source.name(), plan.data.workers), ("tokens", 3));
        let tokens = "[model]\nname = \"gpt\"\n[data]\nname = \"tokens\"";
        assert_eq!(with(tokens, &["model.name=mlp"]).unwrap().data.source, DataSource::Mnist10k);
        assert_eq!(with(images, &["model.name=convnet"]).unwrap().data.source.name(), "synthetic");
        assert!(refusal(images, &["model.name=gpt", "data.name=digits"]).contains("add `--data tokens`"));
        assert!(refusal("[model]\nname = \"gpt\"\n[data]\nname = \"digits\"", &[]).contains("needs tokens"));
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(refusal("", &["dp.output_card=2"]).contains("has 2 cards | use 0 to 1"));
        assert!(refusal("", &["dp.chunk_weights=1,2,3"]).contains("has 3 weights"));
        assert!(refusal("", &["ddp.powersgd_rank=2"]).contains("need `ddp.comm_hook` powersgd"));
        assert!(refusal("", &["ddp.accumulate=65"]).contains("a card has 64 samples a step"));
        assert!(
            refusal("[run]\nab = [\"ddp.overlap=false\", \"ddp.overlap=false\"]", &[])
                .contains("twice | give it once")
        );
        assert!(refusal("", &["run.ab=run.seed=3"]).contains("`run.seed` cannot be tried"));
        assert!(
            refusal("", &["run.engines=dp", "run.ab=ddp.overlap=false"])
                .contains("means nothing to any engine")
        );
        assert!(refusal("", &["batch.global=64", "batch.per_card=32"]).contains("both `batch.global` (64)"));
        assert!(refusal("", &["run.cards=2", "run.cards=3"]).contains("set twice"));
        assert!(
            refusal("[model]\nname = \"gpt\"\nhidden = 3", &[])
                .starts_with("c.toml:3: `model.hidden` means nothing")
        );
        assert!(refusal("", &["optimizer.name=adam", "optimizer.momentum=0.9"]).contains("belongs to sgd"));
        assert!(refusal("", &["data.shape=3,4,4"]).contains("means nothing to data \"mnist10k\""));
        assert!(refusal("", &["inject.percent=5"]).contains("needs both"));
        assert!(refusal("", &["inject.rank=0"]).contains("needs both"));
        assert!(
            refusal("", &["inject.percent=5", "inject.phase=update", "inject.rank=2"])
                .contains("has 2 cards")
        );
    }

    #[test]
    fn a_flag_is_named_as_it_was_typed() {
        let mut overrides = Overrides::default();
        overrides.flag("--cards", "run.cards", Some(0)).flag("--model", "model.name", None::<String>);
        let error = resolve("c.toml", "", &overrides, TWO, Uneven::Refuse).unwrap_err();
        assert_eq!(error.to_string(), "--cards: `run.cards` is 0, but must be an integer from 1 to 1024");
        assert_eq!(error.advice(), Some("pass another value with --cards"));
    }

    #[test]
    fn model_dimensions_follow_the_data() {
        assert_eq!(
            with("", &["data.name=digits", "batch.per_card=8"]).unwrap().model,
            ModelPlan::Mlp { input: 64, hidden: 2048, classes: 10 }
        );
        let images = ["model.name=convnet", "data.name=synthetic", "data.shape=3,32,32", "data.classes=7"];
        assert_eq!(
            with("", &images).unwrap().model,
            ModelPlan::Convnet { channels: 3, classes: 7, batch_norm: false }
        );
        let text = "[model]\ninput = 784\n";
        assert!(with(text, &[]).is_ok());
        assert_eq!(
            refusal(text, &["data.name=digits"]),
            "c.toml:2: `model.input` is 784, but data \"digits\" has 64 | remove `model.input`: it follows the data"
        );
        assert!(
            refusal("", &["model.name=convnet", "data.name=synthetic", "data.shape=12"])
                .contains("needs images")
        );
        assert!(refusal("", &["data.name=tokens"]).contains("needs images, but `data.name` is \"tokens\""));
        let gpt = ["model.name=gpt", "data.name=tokens", "model.context=32", "data.context=16"];
        assert!(refusal("", &gpt).contains("`data.context` is 16, but `model.context` is 32"));
        assert!(refusal("", &["model.name=gpt", "data.name=tokens", "model.heads=3"]).contains("255 or 258"));
    }

    #[test]
    fn a_batch_that_cards_do_not_divide_is_refused_with_the_two_nearest() {
        let text = refusal("", &["run.cards=4", "batch.global=10"]);
        assert!(text.contains("10 cannot be divided evenly among 4 cards | use --batch 8 or 12"), "{text}");
        assert!(refusal("", &["run.cards=4", "batch.global=3"]).contains("use --batch 4,"));
        let mut overrides = Overrides::default();
        overrides.set("run.cards=4").unwrap().set("batch.global=10").unwrap();
        let plan = resolve("c.toml", "", &overrides, TWO, Uneven::Allow).unwrap();
        assert_eq!(plan.batch, BatchPlan { global: 10, per_card: 3 });
    }

    #[test]
    fn a_batch_larger_than_the_data_is_refused() {
        assert!(with("", &["data.name=digits", "batch.per_card=809"]).is_ok());
        assert!(
            refusal("", &["data.name=digits", "batch.per_card=810"]).contains("1620 (810 a card x 2 cards)")
        );
    }

    #[test]
    fn parameters_are_counted_as_pytorch_counts_them() {
        let mlp = ModelPlan::Mlp { input: 784, hidden: 2048, classes: 10 };
        assert_eq!(mlp.parameters(), 785 * 2048 + 2049 * 2048 + 2049 * 10);
        assert_eq!(ModelPlan::Resnet18 { channels: 3, classes: 10 }.parameters(), 11_173_962);
        // 288+32, 18432+64, 73728+128, 1280+10; then weight and bias of three norms.
        let convnet = |batch_norm| ModelPlan::Convnet { channels: 1, classes: 10, batch_norm };
        assert_eq!((convnet(false).parameters(), convnet(true).parameters()), (93_962, 94_410));
        // GPT-2 small, whose size is well known, but for its own context and vocabulary: 124,439,808.
        let gpt2 = ModelPlan::Gpt { width: 768, heads: 12, layers: 12, context: 1024, vocabulary: 50_257 };
        assert_eq!(gpt2.parameters(), 124_439_808);
    }

    #[test]
    fn a_plan_survives_its_file() {
        for (name, text) in BUILTIN {
            let plan = resolve(name, text, &Overrides::default(), TWO, Uneven::Refuse).unwrap();
            let json = serde_json::to_string(&plan).unwrap();
            assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
        }
    }
}
