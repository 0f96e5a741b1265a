//! `compare`: the engines in alternation, round by round, and what follows from it.

use super::args::CompareArgs;
use super::cell::{self, Cell, Outcome};
use super::peers;
use super::printer::Printer;
use super::progress::Progress;
use super::request::{self, Request};
use super::row::{Row, rows};
use super::run_folder::{RunFolder, checked_name, fresh_name};
use super::{ExitStatus, environment, interrupt, worker};
use crate::config::Uneven;
use crate::error::{Error, Kind, Result};
use crate::launch::{MemoryFile, Message, Mode};
use crate::metrics::record::{AbResult, Comparison, Results, RoundStatus, SCHEMA, Status, Warning};
use crate::metrics::sampler::Account;
use crate::metrics::stats;
use crate::metrics::{record::Round, round, watched};
use crate::report;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// Share of a core above which the sampler itself disturbs what it measures.
const MOST_SAMPLER_PERCENT: f64 = 1.0;

/// Runs the verb.
pub(crate) fn run(args: &CompareArgs, argv: Vec<String>, printer: &Printer) -> Result<ExitStatus> {
    worker::require()?;
    let request = decide(args)?;
    let init = args.init.as_deref().map(|path| request::readable("--init", path)).transpose()?;
    if let Some(path) = &init {
        worker::check_weights(&request.plan, path).map_err(|error| error.context("--init"))?;
    }
    let name = args.run_id.as_deref().map_or_else(|| Ok(fresh_name()), checked_name)?;
    let rows = rows(&request)?;
    if rows.iter().any(|row| row.engine.is_peer()) {
        peers::program()?;
    }
    let results = empty_results(&request, &rows, argv)?;
    let stop = interrupt::on_stop_signals()?;
    let folder = RunFolder::create(&args.out, &name, &request.plan, &results)?;
    if args.save_weights {
        folder.make_weights_folder()?;
    }
    for warning in &request.warnings {
        printer.warning(warning);
    }
    let peers = rows.iter().any(|row| row.engine.is_peer());
    let run = Run {
        folder,
        peers_init: (peers && init.is_none())
            .then(|| MemoryFile::with(&worker::initial_weights(&request.plan)?))
            .transpose()?,
        init,
        save_weights: args.save_weights,
        grace: Duration::from_secs_f64(args.run.grace),
        progress: Progress::new((request.plan.run.rounds * rows.len() * steps_per_round(&request)) as u64),
        request,
        rows,
        stop: &stop,
        printer,
        results,
        sampled: Account::default(),
        exhausted: BTreeMap::new(),
    };
    run.go(args.run.json)
}

fn decide(args: &CompareArgs) -> Result<Request> {
    let mut overrides = request::overrides(&args.run)?;
    overrides
        .flag("--engines", "run.engines", args.engines.as_ref())
        .flag("--rounds", "run.rounds", args.rounds.as_ref())
        .flag("--warmup", "run.warmup", args.warmup.as_ref())
        .flag("--steps", "run.steps", args.steps.as_ref())
        .flag("--peers", "run.peers", args.peers.as_ref())
        .list("--ab", "run.ab", &args.ab);
    let mut request = request::decide(args.run.config.as_deref(), &overrides, Uneven::Refuse)?;
    let run = &mut request.plan.run;
    run.engines = request::with_scaling_baseline(&run.engines, run.cards);
    Ok(request)
}

fn steps_per_round(request: &Request) -> usize {
    request.plan.run.warmup + request.plan.run.steps
}

fn empty_results(request: &Request, rows: &[Row], argv: Vec<String>) -> Result<Results> {
    Ok(Results {
        schema: SCHEMA.to_owned(),
        argv,
        started_at: now(),
        finished_at: None,
        // What a run is as long as nobody has ended it properly.
        status: Status::Interrupted,
        environment: environment::describe(&request.cards)?,
        plan: request.plan.clone(),
        engines: rows.iter().map(|row| (row.name.clone(), row.empty_record())).collect(),
        comparison: Comparison::default(),
        sampling: None,
        monitoring: None,
        warnings: request.warnings.clone(),
    })
}

/// RFC 3339, UTC, to the millisecond.
fn now() -> String {
    let now = jiff::Timestamp::now();
    now.round(jiff::Unit::Millisecond).unwrap_or(now).to_string()
}

struct Run<'a> {
    request: Request,
    rows: Vec<Row>,
    folder: RunFolder,
    init: Option<PathBuf>,
    /// What our engines draw from the seed, for those that would draw something else.
    peers_init: Option<MemoryFile>,
    save_weights: bool,
    grace: Duration,
    stop: &'a AtomicUsize,
    printer: &'a Printer,
    progress: Progress,
    results: Results,
    sampled: Account,
    /// Rows that ran out of memory, and how: they are not tried again.
    exhausted: BTreeMap<String, Error>,
}

impl Run<'_> {
    fn go(mut self, json: bool) -> Result<ExitStatus> {
        let ended = self.measure();
        self.results.status = match &ended {
            Ok(()) => Status::Complete,
            Err(error) if error.kind() == Kind::Interrupted => Status::Interrupted,
            Err(_) => Status::Failed,
        };
        if let Err(error) = &ended
            && error.kind() != Kind::Interrupted
        {
            self.warn("run_failed", error.to_string(), error.advice().map(str::to_owned));
        }
        self.results.finished_at = Some(now());
        self.warn_of_sampler();
        for Warning { code, message, hint } in stats::monitoring_warnings(&self.results) {
            self.warn(&code, message, hint);
        }
        let concluded = self.conclude(json);
        // What ended the run is what the user has to know; what failed after it is likely its consequence.
        ended.and(concluded)
    }

    fn measure(&mut self) -> Result<()> {
        let rounds = self.request.plan.run.rounds;
        let rows = self.rows.clone();
        let mut cells = 0;
        for round in 0..rounds {
            for row in &rows {
                self.progress.doing(format!("round {}/{rounds} {}", round + 1, row.name));
                match self.exhausted.get(&row.name) {
                    // It would run out of memory again.
                    Some(error) => {
                        let record = round::failed(error);
                        self.keep(row, record)?;
                    }
                    None => self.measure_cell(row, round)?,
                }
                cells += 1;
                self.progress.at((cells * steps_per_round(&self.request)) as u64);
            }
        }
        self.require_all_engines()
    }

    fn measure_cell(&mut self, row: &Row, round: usize) -> Result<()> {
        let first = round == 0 && self.rows.first().is_some_and(|first| first.name == row.name);
        let last = round + 1 == self.request.plan.run.rounds;
        let keep =
            |wanted: bool, name: String| (self.save_weights && wanted).then(|| self.folder.weights(&name));
        let cell = Cell {
            row: row.clone(),
            round,
            mode: Mode::Compare,
            init: match (&self.init, &self.peers_init) {
                (None, Some(file)) if row.engine.is_peer() => Some(file.path()),
                (init, _) => init.clone(),
            },
            save_initial: keep(first, "init".to_owned()),
            save_gradients: keep(round == 0, format!("{}.gradients", row.name)),
            save_final: keep(last, row.name.clone()),
        };
        let progress = &self.progress;
        let mut observe = |rank: usize, message: &Message| {
            if rank == 0 && matches!(message, Message::Step(_)) {
                progress.step();
            }
            Ok(())
        };
        let folder = &self.folder;
        let write_samples = |rows| folder.append_samples(rows);
        let outcome = cell::run(&cell, &self.request, self.grace, self.stop, write_samples, &mut observe);
        self.sampled = self.sampled.plus(outcome.sampled.account);
        if let Some(monitoring) = &outcome.sampled.monitoring {
            self.results.monitoring.get_or_insert_default().absorb(monitoring.clone());
        }
        let record = self.judge(row, round, outcome)?;
        self.keep(row, record)
    }

    /// Adds a round to its row and writes what is known.
    fn keep(&mut self, row: &Row, record: Round) -> Result<()> {
        if let Some(record_of_engine) = self.results.engines.get_mut(&row.name) {
            record_of_engine.rounds.push(record);
        }
        let period = Duration::from_millis(self.request.plan.sample.period_ms);
        self.results.sampling = Some(self.sampled.record(period));
        stats::conclude(&mut self.results)?;
        self.folder.write_results(&self.results)
    }

    /// The record of a cell: measured, or failed in a way that leaves the others worth measuring. Any
    /// other failure ends the run.
    fn judge(&mut self, row: &Row, round: usize, outcome: Outcome) -> Result<Round> {
        let name = &row.name;
        match outcome.result {
            Ok(()) => {
                for (rank, log) in outcome.logs.iter().enumerate() {
                    self.folder.append_steps(&round::step_rows(name, round, rank, log))?;
                }
                let warmup = self.request.plan.run.warmup;
                let mut record = round::summarise(row.engine, &outcome.logs, warmup)?;
                watched::add(&mut record, &outcome.logs, warmup, &outcome.sampled.series);
                Ok(record)
            }
            Err(error) if matches!(error.kind(), Kind::OutOfMemory | Kind::Torch) => {
                let message = format!("{name}, round {round}: {error}");
                self.warn("cell_failed", message, error.advice().map(str::to_owned));
                let record = round::failed(&error);
                if error.kind() == Kind::OutOfMemory {
                    self.exhausted.insert(name.clone(), error);
                }
                Ok(record)
            }
            Err(error) if error.kind() == Kind::Interrupted => Err(error),
            Err(error) => Err(error.context(format_args!("{name}, round {round}"))),
        }
    }

    /// An engine that was asked for and has not one round to show is no comparison.
    fn require_all_engines(&self) -> Result<()> {
        let failed = self.results.engines.iter().find_map(|(name, record)| {
            let error = record.rounds.iter().find_map(|round| round.error.clone());
            record.rounds.iter().all(|round| round.status == RoundStatus::Failed).then_some((name, error))
        });
        match failed {
            None => Ok(()),
            Some((name, error)) => Err(Error::new(
                Kind::Worker,
                format!("{name} could not be measured in any round: {}", error.unwrap_or_default()),
            )
            .hint("leave it out with --engines, or make the batch or the model smaller")),
        }
    }

    fn warn(&mut self, code: &str, message: String, hint: Option<String>) {
        let warning = Warning { code: code.to_owned(), message, hint };
        // What ends the run is printed as its error.
        if code != "run_failed" {
            self.progress.aside(|| self.printer.warning(&warning));
        }
        self.results.warnings.push(warning);
    }

    fn warn_of_sampler(&mut self) {
        let Some(sampling) = self.results.sampling else { return };
        let longer = Some(format!("raise sample.period_ms (now {})", sampling.period_ms));
        if let Some(percent) = sampling.cpu_percent.filter(|percent| *percent >= MOST_SAMPLER_PERCENT) {
            let message = format!("the sampler took {percent:.1} % of a core from what it measures");
            self.warn("sampler_cost", message, longer.clone());
        }
        let due = sampling.ticks + sampling.missed;
        if sampling.missed * 10 > due {
            let message = format!("{} of {due} readings of the cards came too late", sampling.missed);
            self.warn("sampler_missed", message, longer);
        }
    }

    /// Statistics, files and tables of whatever was measured.
    fn conclude(mut self, json: bool) -> Result<ExitStatus> {
        stats::conclude(&mut self.results)?;
        self.folder.write_results(&self.results)?;
        drop(self.progress);
        let measured = self.results.engines.values().any(|engine| !engine.rounds.is_empty());
        // Whoever does not read what is printed still gets the files.
        let mut told = Ok(());
        if json {
            let text = serde_json::to_string_pretty(&self.results).map_err(|source| {
                Error::new(Kind::Io, format!("cannot write the results as JSON: {source}"))
            })?;
            told = self.printer.data(&text);
        } else if measured {
            told = self.printer.data(&report::console(&self.results));
        }
        if let Err(error) = self.folder.link_latest() {
            self.printer.warning(&Warning {
                code: "no_latest".to_owned(),
                message: error.to_string(),
                hint: error.advice().map(str::to_owned),
            });
        }
        let page = match measured {
            true => report::write(self.folder.path())?.page,
            false => self.folder.path().to_owned(),
        };
        self.printer.status(&format!("wrote {}", page.display()));
        told?;
        let comparison = &self.results.comparison;
        let differs =
            comparison.losses.agree == Some(false) || comparison.ab.values().any(AbResult::disagrees);
        Ok(if differs { ExitStatus::Failure } else { ExitStatus::Success })
    }
}
