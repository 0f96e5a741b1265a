//! Values by dotted key, each with the place it came from: the file, then what the command line says.
//!
//! Every value is checked against [`schema`](super::schema) on its own here; nothing is decided.

use super::schema::{self, Key};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fmt;
use toml::Value;
use toml::de::{DeTable, DeValue};

/// Where a value was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    /// A line of the config, counted from 1.
    File { name: String, line: usize },
    /// A flag with its own name, or `--set`.
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { name, line } => write!(f, "{name}:{line}"),
            Self::Flag(flag) => f.write_str(flag),
        }
    }
}

/// What the command line said, in the order it said it.
#[derive(Debug, Default, Clone)]
pub struct Overrides {
    entries: Vec<(&'static str, String, Value)>,
}

impl Overrides {
    /// A flag such as `--cards` that stands for `key`; `None` where it was not given. The text is read
    /// as [`Self::set`] reads it.
    pub fn flag(&mut self, flag: &'static str, key: &str, value: Option<impl ToString>) -> &mut Self {
        if let Some(value) = value {
            self.entries.push((flag, key.to_owned(), scalar(&value.to_string())));
        }
        self
    }

    /// A flag that may be repeated and stands for the list `key`.
    pub fn list(&mut self, flag: &'static str, key: &str, values: &[String]) -> &mut Self {
        if !values.is_empty() {
            let values = values.iter().map(|value| Value::from(value.as_str())).collect();
            self.entries.push((flag, key.to_owned(), Value::Array(values)));
        }
        self
    }

    /// One `--set key=value`. The value is TOML; text that is not TOML is a string, so words need no quotes.
    pub fn set(&mut self, pair: &str) -> Result<&mut Self> {
        let (key, value) = pair.split_once('=').ok_or_else(|| {
            Error::usage(format!("--set: `{pair}` has no `=`"))
                .hint("write `--set key=value`, as in `--set run.steps=32`")
        })?;
        self.entries.push(("--set", key.trim().to_owned(), scalar(value.trim())));
        Ok(self)
    }

    /// The same with these `key=value` in place of what was said about their keys.
    pub fn with(&self, pairs: &[String]) -> Result<Self> {
        let mut tried = Self::default();
        for pair in pairs {
            tried.set(pair)?;
        }
        for (flag, _, _) in &mut tried.entries {
            *flag = "run.ab";
        }
        let mut all = self.clone();
        all.entries.retain(|(_, key, _)| !tried.entries.iter().any(|(_, other, _)| key == other));
        all.entries.extend(tried.entries);
        Ok(all)
    }
}

fn scalar(text: &str) -> Value {
    text.parse().unwrap_or_else(|_| Value::from(text))
}

/// Merged, individually valid values.
#[derive(Debug)]
pub(super) struct Settings {
    values: BTreeMap<&'static str, (Value, Origin)>,
}

impl Settings {
    /// Reads the file and puts the overrides over it.
    pub(super) fn merge(name: &str, text: &str, overrides: &Overrides) -> Result<Self> {
        let mut file = read_file(name, text)?;
        let mut given = BTreeMap::new();
        for (flag, key, value) in &overrides.entries {
            let (key, value) = check(key, value, &Origin::Flag(flag))?;
            if let Some((_, Origin::Flag(first))) = given.insert(key.name, (value, Origin::Flag(flag))) {
                return Err(Error::usage(format!("`{}` is set twice, by {first} and by {flag}", key.name))
                    .hint("give it once"));
            }
        }
        // The two say the same thing in different words: the command line's word replaces the file's.
        for (one, other) in [("batch.global", "batch.per_card"), ("batch.per_card", "batch.global")] {
            if given.contains_key(one) {
                file.remove(other);
            }
        }
        // The file's `model.hidden` was meant for the file's model, not for the one `--model` asks for.
        for (name, (value, _)) in &given {
            if let (Some(section), Some(chosen)) = (name.strip_suffix("name"), value.as_str()) {
                file.retain(|key, _| {
                    !key.starts_with(section)
                        || schema::find(key)
                            .is_none_or(|key| key.only.is_empty() || key.only.contains(&chosen))
                });
            }
        }
        // Nor was its data, where the model asked for cannot read it: then the data follow the model.
        if let Some((model, _)) = given.get("model.name")
            && !given.contains_key("data.name")
            && let Some((data, _)) = file.get("data.name")
            && schema::reads_tokens(model.as_str()) != (data.as_str() == Some("tokens"))
        {
            file.retain(|key, _| {
                *key != "data.name"
                    && (!key.starts_with("data.") || schema::find(key).is_none_or(|key| key.only.is_empty()))
            });
        }
        file.extend(given);
        Ok(Self { values: file })
    }

    /// Keys that belong to another `name` of their section than the one chosen.
    pub(super) fn check_scope(&self, section: &str, chosen: &str) -> Result<()> {
        let misplaced = self.values.iter().find(|(name, _)| {
            name.split('.').next() == Some(section)
                && schema::find(name).is_some_and(|key| !key.only.is_empty() && !key.only.contains(&chosen))
        });
        let Some((name, (_, origin))) = misplaced else { return Ok(()) };
        let only = schema::find(name).map(|key| key.only.join(", ")).unwrap_or_default();
        Err(Error::usage(format!("{origin}: `{name}` means nothing to {section} \"{chosen}\""))
            .hint(format!("remove it; it belongs to {only}")))
    }

    /// A whole number, where given.
    pub(super) fn integer(&self, key: &'static str) -> Option<i64> {
        self.value(key)?.as_integer()
    }

    /// A whole number that the schema keeps non-negative.
    pub(super) fn size(&self, key: &'static str) -> Option<usize> {
        self.integer(key).and_then(|n| usize::try_from(n).ok())
    }

    /// A number, where given.
    pub(super) fn number(&self, key: &'static str) -> Option<f64> {
        self.value(key)?.as_float()
    }

    /// A switch, where given.
    pub(super) fn switch(&self, key: &'static str) -> Option<bool> {
        self.value(key)?.as_bool()
    }

    /// A word or a list of words or sizes, as any type that reads itself from such a value.
    pub(super) fn parsed<T: serde::de::DeserializeOwned>(&self, key: &'static str) -> Result<Option<T>> {
        let Some((value, origin)) = self.values.get(key) else { return Ok(None) };
        // The schema's words and the plan's variants are the same names; should they part, say so.
        T::deserialize(value.clone())
            .map(Some)
            .map_err(|error| Error::usage(format!("{origin}: `{key}`: {}", error.message())).caused_by(error))
    }

    /// A word, where given.
    pub(super) fn word(&self, key: &'static str) -> Option<&str> {
        self.value(key)?.as_str()
    }

    /// Names a given key in a message, with its place: "quick.toml:3: `run.cards` is 4". `None` if not given.
    pub(super) fn cite(&self, key: &'static str) -> Option<String> {
        self.values.get(key).map(|(value, origin)| format!("{origin}: `{key}` is {value}"))
    }

    fn value(&self, key: &'static str) -> Option<&Value> {
        self.values.get(key).map(|(value, _)| value)
    }
}

fn read_file(name: &str, text: &str) -> Result<BTreeMap<&'static str, (Value, Origin)>> {
    let line_of = |offset: usize| text.get(..offset).map_or(1, |before| before.matches('\n').count() + 1);
    let unreadable = |error: toml::de::Error| {
        let line = error.span().map_or(1, |span| line_of(span.start));
        Error::usage(format!("{name}:{line}: not valid TOML: {}", error.message()))
            .hint("configs/quick.toml shows every key and how it is written")
            .caused_by(error)
    };
    let places = DeTable::parse(text).map_err(unreadable)?;
    let table: toml::Table = text.parse().map_err(unreadable)?;

    let mut values = BTreeMap::new();
    for (section, place) in places.get_ref() {
        let line = line_of(section.span().start);
        let keys = match (place.get_ref(), table.get(section.get_ref().as_ref())) {
            (DeValue::Table(places), Some(Value::Table(keys))) => {
                if places.is_empty() && !is_section(section.get_ref()) {
                    return Err(unknown(section.get_ref(), &Origin::File { name: name.to_owned(), line }));
                }
                places.iter().map(|(key, _)| (key, keys.get(key.get_ref().as_ref()))).collect::<Vec<_>>()
            }
            _ => return Err(unknown(section.get_ref(), &Origin::File { name: name.to_owned(), line })),
        };
        for (key, value) in keys {
            let origin = Origin::File { name: name.to_owned(), line: line_of(key.span().start) };
            let dotted = format!("{}.{}", section.get_ref(), key.get_ref());
            let Some(value) = value else { return Err(unknown(&dotted, &origin)) };
            let (key, value) = check(&dotted, value, &origin)?;
            values.insert(key.name, (value, origin));
        }
    }
    Ok(values)
}

fn is_section(name: &str) -> bool {
    schema::KEYS.iter().any(|key| key.name.split('.').next() == Some(name))
}

fn check(name: &str, value: &Value, origin: &Origin) -> Result<(&'static Key, Value)> {
    let key = schema::find(name).ok_or_else(|| unknown(name, origin))?;
    if let Some(value) = key.kind.read(value) {
        return Ok((key, value));
    }
    let meant = value.as_str().and_then(|typed| schema::nearest(typed, key.kind.words().iter().copied()));
    let hint = match (meant, origin) {
        (Some(word), _) => format!("did you mean `{word}`?"),
        (None, Origin::File { name: file, line }) => {
            format!("change line {line} of {file}, or override it with `--set {name}=VALUE`")
        }
        (None, Origin::Flag(flag)) => format!("pass another value with {flag}"),
    };
    Err(Error::usage(format!("{origin}: `{name}` is {value}, but must be {}", key.kind.allowed())).hint(hint))
}

fn unknown(name: &str, origin: &Origin) -> Error {
    let hint = if is_section(name) {
        format!("`{name}` is a section: write `[{name}]` and its keys below it")
    } else if let Some(key) = nearest_key(name) {
        format!("did you mean `{key}`?")
    } else {
        "configs/quick.toml shows every key".to_owned()
    };
    Error::usage(format!("{origin}: unknown key `{name}`")).hint(hint)
}

/// By the whole dotted name; a key written without its section is found by its last part.
fn nearest_key(name: &str) -> Option<&'static str> {
    let names = || schema::KEYS.iter().map(|key| key.name);
    names().find(|key| key.split('.').nth(1) == Some(name)).or_else(|| schema::nearest(name, names()))
}
