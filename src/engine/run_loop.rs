//! The loop every engine runs in: warm-up, then measured steps, the same code for all of them.
//!
//! Prints and stores nothing: it tells an observer what happened, between steps.

use super::Engine;
use crate::data::Loader;
use crate::error::{Error, Kind, Result};
use crate::metrics::phase::{Phase, Recorder, Span, settle};
use crate::units::Nanos;
use std::path::{Path, PathBuf};

/// What happened, in order.
#[derive(Debug)]
pub enum Event {
    /// Warm-up is over; measuring starts now.
    MeasuringStarts,
    /// A step (warm-up or measured) ended.
    Step(StepEvent),
    /// The last measured step has ended.
    MeasuringEnds,
}

/// One step.
#[derive(Debug)]
pub struct StepEvent {
    /// From 0, warm-up included.
    pub step: u64,
    /// Mean loss over this process's samples.
    pub loss: f64,
    /// Rows of this process: the weight of `loss`.
    pub samples: usize,
    /// Of these, rows that only fill up the epoch's last batch: not new samples.
    pub repeated: usize,
    /// Bytes of gradients that this process gave to others.
    pub sent_bytes: Option<u64>,
    /// Before the batch was asked for.
    pub start: Nanos,
    /// After the update, device idle.
    pub end: Nanos,
    /// Phases of all threads of this process that ended since the last event.
    pub spans: Vec<Span>,
}

/// Steps of one round.
#[derive(Debug, Clone, Default)]
pub struct RunLoop {
    /// Steps before measuring.
    pub warmup: usize,
    /// Measured steps.
    pub steps: usize,
    /// Where the gradients of the very first step go, if anywhere: as they are before they are clipped.
    pub save_gradients: Option<PathBuf>,
}

impl RunLoop {
    /// Runs them. An error of the engine, the loader or the observer ends the loop; so does a loss that
    /// is not a number, because whatever follows it is not worth measuring.
    pub fn run(
        &self,
        engine: &mut dyn Engine,
        loader: &mut Loader,
        observe: &mut dyn FnMut(Event) -> Result<()>,
    ) -> Result<()> {
        let card = engine.cards().first().copied().unwrap_or(0);
        let mut recorder = Recorder::of(card, engine.seat().stream());
        for step in 0..self.warmup + self.steps {
            if step == self.warmup {
                observe(Event::MeasuringStarts)?;
            }
            let save = self.save_gradients.as_deref().filter(|_| step == 0);
            let event = one_step(step as u64, engine, loader, &mut recorder, save)?;
            observe(Event::Step(event))?;
        }
        observe(Event::MeasuringEnds)
    }
}

fn one_step(
    step: u64,
    engine: &mut dyn Engine,
    loader: &mut Loader,
    recorder: &mut Recorder,
    save_gradients: Option<&Path>,
) -> Result<StepEvent> {
    let at_step = |error: Error| error.context(format_args!("step {step}"));
    recorder.set_step(step);
    let start = Nanos::now();
    let device = engine.batch_device();
    let batch = recorder.time(Phase::Data, || loader.next()?.to_device(device)).map_err(at_step)?;
    let repeated = batch.repeated;
    let outcome = engine.backward(batch, recorder).map_err(at_step)?;
    if let Some(path) = save_gradients {
        engine.state().gradients().save(path)?;
    }
    engine.update(recorder).map_err(at_step)?;
    engine.synchronize().map_err(at_step)?;
    let end = Nanos::now();
    let loss = outcome.loss.value().map_err(at_step)?;
    if outcome.samples > 0 && !loss.is_finite() {
        return Err(Error::new(Kind::Worker, format!("step {step}: the loss is {loss}"))
            .hint("training diverged: lower optimizer.lr"));
    }
    let spans = settle(recorder.drain().into_iter().chain(outcome.spans)).map_err(at_step)?;
    Ok(StepEvent {
        step,
        loss,
        samples: outcome.samples,
        repeated,
        sent_bytes: outcome.sent_bytes,
        start,
        end,
        spans,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Batch, Cut, Dataset, LoaderOptions, Part};
    use crate::engine::{Loss, Memory, StepOutcome};
    use crate::model::State;
    use crate::torch::seat::Seat;
    use std::sync::Arc;

    /// Gives the losses it was told to, in turn.
    struct Scripted {
        losses: Vec<f64>,
        state: State,
        seat: Seat,
    }

    impl Engine for Scripted {
        fn backward(&mut self, batch: Batch, recorder: &mut Recorder) -> Result<StepOutcome> {
            let loss = recorder.time(Phase::Forward, || self.losses.remove(0));
            let loss = Loss::of(&tch::Tensor::from(loss))?;
            Ok(StepOutcome { loss, samples: batch.samples, sent_bytes: None, spans: Vec::new() })
        }
        fn update(&mut self, _: &mut Recorder) -> Result<()> {
            Ok(())
        }
        fn memory(&self) -> Memory {
            Memory::default()
        }
        fn restore(&mut self, _: &Memory) {}
        fn seat(&self) -> &Seat {
            &self.seat
        }
        fn state(&self) -> &State {
            &self.state
        }
        fn evaluate(&mut self, _: Batch) -> Result<(u64, u64)> {
            Ok((0, 0))
        }
        fn cards(&self) -> Vec<usize> {
            vec![3]
        }
    }

    fn run(losses: &[f64], stop_at: Option<u64>) -> (Vec<Event>, Result<()>) {
        let data = Dataset::from_floats((0..6).map(|v| v as f32).collect(), &[1], vec![0; 6]).unwrap();
        let options = LoaderOptions {
            world_size: 1,
            cut: Cut::PerRank(4),
            part: Part::Whole,
            shuffle: false,
            drop_last: false,
            seed: 0,
            workers: 0,
            first_epoch: 0,
        };
        let mut loader = Loader::new(Arc::new(data), options).unwrap();
        let mut engine = Scripted { losses: losses.to_vec(), state: State::default(), seat: Seat::default() };
        let mut events = Vec::new();
        let result = RunLoop { warmup: 1, steps: 2, ..RunLoop::default() }.run(
            &mut engine,
            &mut loader,
            &mut |event| {
                let stop = matches!(&event, Event::Step(step) if Some(step.step) == stop_at);
                events.push(event);
                if stop { Err(Error::new(Kind::Interrupted, "stopped")) } else { Ok(()) }
            },
        );
        (events, result)
    }

    #[test]
    fn warm_up_comes_before_measuring_and_every_step_is_told() {
        let (events, result) = run(&[3.0, 2.0, 1.0], None);
        result.unwrap();
        let told: Vec<String> = events
            .iter()
            .map(|event| match event {
                Event::MeasuringStarts => "start".into(),
                Event::Step(step) => format!("{}:{}:{}", step.step, step.loss, step.samples),
                Event::MeasuringEnds => "end".into(),
            })
            .collect();
        assert_eq!(told, ["0:3:4", "start", "1:2:2", "2:1:4", "end"]);
    }

    #[test]
    fn spans_carry_their_step_and_card_and_lie_inside_it() {
        let (events, _) = run(&[3.0, 2.0, 1.0], None);
        let Event::Step(step) = &events[2] else { panic!("{events:?}") };
        assert_eq!(
            step.spans.iter().map(|span| span.phase).collect::<Vec<_>>(),
            [Phase::Data, Phase::Forward]
        );
        for span in &step.spans {
            assert_eq!((span.step, span.card), (1, 3));
            assert!(span.start >= step.start && span.start.0 + span.duration.0 <= step.end.0);
        }
    }

    #[test]
    fn a_loss_that_is_not_a_number_ends_the_run_and_names_the_step() {
        for bad in [f64::NAN, f64::INFINITY] {
            let (events, result) = run(&[1.0, bad, 1.0], None);
            let error = result.unwrap_err();
            assert!(error.to_string().starts_with("step 1: the loss is "), "{error}");
            assert!(error.advice().unwrap().contains("optimizer.lr"));
            assert_eq!(events.len(), 2);
        }
    }

    #[test]
    fn an_observer_can_stop_the_loop() {
        let (events, result) = run(&[1.0, 1.0, 1.0], Some(1));
        assert_eq!(result.unwrap_err().kind(), Kind::Interrupted);
        assert_eq!(events.len(), 3);
    }
}
