//! Ctrl-C and its relatives: they raise a flag that every long loop looks at, so that what was measured
//! is written before the program ends.

use crate::error::{Error, Kind, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// The number of the signal that asked to stop, or 0.
pub(crate) fn on_stop_signals() -> Result<Arc<AtomicUsize>> {
    let stop = Arc::new(AtomicUsize::new(0));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register_usize(signal, stop.clone(), signal.unsigned_abs() as usize).map_err(
            |source| Error::new(Kind::Unavailable, format!("cannot listen for signal {signal}: {source}")),
        )?;
    }
    Ok(stop)
}
