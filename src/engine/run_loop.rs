//! The loop every engine runs in: warm-up, then measured steps, the same code for all of them.
//!
//! Prints and stores nothing: it tells an observer what happened, between steps.

use super::Engine;
use crate::Result;
use crate::data::Loader;
use crate::metrics::phase::Span;
use crate::units::Nanos;

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
    /// Real samples of this process.
    pub samples: usize,
    /// Before the batch was asked for.
    pub start: Nanos,
    /// After the update, device idle.
    pub end: Nanos,
    /// Phases of all threads of this process that ended since the last event.
    pub spans: Vec<Span>,
}

/// Steps of one round.
#[derive(Debug, Clone, Copy)]
pub struct RunLoop {
    /// Steps before measuring.
    pub warmup: usize,
    /// Measured steps.
    pub steps: usize,
}

impl RunLoop {
    /// Runs them. An error of the engine, the loader or the observer ends the loop.
    pub fn run(
        &self,
        engine: &mut dyn Engine,
        loader: &mut Loader,
        observe: &mut dyn FnMut(Event) -> Result<()>,
    ) -> Result<()> {
        let _ = (engine, loader, observe);
        todo!()
    }
}
