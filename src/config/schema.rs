//! The keys a config may hold: one table that says what each key may be.
//!
//! A key is listed here only if it changes what a run does. Rules that need two keys are in
//! [`super::resolve()`]; what each key is for is explained in `configs/quick.toml`.

use toml::Value;

/// One key of a config.
#[derive(Debug)]
pub(super) struct Key {
    /// Dotted, as `--set` takes it.
    pub(super) name: &'static str,
    /// What it may be.
    pub(super) kind: Kind,
    /// The `name`s of its section that it belongs to: `model.hidden` means nothing to a convnet. Empty: all.
    pub(super) only: &'static [&'static str],
}

/// What a value may be.
#[derive(Debug)]
pub(super) enum Kind {
    /// A whole number in a range, both ends allowed.
    Integer(i64, i64),
    /// A number that fits; the text says which do.
    Number(&'static str, fn(f64) -> bool),
    /// `true` or `false`.
    Switch,
    /// One of these words.
    Word(&'static [&'static str]),
    /// Some of these words, at least one, none twice: a list, or one string with commas.
    Words(&'static [&'static str]),
    /// One to four sizes of at least 1: a list, or one string with commas.
    Shape,
    /// Numbers above 0, at least one: a list, or one string with commas.
    Weights,
    /// Texts, each some `key=value` with blanks between: a list, or a single one.
    Pairs,
    /// CUDA cards by number or UUID, at least one, no number twice: a list, or one string with commas.
    Devices,
}

/// Largest extent of one dimension of a sample.
const LONGEST: i64 = 1 << 16;

impl Kind {
    /// The value in its one normal form, or `None` where it is not allowed.
    pub(super) fn read(&self, value: &Value) -> Option<Value> {
        match (self, value) {
            (Self::Integer(min, max), Value::Integer(n)) => (min..=max).contains(&n).then(|| value.clone()),
            (Self::Number(_, fits), Value::Float(x)) => (x.is_finite() && fits(*x)).then(|| value.clone()),
            (Self::Number(..), Value::Integer(n)) => self.read(&Value::Float(*n as f64)),
            (Self::Switch, Value::Boolean(_)) => Some(value.clone()),
            (Self::Word(words), Value::String(word)) => words.contains(&word.as_str()).then(|| value.clone()),
            (Self::Words(words), Value::Array(list)) => {
                let known = list.iter().all(|word| word.as_str().is_some_and(|word| words.contains(&word)));
                let distinct = (1..list.len()).all(|i| !list[..i].contains(&list[i]));
                (known && distinct && !list.is_empty()).then(|| value.clone())
            }
            (Self::Words(_), Value::String(list)) => {
                self.read(&Value::Array(list.split(',').map(|word| Value::from(word.trim())).collect()))
            }
            (Self::Shape, Value::Array(sizes)) => {
                let sane = sizes.iter().all(|n| n.as_integer().is_some_and(|n| (1..=LONGEST).contains(&n)));
                (sane && (1..=4).contains(&sizes.len())).then(|| value.clone())
            }
            (Self::Shape, Value::Integer(_)) => self.read(&Value::Array(vec![value.clone()])),
            (Self::Shape, Value::String(list)) => {
                let sizes: Result<Vec<i64>, _> = list.split(',').map(|n| n.trim().parse()).collect();
                self.read(&Value::Array(sizes.ok()?.into_iter().map(Value::Integer).collect()))
            }
            (Self::Weights, Value::Array(list)) => {
                let read = |value: &Value| POSITIVE.read(value);
                let list: Option<Vec<Value>> = list.iter().map(read).collect();
                list.filter(|list| !list.is_empty()).map(Value::Array)
            }
            (Self::Weights, Value::Integer(_) | Value::Float(_)) => {
                self.read(&Value::Array(vec![value.clone()]))
            }
            (Self::Weights, Value::String(list)) => {
                let numbers: Result<Vec<f64>, _> = list.split(',').map(|n| n.trim().parse()).collect();
                self.read(&Value::Array(numbers.ok()?.into_iter().map(Value::Float).collect()))
            }
            (Self::Pairs, Value::Array(list)) => list
                .iter()
                .all(|text| text.as_str().is_some_and(|text| text.contains('=')))
                .then(|| value.clone()),
            (Self::Pairs, Value::String(_)) => self.read(&Value::Array(vec![value.clone()])),
            (Self::Devices, Value::Array(list)) => {
                let names: Vec<String> = list.iter().map(device).collect::<Option<_>>()?;
                // A card may be asked for twice, but by its name: a number twice is a slip of the hand.
                let numbers: Vec<&String> = names.iter().filter(|name| is_number(name)).collect();
                let distinct = (1..numbers.len()).all(|i| !numbers[..i].contains(&numbers[i]));
                (distinct && !names.is_empty())
                    .then(|| Value::Array(names.into_iter().map(Value::String).collect()))
            }
            (Self::Devices, Value::Integer(_)) => self.read(&Value::Array(vec![value.clone()])),
            (Self::Devices, Value::String(list)) => {
                self.read(&Value::Array(list.split(',').map(|name| Value::from(name.trim())).collect()))
            }
            _ => None,
        }
    }

    /// What is allowed, to complete "must be ...".
    pub(super) fn allowed(&self) -> String {
        match self {
            Self::Integer(min, max) => format!("an integer from {min} to {max}"),
            Self::Number(allowed, _) => format!("a number {allowed}"),
            Self::Switch => "true or false".to_owned(),
            Self::Word([word]) => format!("\"{word}\""),
            Self::Word(words) => format!("one of {}", words.join(", ")),
            Self::Words(words) => {
                format!("a list of {}, each at most once and at least one", words.join(", "))
            }
            Self::Shape => format!("one to four integers from 1 to {LONGEST}"),
            Self::Weights => "a list of numbers above 0, one a card".to_owned(),
            Self::Pairs => "a list of texts such as \"ddp.overlap=false\"".to_owned(),
            Self::Devices => {
                format!(
                    "a list of CUDA card numbers from 0 to {}, none twice, or UUIDs (GPU-..., MIG-...)",
                    MAX_CARDS - 1
                )
            }
        }
    }

    /// The words it chooses from, if it does.
    pub(super) fn words(&self) -> &'static [&'static str] {
        match self {
            Self::Word(words) | Self::Words(words) => words,
            _ => &[],
        }
    }
}

/// A card's number or UUID as text.
fn device(value: &Value) -> Option<String> {
    let name = match value {
        Value::Integer(number) => number.to_string(),
        Value::String(name) => name.clone(),
        _ => return None,
    };
    let named = ["GPU-", "MIG-"].iter().any(|kind| name.starts_with(kind) && name.len() > kind.len());
    (named || is_number(&name)).then_some(name)
}

fn is_number(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_digit()) && name.parse().is_ok_and(|number: i64| number < MAX_CARDS)
}

const fn key(name: &'static str, kind: Kind) -> Key {
    Key { name, kind, only: &[] }
}

const fn only(only: &'static [&'static str], name: &'static str, kind: Kind) -> Key {
    Key { name, kind, only }
}

const POSITIVE: Kind = Kind::Number("above 0, at most 1e9", |x| x > 0.0 && x <= 1e9);
const POSITIVE_MIB: Kind = Kind::Number("above 0, at most 65536 (MiB)", |x| x > 0.0 && x <= 65536.0);

/// Whether a model (by name) reads token sequences; the others read numbers, and nothing reads both.
pub(super) fn reads_tokens(model: Option<&str>) -> bool {
    model == Some("gpt")
}

/// Most cards of one run.
pub(super) const MAX_CARDS: i64 = 1024;

/// Every engine, by name.
const ENGINES: &[&str] = &["single", "single_per_card", "dp", "ddp", "torch_single", "torch_dp", "torch_ddp"];

/// Every key.
pub(super) const KEYS: &[Key] = &[
    key("run.device", Kind::Word(&["auto", "cpu", "cuda"])),
    key("run.cards", Kind::Integer(1, MAX_CARDS)),
    key("run.devices", Kind::Devices),
    key("run.engines", Kind::Words(ENGINES)),
    key("run.rounds", Kind::Integer(1, 1000)),
    key("run.warmup", Kind::Integer(0, 100_000)),
    key("run.steps", Kind::Integer(1, 1_000_000)),
    key("run.seed", Kind::Integer(0, i64::MAX)),
    key("run.threads_per_card", Kind::Integer(1, 1024)),
    key("run.precision", Kind::Word(&["fp32", "bf16", "fp16"])),
    key("run.tf32", Kind::Switch),
    key("run.ab", Kind::Pairs),
    key("run.peers", Kind::Word(&["none", "torch"])),
    key("run.deadline_s", Kind::Number("above 0, at most 86400 (seconds)", |x| x > 0.0 && x <= 86_400.0)),
    key("model.name", Kind::Word(&["mlp", "convnet", "resnet18", "gpt"])),
    only(&["mlp"], "model.input", Kind::Integer(1, 1 << 24)),
    only(&["mlp"], "model.hidden", Kind::Integer(1, 1 << 16)),
    only(&["mlp", "convnet", "resnet18"], "model.classes", Kind::Integer(2, 1 << 20)),
    only(&["convnet", "resnet18"], "model.channels", Kind::Integer(1, 1 << 10)),
    only(&["convnet"], "model.batch_norm", Kind::Switch),
    only(&["gpt"], "model.width", Kind::Integer(1, 1 << 14)),
    only(&["gpt"], "model.heads", Kind::Integer(1, 1 << 10)),
    only(&["gpt"], "model.layers", Kind::Integer(1, 1 << 10)),
    only(&["gpt"], "model.context", Kind::Integer(1, 1 << 14)),
    only(&["gpt"], "model.vocabulary", Kind::Integer(2, 1 << 20)),
    key("data.name", Kind::Word(&["digits", "mnist10k", "synthetic", "tokens"])),
    key("data.shuffle", Kind::Switch),
    key("data.drop_last", Kind::Switch),
    key("data.workers", Kind::Integer(0, 64)),
    only(&["synthetic"], "data.shape", Kind::Shape),
    only(&["synthetic"], "data.classes", Kind::Integer(2, 1 << 20)),
    only(&["tokens"], "data.context", Kind::Integer(1, 1 << 14)),
    only(&["tokens"], "data.vocabulary", Kind::Integer(2, 1 << 20)),
    only(&["synthetic", "tokens"], "data.samples", Kind::Integer(1, 1 << 30)),
    key("batch.global", Kind::Integer(1, 1 << 24)),
    key("batch.per_card", Kind::Integer(1, 1 << 24)),
    key("optimizer.name", Kind::Word(&["sgd", "adam"])),
    key("optimizer.lr", Kind::Number("above 0, at most 1000", |x| x > 0.0 && x <= 1000.0)),
    only(&["sgd"], "optimizer.momentum", Kind::Number("from 0 to below 1", |x| (0.0..1.0).contains(&x))),
    key("optimizer.weight_decay", Kind::Number("from 0 to 1000", |x| (0.0..=1000.0).contains(&x))),
    key("optimizer.clip_norm", POSITIVE),
    key("dp.output_card", Kind::Integer(0, MAX_CARDS - 1)),
    key("dp.chunk_weights", Kind::Weights),
    key("ddp.bucket_cap_mb", POSITIVE_MIB),
    key("ddp.first_bucket_mb", POSITIVE_MIB),
    key("ddp.overlap", Kind::Switch),
    key("ddp.gradient_as_bucket_view", Kind::Switch),
    key("ddp.find_unused_parameters", Kind::Switch),
    key("ddp.static_graph", Kind::Switch),
    key("ddp.broadcast_buffers", Kind::Switch),
    key("ddp.init_sync", Kind::Switch),
    key("ddp.comm_hook", Kind::Word(&["none", "bf16", "fp16", "powersgd"])),
    key("ddp.powersgd_rank", Kind::Integer(1, 1 << 10)),
    // From 2 on: error feedback needs one whole gradient before it, as in PyTorch.
    key("ddp.powersgd_start_step", Kind::Integer(2, 1_000_000)),
    key("ddp.accumulate", Kind::Integer(1, 1 << 16)),
    key("ddp.join", Kind::Switch),
    key("ddp.sync_batch_norm", Kind::Switch),
    key("sample.period_ms", Kind::Integer(10, 60_000)),
    key("sample.require_nvml", Kind::Switch),
    key("inject.phase", Kind::Word(&["forward", "backward", "update"])),
    key("inject.percent", Kind::Number("above 0, at most 10000", |x| x > 0.0 && x <= 10_000.0)),
    key("inject.rank", Kind::Integer(0, MAX_CARDS - 1)),
];

/// Looks a key up.
pub(super) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// The candidate that was probably meant, if one is close.
pub(super) fn nearest<'a>(typed: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(typed, candidate), candidate))
        .filter(|(likeness, _)| *likeness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}
