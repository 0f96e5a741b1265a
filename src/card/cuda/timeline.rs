//! When a card did what: pairs of events in its stream, put on the host's clock afterwards.
//!
//! Recording never waits. Events tell spans between each other, so each step has an anchor: an event that
//! is recorded while the stream is idle, at a moment that the host reads, too.

use super::{Event, Stream, Timing};
use crate::Result;
use crate::units::Nanos;
use std::sync::{Arc, Mutex, PoisonError};

/// Event times are single floats of milliseconds: after this long they are coarser than a microsecond.
const LONGEST_SINCE_ANCHOR: Nanos = Nanos(8_000_000_000);

/// How far host and card may be apart at an anchor, unless the host is too busy for it.
const ANCHOR_PRECISION: Nanos = Nanos(50_000);
const ANCHOR_TRIES: usize = 5;

/// A moment in a stream that will have a time.
#[derive(Debug, Clone)]
pub struct Mark {
    event: Arc<Lent>,
    anchor: Arc<Anchor>,
}

/// A moment known in both times.
#[derive(Debug)]
struct Anchor {
    event: Lent,
    at: Nanos,
}

/// Events that nobody needs at the moment: making one costs as much as recording several.
#[derive(Debug, Clone, Default)]
struct Pool(Arc<Mutex<Vec<Event>>>);

/// An event that goes back to its pool.
#[derive(Debug)]
struct Lent {
    /// `None` only while it is being dropped.
    event: Option<Event>,
    pool: Pool,
}

impl Pool {
    fn take(&self, stream: &Stream) -> Result<Lent> {
        let idle = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let event = idle.map_or_else(|| Event::new(stream.context(), Timing::Yes), Ok)?;
        Ok(Lent { event: Some(event), pool: self.clone() })
    }
}

impl std::ops::Deref for Lent {
    type Target = Event;

    fn deref(&self) -> &Event {
        match &self.event {
            Some(event) => event,
            None => unreachable!("taken out by drop alone"),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.pool.0.lock().unwrap_or_else(PoisonError::into_inner).extend(self.event.take());
    }
}

/// What lies between two marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interval {
    /// CLOCK_MONOTONIC.
    pub start: Nanos,
    /// CLOCK_MONOTONIC.
    pub end: Nanos,
}

impl Mark {
    /// From this mark to `end`; `None` while the card has not come to it.
    pub fn until(&self, end: &Self) -> Result<Option<Interval>> {
        if !end.event.is_reached()? || !self.event.is_reached()? {
            return Ok(None);
        }
        let at = |mark: &Self| -> Result<Nanos> {
            Ok(Nanos(mark.anchor.at.0 + mark.event.since(&mark.anchor.event)?.0))
        };
        let start = at(self)?;
        // Of different anchors, the two may come out a little reversed.
        Ok(Some(Interval { start, end: at(end)?.max(start) }))
    }
}

/// The marks of one stream.
#[derive(Debug)]
pub struct Timeline {
    stream: Arc<Stream>,
    anchor: Option<Arc<Anchor>>,
    pool: Pool,
}

impl Timeline {
    /// Of this stream.
    pub fn new(stream: Arc<Stream>) -> Self {
        Self { stream, anchor: None, pool: Pool::default() }
    }

    /// The stream it marks.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Ties the card's time to the host's anew. The stream must be idle: then the event happens when the
    /// host records it.
    pub fn anchor(&mut self) -> Result<()> {
        let event = self.pool.take(&self.stream)?;
        let mut at = Nanos::now();
        // Once more where something came between: the event would be older than the moment read.
        for _ in 0..ANCHOR_TRIES {
            let before = Nanos::now();
            self.stream.record(&event)?;
            at = Nanos::now();
            if at.since(before) < ANCHOR_PRECISION {
                break;
            }
        }
        self.anchor = Some(Arc::new(Anchor { event, at }));
        Ok(())
    }

    /// Marks the end of what was enqueued so far.
    pub fn mark(&mut self) -> Result<Mark> {
        let stale = |anchor: &Arc<Anchor>| Nanos::now().since(anchor.at) > LONGEST_SINCE_ANCHOR;
        if self.anchor.as_ref().is_none_or(stale) {
            // Better late by what is enqueued than coarse.
            self.anchor()?;
        }
        let event = self.pool.take(&self.stream)?;
        self.stream.record(&event)?;
        let Some(anchor) = self.anchor.clone() else { unreachable!("anchored above") };
        Ok(Mark { event: Arc::new(event), anchor })
    }
}
