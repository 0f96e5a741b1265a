//! `train`: whole epochs with one engine, tested after each.

use super::args::TrainArgs;
use super::cell::{self, Cell};
use super::printer::Printer;
use super::request::{self, Request};
use super::row::Row;
use super::{ExitStatus, interrupt, worker};
use crate::config::{EngineKind, Uneven};
use crate::error::{Error, Kind, Result};
use crate::launch::{Message, Mode};
use crate::metrics::phase::StepReport;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// One epoch, all ranks together.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Epoch {
    /// From 1.
    epoch: u64,
    /// Mean over the samples of the epoch, each at the weights it met.
    loss: f64,
    /// Right predictions of the test data.
    correct: u64,
    /// Test predictions.
    total: u64,
    /// `correct` over `total`.
    accuracy_percent: f64,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Training<'a> {
    engine: EngineKind,
    cards: usize,
    global_batch: usize,
    /// Epochs that a checkpoint had done; `null` for a fresh start.
    resumed_after: Option<u64>,
    epochs: &'a [Epoch],
    weights: Option<&'a Path>,
}

/// Runs the verb.
pub(crate) fn run(args: &TrainArgs, printer: &Printer) -> Result<ExitStatus> {
    worker::require()?;
    let mut overrides = request::overrides(&args.run)?;
    overrides.flag("--engine", "run.engines", Some(&args.engine));
    let request = request::decide(args.run.config.as_deref(), &overrides, Uneven::Allow)?;
    let &[engine] = request.plan.run.engines.as_slice() else {
        return Err(Error::usage(format!("--engine: `{}` is not one engine", args.engine))
            .hint("`train` runs one of single, dp and ddp"));
    };
    if engine.is_peer() {
        return Err(Error::usage(format!("--engine: `{engine}` is PyTorch's, which `train` does not run"))
            .hint("`train` runs one of single, dp and ddp"));
    }
    let init = args.load.as_deref().map(|path| request::readable("--load", path)).transpose()?;
    let save = args.save.as_deref().map(writable).transpose()?;
    for warning in &request.warnings {
        printer.warning(warning);
    }
    let cell = Cell {
        row: Row::of(engine, &request.plan),
        round: 0,
        mode: Mode::Train { epochs: args.epochs },
        init,
        save_initial: None,
        save_gradients: None,
        save_final: save.clone(),
    };
    let mut resumed = None;
    let epochs = train(&cell, &request, Duration::from_secs_f64(args.run.grace), &mut |news| match news {
        News::Resumed(epochs) => {
            resumed = Some(epochs);
            printer.status(&format!("resuming after epoch {epochs}"));
            Ok(())
        }
        News::Epoch(epoch) if !args.run.json => {
            printer.data(&line(epoch, resumed.unwrap_or(0) + args.epochs))?;
            Ok(())
        }
        News::Epoch(_) => Ok(()),
    })?;
    if args.run.json {
        let training = Training {
            engine,
            cards: cell::cards_of(engine, &request.cards).len(),
            global_batch: request.plan.batch.global,
            resumed_after: resumed,
            epochs: &epochs,
            weights: save.as_deref(),
        };
        let text = serde_json::to_string_pretty(&training)
            .map_err(|source| Error::new(Kind::Io, format!("cannot write the results as JSON: {source}")))?;
        printer.data(&text)?;
    }
    if let Some(path) = &save {
        printer.status(&format!("wrote {}", path.display()));
    }
    Ok(ExitStatus::Success)
}

fn line(epoch: &Epoch, epochs: u64) -> String {
    let Epoch { epoch, loss, correct, total, accuracy_percent } = epoch;
    format!(
        "epoch {epoch}/{epochs}  loss {loss:.4}  test accuracy {accuracy_percent:.2} % ({correct}/{total})"
    )
}

/// Finds out before hours of training whether the weights can be written at their end.
fn writable(path: &Path) -> Result<PathBuf> {
    let cannot = |source| Error::io("cannot write", path, source).context("--save");
    let path = std::path::absolute(path).map_err(cannot)?;
    if path.is_dir() {
        return Err(cannot(std::io::ErrorKind::IsADirectory.into()));
    }
    let folder = path.parent().ok_or_else(|| cannot(std::io::ErrorKind::IsADirectory.into()))?;
    // Made where the weights will be, and gone again with this value.
    tempfile::tempfile_in(folder).map_err(cannot)?;
    Ok(path)
}

fn train(
    cell: &Cell,
    request: &Request,
    grace: Duration,
    tell: &mut dyn FnMut(News) -> Result<()>,
) -> Result<Vec<Epoch>> {
    let stop = interrupt::on_stop_signals()?;
    let world_size = cell.row.engine.layout().processes(request.plan.run.cards);
    let mut tally = Tally::new(world_size);
    let outcome = cell::run(
        cell,
        request,
        grace,
        &stop,
        |rows| {
            rows.into_iter().for_each(drop);
            Ok(())
        },
        &mut |rank, message| {
            if let (0, &Message::Resumed { epochs }) = (rank, message) {
                tell(News::Resumed(epochs))?;
            }
            if let Some(epoch) = tally.hear(rank, message)? {
                tell(News::Epoch(&epoch))?;
            }
            Ok(())
        },
    );
    outcome.result.map(|()| tally.epochs)
}

/// What a training has to tell while it goes on.
enum News<'a> {
    /// It begins after this epoch.
    Resumed(u64),
    Epoch(&'a Epoch),
}

/// Puts the ranks' parts of each epoch together.
#[derive(Debug)]
struct Tally {
    world_size: usize,
    /// By rank: loss times samples, and samples, since its last test.
    losses: Vec<(f64, u64)>,
    /// By epoch: ranks that have tested, and the sums of what they said.
    tested: BTreeMap<u64, Part>,
    epochs: Vec<Epoch>,
}

#[derive(Debug, Default)]
struct Part {
    ranks: usize,
    loss: f64,
    samples: u64,
    correct: u64,
    total: u64,
}

impl Tally {
    fn new(world_size: usize) -> Self {
        Self { world_size, losses: vec![(0.0, 0); world_size], tested: BTreeMap::new(), epochs: Vec::new() }
    }

    /// Gives the epoch that this message completes.
    fn hear(&mut self, rank: usize, message: &Message) -> Result<Option<Epoch>> {
        match message {
            Message::Step(StepReport { loss: Some(loss), samples, .. }) => {
                let (sum, count) = &mut self.losses[rank];
                *sum += loss * *samples as f64;
                *count += samples;
                Ok(None)
            }
            &Message::Evaluated { epoch, correct, total } => {
                let (loss, samples) = std::mem::take(&mut self.losses[rank]);
                let part = self.tested.entry(epoch).or_default();
                part.ranks += 1;
                part.loss += loss;
                part.samples += samples;
                part.correct += correct;
                part.total += total;
                if part.ranks < self.world_size {
                    return Ok(None);
                }
                let Some(part) = self.tested.remove(&epoch) else { return Ok(None) };
                let epoch = part.finish(epoch)?;
                self.epochs.push(epoch.clone());
                Ok(Some(epoch))
            }
            _ => Ok(None),
        }
    }
}

impl Part {
    fn finish(self, epoch: u64) -> Result<Epoch> {
        if self.samples == 0 || self.total == 0 {
            return Err(Error::new(
                Kind::Worker,
                format!("epoch {epoch} had no samples to train or test on"),
            ));
        }
        Ok(Epoch {
            epoch,
            loss: self.loss / self.samples as f64,
            correct: self.correct,
            total: self.total,
            accuracy_percent: 100.0 * self.correct as f64 / self.total as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Nanos;

    fn step(loss: Option<f64>, samples: u64) -> Message {
        let (start, end) = (Nanos(0), Nanos(1));
        Message::Step(StepReport {
            step: 0,
            loss,
            samples,
            repeated: 0,
            sent_bytes: None,
            start,
            end,
            spans: vec![],
        })
    }

    #[test]
    fn an_epoch_is_the_sum_of_its_ranks() {
        let mut tally = Tally::new(2);
        let tested = |correct, total| Message::Evaluated { epoch: 1, correct, total };
        tally.hear(0, &step(Some(2.0), 30)).unwrap();
        tally.hear(1, &step(Some(4.0), 10)).unwrap();
        tally.hear(1, &step(None, 0)).unwrap();
        assert_eq!(tally.hear(1, &tested(1, 5)).unwrap(), None);
        let epoch = tally.hear(0, &tested(4, 5)).unwrap().unwrap();
        let expected = Epoch { epoch: 1, loss: 2.5, correct: 5, total: 10, accuracy_percent: 50.0 };
        assert_eq!(epoch, expected);
        assert_eq!(line(&epoch, 3), "epoch 1/3  loss 2.5000  test accuracy 50.00 % (5/10)");
    }

    #[test]
    fn an_epoch_without_samples_is_an_error_and_not_a_number() {
        let mut tally = Tally::new(1);
        assert!(tally.hear(0, &Message::Evaluated { epoch: 1, correct: 0, total: 0 }).is_err());
    }
}
