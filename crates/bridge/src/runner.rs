//! The bridge as a whole: opens the log, gives each source a thread, and keeps each attached to whatever ring is there.

use std::{
    fmt, fs,
    os::unix::fs::MetadataExt,
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use teeline_core::{Sequence, recorder::Recorder};
use teeline_log::{
    AppendError, LastStored, Log, LogOptions, Progress, ResumeError, Standstill, Succession, Topic,
    TopicError, Writer, WriterError,
};
use teeline_os::{SystemClock, cpu, hold, sleep, state::StateDir};
use teeline_ring::{AttachError, AttachOptions, Consumer};
use teeline_sync::{
    atomic::{AtomicBool, Ordering},
    idle::Idle,
};

use crate::{
    agent::{Agent, Joint, Surroundings, Work, is_balanced},
    config::{BridgeConfig, SourceConfig, TopicSpec},
    error::{AgentError, BridgeError},
    event::{BridgeEvent, Observer},
    plan::{History, Plan, Rules, Target},
    record,
    relayed::{self, Stand},
};

/// How long a source that cannot start or store waits before it looks again.
const RETRY_EVERY: Duration = Duration::from_millis(50);

/// How often an idle source looks whether its ring is still the one in the directory.
const LOOK_EVERY_NS: u64 = 200_000_000;

/// How long to try while a process that was just killed may still hold a ring's lock.
const TAKEOVER_WAIT: Duration = Duration::from_millis(200);

/// Makes the recorder of a source, on the source's own thread.
pub type Recorders<'a> = dyn Fn(&SourceConfig) -> Box<dyn Recorder> + Sync + 'a;

/// A bridge that is ready to run: its log is open, its topics exist.
#[derive(Debug)]
pub struct Bridge {
    config: BridgeConfig,
    log: Log,
    state: StateDir,
    #[cfg(feature = "test-switches")]
    release_before_durable: bool,
    #[cfg(feature = "test-switches")]
    without_dedup: bool,
}

/// What came of an attempt to attach.
enum Attached<T> {
    Yes(T),
    /// Not now: look again later.
    NotYet(NotYet),
}

/// Why a source cannot start yet.
struct NotYet {
    /// What kind of reason: it is told once, though its words may change with time.
    kind: &'static str,
    reason: String,
}

/// What is in a ring's directory.
enum Look {
    /// The ring that is attached.
    Same,
    /// Another one.
    Another,
    /// None.
    Gone,
}

/// How the work on one ring came to an end.
enum End {
    /// The bridge was told to stop.
    Stopped,
    /// The ring is over: another one may come.
    RingOver,
    /// A relayed ring goes on with another epoch.
    EpochOver,
    /// A topic has got more partitions: the source attaches anew, and what is not stored yet is routed by these.
    Grown,
}

impl Bridge {
    /// Opens the log, or creates it, and creates the topics that are configured and missing.
    ///
    /// # Errors
    /// When the log, a topic or the state directory cannot be opened or is not as configured.
    pub fn open(config: BridgeConfig) -> Result<Self, BridgeError> {
        let options = LogOptions {
            any_filesystem: config.any_filesystem,
            thread_cpus: config.log_cpus.clone(),
            ..LogOptions::default()
        };
        let log = Log::open_or_create(&config.log_root, &options)?;
        Self::with_log(config, log)
    }

    /// A bridge into a log that is open already, whatever `config` says about it.
    ///
    /// # Errors
    /// As [`Bridge::open`].
    pub fn with_log(config: BridgeConfig, log: Log) -> Result<Self, BridgeError> {
        let state = StateDir::open_or_default(config.state_dir.as_deref())?;
        for topic in &config.topics {
            open_topic(&log, topic)?;
        }
        Ok(Self {
            config,
            log,
            state,
            #[cfg(feature = "test-switches")]
            release_before_durable: false,
            #[cfg(feature = "test-switches")]
            without_dedup: false,
        })
    }

    /// Breaks the bridge: it releases the ring before the batch is durable, so that a kill between the two loses
    /// messages. For the test that proves that such a loss is noticed.
    #[cfg(feature = "test-switches")]
    #[doc(hidden)]
    #[must_use]
    pub fn release_before_durable(self) -> Self {
        Self {
            release_before_durable: true,
            ..self
        }
    }

    /// Breaks the log for this bridge: it stores again what it has stored. For the test that proves that such a
    /// duplicate is noticed.
    #[cfg(feature = "test-switches")]
    #[doc(hidden)]
    #[must_use]
    pub fn without_dedup(self) -> Self {
        Self {
            without_dedup: true,
            ..self
        }
    }

    /// What the bridge does.
    #[must_use]
    pub fn config(&self) -> &BridgeConfig {
        &self.config
    }

    /// The log it writes to.
    #[must_use]
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Runs until `stop` is set, then drains the rings and returns. Each source has a thread of its own, on which
    /// `recorders` makes its recorder; `observer` is told what happens. A thread beside them looks after the log.
    ///
    /// # Errors
    /// When a source cannot go on. The others are drained first: what keeps the process alive should not be the half of
    /// it that still works.
    pub fn run(
        &self,
        stop: &AtomicBool,
        recorders: &Recorders<'_>,
        observer: &Observer<'_>,
    ) -> Result<(), BridgeError> {
        let failed = AtomicBool::new(false);
        let stopping = || stop.load(Ordering::Relaxed) || failed.load(Ordering::Relaxed);
        let tend = |source: &SourceConfig| {
            let alarm = Alarm(&failed);
            let tender = Tender {
                bridge: self,
                config: source,
                surroundings: Surroundings {
                    clock: &SystemClock,
                    observer,
                },
                stopping: &stopping,
            };
            tender.run(recorders).map_err(|error| BridgeError::Source {
                ring: source.ring.clone(),
                error: Box::new(error),
            })?;
            alarm.disarm();
            Ok(())
        };
        let results: Vec<Result<(), BridgeError>> = thread::scope(|scope| {
            let tend = &tend;
            let (sources, ended) = mpsc::channel::<()>();
            if let Some(interval) = self.config.upkeep {
                scope.spawn(move || self.look_after_log(interval, &ended, observer));
            }
            let threads: Vec<_> = self
                .config
                .sources
                .iter()
                .map(|source| scope.spawn(move || tend(source)))
                .collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            let results = threads.into_iter().map(join).collect();
            drop(sources);
            results
        });
        results.into_iter().collect()
    }

    /// Does what the topics' files ask for, now and every `interval`, until the sources have ended.
    fn look_after_log(&self, interval: Duration, ended: &Receiver<()>, observer: &Observer<'_>) {
        let mut told = None;
        let mut standstill = Standstill::default();
        loop {
            let jumped = |jump| observer(&BridgeEvent::ClockJumped { jump });
            let error = standstill.error_of(self.log.look_after_and_tell(jumped));
            let reason = error.map(|error| error.to_string());
            if reason != told
                && let Some(reason) = &reason
            {
                observer(&BridgeEvent::Upkeep {
                    reason: reason.clone(),
                });
            }
            told = reason;
            match ended.recv_timeout(interval) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return,
            }
        }
    }
}

/// Tells the other sources that this one is over, however it ended, unless it ended well.
struct Alarm<'a>(&'a AtomicBool);

impl Alarm<'_> {
    fn disarm(self) {
        std::mem::forget(self);
    }
}

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Opens a topic, or creates it if it is missing; an existing one must be as described, or have been before it was given
/// more partitions.
fn open_topic(log: &Log, spec: &TopicSpec) -> Result<Topic, BridgeError> {
    let topic = match log.topic(&spec.name) {
        Err(TopicError::NotFound(_)) => match log.create_topic(&spec.name, &spec.config) {
            // Another process was as quick.
            Err(TopicError::AlreadyExists(_)) => log.topic(&spec.name),
            created => created,
        },
        found => found,
    }?;
    let found = topic.config();
    let grown = topic.growths().into_iter();
    let mut once = grown.map(|growth| growth.before);
    let partitions_differ = found.partitions != spec.config.partitions
        && !once.any(|partitions| partitions == spec.config.partitions);
    let differs = if partitions_differ {
        let partitions = |count| format!("{count} partitions");
        Some((
            partitions(found.partitions),
            partitions(spec.config.partitions),
        ))
    } else if found.durability != spec.config.durability {
        let durability = |durability| format!("durability {durability}");
        Some((
            durability(found.durability),
            durability(spec.config.durability),
        ))
    } else {
        None
    };
    match differs {
        None => Ok(topic),
        Some((found, expected)) => Err(BridgeError::OtherTopic {
            topic: spec.name.clone(),
            found,
            expected,
        }),
    }
}

/// Keeps one source attached to whatever ring is in its directory.
struct Tender<'a> {
    bridge: &'a Bridge,
    config: &'a SourceConfig,
    surroundings: Surroundings<'a>,
    stopping: &'a (dyn Fn() -> bool + Sync),
}

impl Tender<'_> {
    fn run(&self, recorders: &Recorders<'_>) -> Result<(), AgentError> {
        if let Some(cpu) = self.config.cpu
            && let Err(error) = cpu::pin_current(cpu)
        {
            self.warn(&error);
        }
        let mut recorder = recorders(self.config);
        let mut told = None;
        let mut drain_deadline_ns = None;
        // What a stop finds in a ring is drained, whatever epochs it is of.
        let mut in_midst = false;
        while in_midst || !(self.stopping)() {
            in_midst = false;
            // Looked at before: should the ring be replaced right now, that is noticed later.
            let ring_file = self.ring_file();
            let attached = match self.attach(&mut *recorder) {
                Err(error) if error.may_pass() => not_yet("cannot store", error),
                attached => attached,
            }?;
            match attached {
                Attached::Yes(agent) => {
                    told = None;
                    match self.drive(agent, ring_file, &mut drain_deadline_ns)? {
                        End::Stopped => return Ok(()),
                        End::RingOver => {}
                        End::EpochOver | End::Grown => in_midst = true,
                    }
                }
                Attached::NotYet(NotYet { kind, reason }) => {
                    if told != Some(kind) {
                        told = Some(kind);
                        self.tell(&BridgeEvent::Waiting {
                            ring: self.config.ring.clone(),
                            reason,
                        });
                    }
                    sleep(RETRY_EVERY);
                }
            }
        }
        Ok(())
    }

    /// Does the agent's work until its ring is over or the bridge stops.
    fn drive(
        &self,
        mut agent: Agent<'_>,
        ring_file: Option<u64>,
        drain_deadline_ns: &mut Option<u64>,
    ) -> Result<End, AgentError> {
        let clock = self.surroundings.clock;
        let mut idle = Idle::from(self.config.wait);
        let mut blocked = false;
        let mut gone = false;
        let mut look_at_ns = clock.monotonic_ns() + LOOK_EVERY_NS;
        loop {
            // Both are asked before the ring is: what was published before is then seen.
            let stopping = (self.stopping)();
            let retired = agent.is_retired();
            if stopping {
                let limit_ns = u64::try_from(self.bridge.config.drain_limit.as_nanos());
                let now_ns = clock.monotonic_ns();
                let deadline_ns = *drain_deadline_ns
                    .get_or_insert(now_ns.saturating_add(limit_ns.unwrap_or(u64::MAX)));
                if now_ns > deadline_ns {
                    agent.stop(false);
                    return Ok(End::Stopped);
                }
            }
            let work = match agent.do_work() {
                Ok(Work::Frames(frames)) => frames,
                Ok(Work::EpochOver(next)) => {
                    // An earlier one is fenced.
                    if next > agent.epoch() {
                        agent.end_epoch()?;
                        hold::point("bridge.epoch-ended");
                    }
                    return Ok(End::EpochOver);
                }
                Err(error) if error.is_growth() => return Ok(End::Grown),
                Err(error) if error.may_pass() => {
                    if stopping {
                        agent.stop(false);
                        return Ok(End::Stopped);
                    }
                    if !blocked {
                        blocked = true;
                        self.tell(&BridgeEvent::Blocked {
                            source: agent.source().clone(),
                            reason: error.to_string(),
                        });
                    }
                    sleep(RETRY_EVERY);
                    continue;
                }
                Err(error) => return Err(error),
            };
            if blocked {
                blocked = false;
                self.tell(&BridgeEvent::Unblocked {
                    source: agent.source().clone(),
                });
            }
            if work > 0 {
                idle.idle_on(work, agent.ring());
                continue;
            }
            if retired {
                // A relayed session goes on in the next ring.
                if !self.config.relayed {
                    agent.end_epoch()?;
                }
                return Ok(End::RingOver);
            }
            if stopping {
                agent.stop(true);
                return Ok(End::Stopped);
            }
            let now_ns = clock.monotonic_ns();
            if now_ns >= look_at_ns {
                look_at_ns = now_ns + LOOK_EVERY_NS;
                match self.look(ring_file) {
                    Look::Same => {}
                    // The next writer of the source reports that nobody saw how this epoch ended.
                    Look::Another => return Ok(End::RingOver),
                    // While there is no other, this one may still be written to.
                    Look::Gone if gone => {}
                    Look::Gone => {
                        gone = true;
                        self.warn(&"the ring's directory is gone: what is still published there is stored, until a new ring takes its place");
                    }
                }
            }
            idle.idle_on(0, agent.ring());
        }
    }

    /// What has become of the ring in the directory, which nobody retired: directories can be removed by hand.
    fn look(&self, attached: Option<u64>) -> Look {
        match self.ring_file() {
            None => Look::Gone,
            found if found == attached => Look::Same,
            _ => Look::Another,
        }
    }

    /// Tells one ring from another: the number of its file `ring`, which no other file has while that is mapped.
    fn ring_file(&self) -> Option<u64> {
        fs::metadata(self.config.ring.join("ring"))
            .ok()
            .map(|file| file.ino())
    }

    fn attach<'r>(
        &'r self,
        recorder: &'r mut dyn Recorder,
    ) -> Result<Attached<Agent<'r>>, AgentError> {
        let options = AttachOptions {
            takeover_wait: TAKEOVER_WAIT,
            ..AttachOptions::default()
        };
        let (ring, name) = (&self.config.ring, &self.config.consumer);
        let attached = match Consumer::attach(ring, name, &options) {
            // What was written over since is lost, and the agent says so.
            Err(AttachError::Evicted { .. }) => Consumer::rejoin(ring, name, &options),
            attached => attached,
        };
        let mut consumer = match attached {
            Ok(consumer) => consumer,
            Err(error @ AttachError::NotFound { .. }) => return not_yet("no ring", error),
            Err(error @ AttachError::Retired { .. }) => return not_yet("retired", error),
            Err(error @ AttachError::OwnerAlive { .. }) => return not_yet("ring held", error),
            Err(error @ AttachError::TooFast { .. }) => return not_yet("too fast", error),
            Err(error) => return Err(error.into()),
        };
        let source = consumer.ring().source().clone();
        for topic in self.bridge.log.topics().map_err(ResumeError::from)? {
            for partition in topic.partitions() {
                self.settle(&Target {
                    topic: topic.clone(),
                    partition,
                })?;
            }
        }
        let (epoch, begins) = if self.config.relayed {
            let recorded = self.bridge.log.resume(&source)?.progress;
            match relayed::stand(&mut consumer, &self.config.ring, &source, recorded)? {
                Stand::Within(epoch) => (epoch, None),
                Stand::AtFrame { epoch, next } => (epoch, Some(next)),
                Stand::NoSession => {
                    let reason = format!("no session of {source} was relayed into its ring yet");
                    return not_yet("no session", reason);
                }
            }
        } else {
            (consumer.ring().epoch(), None)
        };
        self.bridge.state.observe_epoch(&source, epoch)?;
        // The ring in the directory is of this epoch, so whatever came before it cannot be drained any more.
        let succession = Succession::Abandon;
        let mut writer = match self.bridge.log.writer(&source, epoch, succession) {
            Ok(writer) => writer,
            Err(error @ WriterError::Fenced { .. }) => return not_yet("fenced", error),
            Err(error) => return Err(error.into()),
        };
        #[cfg(feature = "test-switches")]
        if self.bridge.without_dedup {
            writer.turn_dedup_off();
        }
        let progress = writer.progress();
        if !is_balanced(&progress) {
            return Err(AgentError::Unbalanced {
                source_name: source,
                progress,
            });
        }
        if progress.ended && !self.config.relayed {
            let reason = format!("epoch {epoch} of {source} has ended: a new ring must come");
            return not_yet("ended", reason);
        }
        if let Some(ended) = writer.succeeded().filter(|ended| !ended.witnessed) {
            self.tell(&BridgeEvent::EpochEnded {
                source: source.clone(),
                epoch: ended.epoch,
                through: ended.through,
                witnessed: false,
            });
        }
        let (plan, stored) = self.plan(&writer)?;
        if let Some(next) = begins {
            begin_epoch(&mut writer, &mut consumer, next)?;
        }
        self.tell(&BridgeEvent::Attached {
            source,
            epoch,
            through: writer.progress().through,
            released: consumer.last_released(),
        });
        let joint = Joint {
            consumer,
            writer,
            plan,
            stored,
            limits: self.config.batch,
            relayed: self.config.relayed,
            #[cfg(feature = "test-switches")]
            release_before_durable: self.bridge.release_before_durable,
        };
        Ok(Attached::Yes(Agent::new(
            joint,
            self.surroundings,
            recorder,
        )))
    }

    /// Where messages go: as the configuration says, and before that as the log has it recorded. With it, the last record of
    /// the epoch in each partition.
    fn plan(&self, writer: &Writer) -> Result<(Plan, Vec<LastStored>), AgentError> {
        let log = &self.bridge.log;
        let (source, epoch, through) = (writer.source(), writer.epoch(), writer.progress().through);
        let path = record::path(log, source, "routes");
        let recorded = History::read(&path)?;
        let rules = Rules::new(&self.config.routes, self.config.others);
        let mut stored = log.resume(source)?.partitions;
        stored.retain(|last| last.epoch == epoch);
        let newest = stored.iter().map(|last| last.sequence).max();
        let newest = newest.unwrap_or(Sequence::NONE);
        let history = History::go_on(recorded.as_ref(), epoch, through, newest, rules);
        let plan = Plan::resolve(log, &history, &self.config.routes)?;
        if recorded.as_ref() != Some(&history) {
            history.write(&path)?;
            if history.current_from() > Sequence(1) {
                self.tell(&BridgeEvent::RoutesChanged {
                    source: source.clone(),
                    epoch,
                    from: history.current_from(),
                });
            }
        }
        Ok((plan, stored))
    }

    /// Opens a partition for appending, and says what had to be put right. One that was stopped by a failed sync is
    /// opened anew: what was not durable there is still in the ring.
    fn settle(&self, target: &Target) -> Result<(), AgentError> {
        let Target { topic, partition } = target;
        let report = match topic.recover(*partition) {
            Err(stopped @ AppendError::Stopped { .. }) => {
                self.warn(&stopped);
                topic.reopen(*partition)
            }
            report => report,
        }
        .map_err(|error| AgentError::refused(target, error))?;
        if let Some(torn) = &report.torn {
            self.warn(torn);
        }
        if let Some((first, last)) = report.lost {
            let name = topic.name();
            self.warn(&format_args!(
                "topic `{name}` partition {partition}: offsets {first} to {last} may have been answered and are gone"
            ));
        }
        Ok(())
    }

    fn tell(&self, event: &BridgeEvent) {
        (self.surroundings.observer)(event);
    }

    fn warn(&self, what: &dyn fmt::Display) {
        self.tell(&BridgeEvent::Warning {
            ring: self.config.ring.clone(),
            what: what.to_string(),
        });
    }
}

/// Passes over the epoch frame at which a session begins in a relayed ring, with the number `next`. What was in front of
/// that and is not in the log was never asked for.
fn begin_epoch(
    writer: &mut Writer,
    consumer: &mut Consumer,
    next: Sequence,
) -> Result<(), AgentError> {
    hold::point("bridge.epoch-begun");
    let progress = writer.progress();
    if progress.through == Sequence::NONE && next > Sequence(1) {
        let through = Sequence(next.0 - 1);
        writer.store_progress(&Progress {
            through,
            skipped: through.0,
            ..progress
        })?;
        hold::point("bridge.epoch-skipped");
    }
    consumer.release_all();
    hold::point("bridge.epoch-released");
    Ok(())
}

fn not_yet<T>(kind: &'static str, reason: impl fmt::Display) -> Result<Attached<T>, AgentError> {
    Ok(Attached::NotYet(NotYet {
        kind,
        reason: reason.to_string(),
    }))
}
