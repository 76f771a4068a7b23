//! Signals that ask a verb to stop.

use std::{io, sync::Arc};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use teeline_sync::atomic::AtomicBool;

use crate::output::Failure;

/// Those that a verb with nothing to tidy up stops for.
pub(crate) const STOP: [i32; 2] = [SIGTERM, SIGINT];

/// Those, and the end of the terminal, for a verb that would leave processes or files behind.
pub(crate) const STOP_AND_TIDY: [i32; 3] = [SIGHUP, SIGTERM, SIGINT];

/// Has a write beyond the longest file that the process may make (`ulimit -f`) fail and be told, as on a full disk. It would
/// end the process, in the middle of what it does and without a word.
pub(crate) fn survive_file_size_limit() {
    // If the kernel refuses, it ends the process as it did.
    drop(signal_hook::flag::register(
        SIGXFSZ,
        Arc::new(AtomicBool::new(false)),
    ));
}

/// A flag that the first of `signals` sets. The same one a second time ends the process.
pub(crate) fn stop_on_signals(signals: &[i32]) -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let listen = || -> io::Result<()> {
        for &signal in signals {
            // A terminal that goes may send two different ones, and the second is no reason to hurry.
            let came = Arc::new(AtomicBool::new(false));
            // In this order: the second time, the flag is set that the first time has set.
            signal_hook::flag::register_conditional_shutdown(signal, 2, Arc::clone(&came))?;
            signal_hook::flag::register(signal, came)?;
            signal_hook::flag::register(signal, Arc::clone(&stop))?;
        }
        Ok(())
    };
    listen().map_err(|error| Failure::new(format_args!("cannot listen to signals: {error}")))?;
    Ok(stop)
}
