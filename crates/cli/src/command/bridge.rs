//! `teeline bridge`: tee rings into the log.

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use clap::Subcommand;
use serde::Serialize;
use teeline_bridge::{Bridge, BridgeConfig, BridgeEvent, config::EXAMPLE};
use teeline_core::{
    SourceName,
    recorder::{NoRecorder, Recorder},
};
use teeline_latency::CoreRecorder;

#[cfg(feature = "test-switches")]
use crate::command::demo::Rule;
use crate::{
    command::signals::{STOP, stop_on_signals},
    output::{Answer, Failure, Output, complain},
};

/// The verbs of `teeline bridge`.
#[derive(Debug, Subcommand)]
pub(crate) enum BridgeVerb {
    /// Run in the foreground until SIGTERM or SIGINT, which drain; a second one ends at once.
    #[command(after_long_help = format!("A configuration with every key:\n\n{EXAMPLE}"))]
    Run {
        /// The configuration, a TOML file.
        #[arg(long)]
        config: PathBuf,
        /// Record the latencies of the one source into this histogram page of another process.
        #[arg(long, value_name = "NAME")]
        latency_page: Option<String>,
    },
}

impl BridgeVerb {
    /// Does what the verb says.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let Self::Run {
            config,
            latency_page,
        } = self;
        let config = BridgeConfig::read(&config).map_err(Failure::new)?;
        if latency_page.is_some() && config.sources.len() > 1 {
            return Err(Failure::new(
                "--latency-page takes the latencies of one source, and the configuration has several: run a bridge for each",
            ));
        }
        let stop = stop_on_signals(&STOP)?;
        let bridge = Bridge::open(config).map_err(Failure::new)?;
        #[cfg(feature = "test-switches")]
        let bridge = match Rule::broken() {
            Some(Rule::Dedup) => bridge.without_dedup(),
            Some(Rule::Release) => bridge.release_before_durable(),
            Some(Rule::Transaction) | None => bridge,
        };
        let out = Mutex::new(out);
        let print = |event: &BridgeEvent| {
            let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
            // What the bridge is for matters more than who listens: it goes on without.
            drop(print(event, &mut out));
        };
        bridge
            .run(&stop, &|_source| recorder(latency_page.as_deref()), &print)
            .map_err(Failure::new)?;
        Ok(Answer::Fine)
    }
}

/// What latencies are recorded with. A page that is not to be had is no reason to leave messages where they are.
fn recorder(latency_page: Option<&str>) -> Box<dyn Recorder> {
    match latency_page.map(CoreRecorder::attach) {
        None => Box::new(NoRecorder),
        Some(Ok(recorder)) => Box::new(recorder),
        Some(Err(error)) => {
            complain(&error);
            Box::new(NoRecorder)
        }
    }
}

fn print(event: &BridgeEvent, out: &mut Output) -> Result<(), Failure> {
    if out.is_json() {
        out.object(&EventLine::new(event))?;
    } else {
        out.line(event)?;
    }
    out.flush()
}

/// An event for programs: its name, the fields it has, and the sentence that people are told.
#[derive(Default, Serialize)]
struct EventLine {
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ring: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    topic: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    through: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    released: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    witnessed: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    drained: Option<bool>,
    /// By how many nanoseconds the clock jumped; negative if it was set back.
    #[serde(skip_serializing_if = "Option::is_none")]
    jump_ns: Option<i64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    counts: Option<Counts>,
    text: String,
}

/// What became of the sequences of an epoch: `through` is their sum.
#[derive(Serialize)]
struct Counts {
    routed: u64,
    skipped: u64,
    duplicate: u64,
    lost: u64,
}

impl EventLine {
    fn new(event: &BridgeEvent) -> Self {
        let text = event.to_string();
        let of = |name, source: &SourceName| Self {
            event: name,
            source: Some(source.to_string()),
            text: text.clone(),
            ..Self::default()
        };
        let at = |name, ring: &Path| Self {
            event: name,
            ring: Some(ring.display().to_string()),
            text: text.clone(),
            ..Self::default()
        };
        match event {
            BridgeEvent::Waiting { ring, .. } => at("waiting", ring),
            BridgeEvent::Warning { ring, .. } => at("warning", ring),
            BridgeEvent::Attached {
                source,
                epoch,
                through,
                released,
            } => Self {
                epoch: Some(epoch.0),
                through: Some(through.0),
                released: Some(released.0),
                ..of("attached", source)
            },
            BridgeEvent::KeyOutOfReach {
                source,
                epoch,
                sequence,
                topic,
            } => Self {
                epoch: Some(epoch.0),
                sequence: Some(sequence.0),
                topic: Some(topic.to_string()),
                ..of("key_out_of_reach", source)
            },
            BridgeEvent::Lost {
                source,
                epoch,
                first,
                last,
                ..
            } => Self {
                epoch: Some(epoch.0),
                first: Some(first.0),
                last: Some(last.0),
                ..of("lost", source)
            },
            BridgeEvent::Blocked { source, .. } => of("blocked", source),
            BridgeEvent::Unblocked { source } => of("unblocked", source),
            BridgeEvent::EpochEnded {
                source,
                epoch,
                through,
                witnessed,
            } => Self {
                epoch: Some(epoch.0),
                through: Some(through.0),
                witnessed: Some(*witnessed),
                ..of("epoch_ended", source)
            },
            BridgeEvent::RoutesChanged {
                source,
                epoch,
                from,
            } => Self {
                epoch: Some(epoch.0),
                first: Some(from.0),
                ..of("routes_changed", source)
            },
            BridgeEvent::Upkeep { .. } => Self {
                event: "upkeep",
                text: text.clone(),
                ..Self::default()
            },
            BridgeEvent::ClockJumped { jump } => Self {
                event: "clock_jumped",
                jump_ns: Some(jump.by_ns),
                text: text.clone(),
                ..Self::default()
            },
            BridgeEvent::Stopped {
                source,
                progress,
                drained,
            } => Self {
                epoch: Some(progress.epoch.0),
                through: Some(progress.through.0),
                drained: Some(*drained),
                counts: Some(Counts {
                    routed: progress.routed,
                    skipped: progress.skipped,
                    duplicate: progress.duplicate,
                    lost: progress.lost,
                }),
                ..of("stopped", source)
            },
        }
    }
}
