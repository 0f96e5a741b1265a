//! CUDA cards, through the driver's own interface: what there is, contexts, streams, events, copies.
//!
//! Loaded at run time where there is a driver. Nothing here panics where there is none, looking never
//! opens a context, and no call waits without a deadline. Knows no libtorch: it meets libtorch in the
//! primary context of a card, whose default stream is where libtorch computes.

mod context;
mod driver;
mod stream;
mod timeline;
mod visible;

pub use context::Context;
pub use driver::{CudaCard, Driver, Fault, driver};
pub use stream::{Event, Stream, Timing};
pub use timeline::{Interval, Mark, Timeline};
pub use visible::{Named, Physical, Slice, Visible, visible};
