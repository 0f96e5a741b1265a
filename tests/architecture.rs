//! Who may import whom, and which door an outside crate or a side effect has: read from the sources.
//!
//! The tables here are the rules; ARCHITECTURE.md explains them. Test code (after `#[cfg(test)]`) and
//! comments are free.

#![allow(clippy::expect_used, reason = "a test may panic, in its helpers too")]

use std::path::Path;

/// Module, and what it may name by `crate::`. An entry with `::` allows just that part. Every module
/// may use itself and what is in [`EVERYBODY`].
const MAY_USE: &[(&str, &[&str])] = &[
    ("units", &[]),
    ("error", &[]),
    ("config", &[]),
    ("card", &[]),
    ("torch", &["card", "config"]),
    ("comm", &["card", "torch"]),
    ("model", &["config", "torch"]),
    ("data", &["config", "torch"]),
    ("metrics", &["card", "config"]),
    ("engine", &["model", "data", "metrics", "torch", "card", "config"]),
    ("dp", &["engine", "comm", "model", "data", "metrics", "torch", "card", "config"]),
    ("ddp", &["engine", "comm", "model", "data", "metrics", "torch", "card", "config"]),
    ("launch", &["card", "config", "metrics::record", "metrics::phase"]),
    ("report", &["metrics::record", "metrics::stats", "metrics::phase", "config"]),
    (
        "cli",
        &[
            "card", "comm", "config", "data", "ddp", "dp", "engine", "launch", "metrics", "model", "report",
            "torch",
        ],
    ),
];

const EVERYBODY: &[&str] = &["units", "error", "Error", "Result"];

/// What may be named only in some places: text, places, and why.
const DOORS: &[(&str, &[&str], &str)] = &[
    ("plotters", &["report/charts"], "a chart library has one door"),
    ("clap", &["cli"], "arguments end where plans begin"),
    ("nvml_wrapper", &["metrics/nvml"], "every reading can be missing; one place knows how"),
    ("cudarc", &["comm/nccl", "card", "torch/cuda"], "it panics on machines without the library"),
    ("process::Command", &["launch"], "whoever starts a process must also end it"),
    ("indicatif", &["cli"], "only the program has a terminal"),
    ("println!", &["cli/printer"], "data goes to stdout in one place"),
    ("eprintln!", &["cli/printer"], "messages go to stderr in one place"),
    ("print!", &["cli/printer"], "data goes to stdout in one place"),
    ("eprint!", &["cli/printer"], "messages go to stderr in one place"),
    ("unsafe", &["torch", "comm", "card"], "the rest of the crate has none"),
];

/// A source file: its path below `src` without `.rs`, and its product code.
struct Source {
    path: String,
    code: String,
}

impl Source {
    fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), code: product_code(text) }
    }

    fn module(&self) -> &str {
        head(&self.path, "/")
    }
}

#[test]
fn modules_use_only_what_they_may() {
    assert_eq!(unlawful_imports(&sources()), Vec::<String>::new());
}

#[test]
fn outside_crates_and_side_effects_have_one_door() {
    assert_eq!(wrong_doors(&sources()), Vec::<String>::new());
}

#[test]
fn every_module_is_in_the_table() {
    for source in sources() {
        let module = source.module();
        let known = ["main", "lib"].contains(&module) || MAY_USE.iter().any(|(name, _)| *name == module);
        assert!(known, "src/{}.rs: add `{module}` to MAY_USE and to ARCHITECTURE.md", source.path);
    }
}

#[test]
fn planted_violations_are_caught() {
    for (path, text) in [
        ("dp/mod", "use crate::ddp::Reducer;"),
        ("ddp/reducer", "fn f() -> crate::launch::Group { todo!() }"),
        ("config/resolve", "use crate::{\n    Error,\n    card::{Meter},\n};"),
        ("metrics/sampler", "use crate::cli::printer;"),
        ("launch/mod", "use crate::metrics::stats::median;"),
        ("launch/mod", "use crate::metrics::{record::Round, sampler};"),
        ("comm/shm", "use super::super::engine;"),
        ("card/mod", "use super::torch;"),
    ] {
        assert_eq!(unlawful_imports(&[Source::new(path, text)]).len(), 1, "{path}: {text}");
    }
    for (path, text) in [
        ("report/html", "use plotters::prelude::*;"),
        ("cli/compare", "    println!(\"done\");"),
        ("cli/compare", "std::process::Command::new(\"ls\")"),
        ("cli/compare", "use std::process::{self, Command};"),
        ("engine/mod", "let x = unsafe { *p };"),
        ("metrics/proc", "use nvml_wrapper::Nvml;"),
    ] {
        assert_eq!(wrong_doors(&[Source::new(path, text)]).len(), 1, "{path}: {text}");
    }
}

#[test]
fn lawful_code_passes() {
    let text = "\
//! Explains crate::cli and unsafe code.
use crate::{Error, Result, config::{Plan, RunPlan}, units::Nanos};
use crate::metrics::{record::Round, phase};
use super::pipe; // not crate::cli::printer
const TEXT: &str = \"use crate::dp and println!\";
fn fingerprint() { reprint!(); }
#[cfg(test)]
mod tests { use crate::cli; use std::process::Command; }
";
    let sources = [Source::new("launch/process", text)];
    assert_eq!(unlawful_imports(&sources), Vec::<String>::new());
    assert_eq!(wrong_doors(&sources), Vec::<String>::new());
}

fn unlawful_imports(sources: &[Source]) -> Vec<String> {
    let mut wrong = Vec::new();
    for source in sources {
        let module = source.module();
        let Some((_, allowed)) = MAY_USE.iter().find(|(name, _)| *name == module) else { continue };
        for used in crate_paths(source) {
            let lawful = head(&used, "::") == module
                || EVERYBODY.contains(&head(&used, "::"))
                || allowed.iter().any(|entry| used == *entry || used.starts_with(&format!("{entry}::")));
            if !lawful {
                wrong.push(format!("src/{}.rs uses crate::{used}, which `{module}` may not", source.path));
            }
        }
    }
    wrong
}

fn wrong_doors(sources: &[Source]) -> Vec<String> {
    let mut wrong = Vec::new();
    for Source { path, code } in sources {
        for (name, places, why) in DOORS {
            let at_home = places.iter().any(|place| {
                path.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            });
            if !at_home && names(code, name) {
                wrong.push(format!("src/{path}.rs names {name}, which belongs in {places:?}: {why}"));
            }
        }
    }
    wrong
}

/// Whether the code holds this as a whole word, also as a part of `module::{self, Item}`.
fn names(code: &str, name: &str) -> bool {
    let grouped = || {
        let Some((module, item)) = name.rsplit_once("::") else { return false };
        let opening = format!("{module}::{{");
        code.match_indices(&opening).any(|(at, _)| {
            head(&code[at + opening.len()..], "}").split(',').any(|entry| entry.trim() == item)
        })
    };
    let mut matches = code.match_indices(name);
    matches.any(|(at, _)| !code[..at].ends_with(in_word) && !code[at + name.len()..].starts_with(in_word))
        || grouped()
}

/// Every path into the crate that this file names, groups spelled out: as `crate::...`, or as enough
/// `super::` to leave its module.
fn crate_paths(Source { path, code }: &Source) -> Vec<String> {
    let depth = path.trim_end_matches("/mod").split('/').count();
    let mut paths = Vec::new();
    for root in ["crate::", &"super::".repeat(depth)] {
        for (at, _) in code.match_indices(root) {
            let before = &code[..at];
            if !before.ends_with(in_word) && !before.ends_with("super::") {
                expand("", &code[at + root.len()..], &mut paths);
            }
        }
    }
    paths
}

/// Reads one path, or one braced group of paths, from the front of `code`.
fn expand(prefix: &str, code: &str, paths: &mut Vec<String>) {
    if let Some(group) = code.strip_prefix('{') {
        let (mut depth, mut start) = (0, 0);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    expand(prefix, group[start..at].trim(), paths);
                    start = at + 1;
                    if c == '}' {
                        return;
                    }
                }
                _ => {}
            }
        }
        return;
    }
    let end = code.find(|c| !in_word(c)).unwrap_or(code.len());
    let (name, rest) = code.split_at(end);
    match rest.strip_prefix("::") {
        _ if name.is_empty() => {}
        Some(rest) if rest.starts_with(|c| in_word(c) || c == '{') => {
            expand(&format!("{prefix}{name}::"), rest, paths)
        }
        _ => paths.push(format!("{prefix}{name}")),
    }
}

/// What a file compiles into the product: no comments, no contents of strings, nothing from its test
/// module on.
fn product_code(text: &str) -> String {
    head(text, "#[cfg(test)]\nmod ").lines().map(bare).collect::<Vec<_>>().join("\n")
}

/// A line without its strings and its comment. A string over several lines holds prose, which matches nothing.
fn bare(line: &str) -> String {
    let mut out = String::new();
    let mut chars = line.chars().peekable();
    let mut quoted = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' if quoted => drop(chars.next()),
            // A character literal of a quote opens no string.
            '"' if !(out.ends_with('\'') && chars.peek() == Some(&'\'')) => quoted = !quoted,
            '/' if !quoted && chars.peek() == Some(&'/') => break,
            c if !quoted => out.push(c),
            _ => {}
        }
    }
    out
}

fn in_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn head<'a>(text: &'a str, separator: &str) -> &'a str {
    text.split(separator).next().unwrap_or(text)
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    collect(&root, &root, &mut found);
    assert!(found.len() > 20, "only {} sources were found", found.len());
    found
}

fn collect(root: &Path, folder: &Path, found: &mut Vec<Source>) {
    for entry in std::fs::read_dir(folder).expect("src is readable") {
        let path = entry.expect("src is readable").path();
        if path.is_dir() {
            collect(root, &path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.strip_prefix(root).expect("below src").with_extension("");
            let text = std::fs::read_to_string(&path).expect("sources are UTF-8");
            found.push(Source::new(&name.to_string_lossy(), &text));
        }
    }
}
