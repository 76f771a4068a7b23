//! Signals that ask a verb to stop.

use std::{io, sync::Arc};

use signal_hook::consts::{SIGINT, SIGTERM};
use teeline_sync::atomic::AtomicBool;

use crate::output::Failure;

/// A flag that the first SIGTERM or SIGINT sets; the second ends the process.
pub(crate) fn stop_on_signals() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let listen = || -> io::Result<()> {
        for signal in [SIGTERM, SIGINT] {
            // In this order: the second signal finds the flag that the first has set.
            signal_hook::flag::register_conditional_shutdown(signal, 2, Arc::clone(&stop))?;
            signal_hook::flag::register(signal, Arc::clone(&stop))?;
        }
        Ok(())
    };
    listen().map_err(|error| Failure::new(format_args!("cannot listen to signals: {error}")))?;
    Ok(stop)
}
