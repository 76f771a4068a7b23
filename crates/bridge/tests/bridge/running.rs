//! A bridge that runs beside the test.

use std::sync::{Mutex, PoisonError};

use teeline_bridge::{Bridge, BridgeEvent};
use teeline_core::{Epoch, recorder::NoRecorder};
use teeline_sync::atomic::{AtomicBool, Ordering};

/// A bridge under way.
pub(crate) struct Running<'a> {
    events: &'a Mutex<Vec<BridgeEvent>>,
    is_over: &'a dyn Fn() -> bool,
}

impl Running<'_> {
    /// Whether the bridge has told such an event.
    pub(crate) fn has_told(&self, wanted: impl Fn(&BridgeEvent) -> bool) -> bool {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.iter().any(wanted)
    }

    /// Waits until the bridge has told such an event.
    pub(crate) fn wait_for(&self, wanted: impl Fn(&BridgeEvent) -> bool) -> BridgeEvent {
        loop {
            let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(event) = events.iter().find(|event| wanted(event)) {
                return event.clone();
            }
            assert!(!(self.is_over)(), "the bridge ended: {events:#?}");
            drop(events);
            std::thread::yield_now();
        }
    }
}

/// Runs `bridge` while `work` is done, stops it, and returns what it told.
pub(crate) fn while_running(bridge: &Bridge, work: impl FnOnce(&Running<'_>)) -> Vec<BridgeEvent> {
    let stop = AtomicBool::new(false);
    let events = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            bridge.run(&stop, &|_| Box::new(NoRecorder), &|event| {
                let mut events = events.lock().unwrap_or_else(PoisonError::into_inner);
                events.push(event.clone());
            })
        });
        // A panic in `work` must not leave the scope waiting for the bridge.
        let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            work(&Running {
                events: &events,
                is_over: &|| thread.is_finished(),
            });
        }));
        stop.store(true, Ordering::Relaxed);
        thread.join().unwrap().unwrap();
        if let Err(panic) = worked {
            std::panic::resume_unwind(panic);
        }
    });
    events.into_inner().unwrap()
}

pub(crate) fn attached_in(epoch: Epoch) -> impl Fn(&BridgeEvent) -> bool {
    move |event| matches!(event, BridgeEvent::Attached { epoch: attached, .. } if *attached == epoch)
}
