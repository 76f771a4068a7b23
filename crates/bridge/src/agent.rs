//! One source on its way into the log: the duty cycle, and what it guarantees.
//!
//! A cycle takes messages from the ring without releasing them, appends them to their partitions, and when all of that
//! is durable stores the source's progress; only then it releases the ring. Whatever is killed between two of these
//! steps, the messages come again, and are recognised: at or below `through` by the progress, above it by the log.

use std::fmt;

use teeline_core::{
    Epoch, Identity, Sequence, SourceId, SourceName,
    recorder::{Hop, Recorder},
    time::Clock,
};
use teeline_log::{Answer, LastStored, Progress, Writer};
use teeline_os::hold;
use teeline_ring::{Consumer, Frame, Message};

use crate::{
    batch::Batch,
    config::BatchLimits,
    error::AgentError,
    event::{BridgeEvent, LossCause, Observer},
    plan::{Destination, Plan, Target},
};

/// Most bytes that are appended at once: few enough for the smallest sensible segments, and enough that the sync
/// dominates.
const APPEND_BYTES_MAX: usize = 1 << 20;

/// What an agent joins: a consumer of the ring, the source's writer in the log, and where messages go.
#[derive(Debug)]
pub(crate) struct Joint {
    pub(crate) consumer: Consumer,
    pub(crate) writer: Writer,
    pub(crate) plan: Plan,
    /// The last record of this epoch in each partition that has one: the progress may be behind it.
    pub(crate) stored: Vec<LastStored>,
    pub(crate) limits: BatchLimits,
    /// Whether the ring's epochs are those of its epoch frames.
    pub(crate) relayed: bool,
    /// Breaks the rule that makes the bridge safe, for a test that proves that the break is noticed.
    #[cfg(feature = "test-switches")]
    pub(crate) release_before_durable: bool,
}

/// How an agent tells the time, and whom it tells what.
#[derive(Clone, Copy)]
pub(crate) struct Surroundings<'a> {
    pub(crate) clock: &'a dyn Clock,
    pub(crate) observer: &'a Observer<'a>,
}

/// The agent of one source in one epoch.
pub(crate) struct Agent<'a> {
    joint: Joint,
    surroundings: Surroundings<'a>,
    recorder: &'a mut dyn Recorder,
    source: SourceName,
    targets: Vec<Target>,
    cycle: Cycle,
    /// The epoch of the frame that stands behind what was taken, if that is an epoch frame.
    at_epoch: Option<Epoch>,
    /// Why nothing more can be taken, once what was taken before is stored.
    halt: Option<AgentError>,
}

/// What a duty cycle came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// So many frames were taken through; 0 when the ring had none.
    Frames(usize),
    /// A relayed ring goes on with another epoch, this one. All in front of that is stored and released.
    EpochOver(Epoch),
}

/// What a frame was taken as.
enum Taken {
    /// Part of the cycle.
    Frame,
    /// What follows belongs to this epoch.
    Epoch(Epoch),
}

/// What was taken from the ring and is not yet released.
#[derive(Debug)]
struct Cycle {
    /// One per target.
    batches: Vec<Batch>,
    /// What the source's progress is when all of it is durable.
    progress: Progress,
    /// The last sequence taken.
    taken: Sequence,
    frames: usize,
    payload_bytes: usize,
}

impl fmt::Debug for Agent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("joint", &self.joint)
            .field("cycle", &self.cycle)
            .finish_non_exhaustive()
    }
}

impl<'a> Agent<'a> {
    pub(crate) fn new(
        joint: Joint,
        surroundings: Surroundings<'a>,
        recorder: &'a mut dyn Recorder,
    ) -> Self {
        let targets = joint.plan.targets();
        let progress = joint.writer.progress();
        let released = joint.consumer.last_released();
        let mut cycle = Cycle {
            batches: targets
                .iter()
                .map(|target| Batch::behind(target.last_of(&joint.stored)))
                .collect(),
            progress,
            taken: released,
            frames: 0,
            payload_bytes: 0,
        };
        let source = joint.writer.source().clone();
        if released > progress.through {
            let first = progress.through.next();
            cycle.lose(&targets, source.id(), first, released);
            (surroundings.observer)(&BridgeEvent::Lost {
                source: source.clone(),
                epoch: progress.epoch,
                first,
                last: released,
                cause: LossCause::ReleasedBefore,
            });
        }
        Self {
            joint,
            surroundings,
            recorder,
            source,
            targets,
            cycle,
            at_epoch: None,
            halt: None,
        }
    }

    /// One duty cycle.
    ///
    /// # Errors
    /// After one that may pass, call again later: the cycle goes on where it was. After any other the agent is of no
    /// further use. In both cases what it has not stored is still in the ring.
    pub(crate) fn do_work(&mut self) -> Result<Work, AgentError> {
        if self.cycle.frames == 0 {
            self.take()?;
        }
        let over = self.at_epoch.filter(|_| self.cycle.frames == 0);
        #[cfg(feature = "test-switches")]
        if self.joint.release_before_durable {
            self.joint.consumer.release(self.cycle.taken)?;
        }
        let frames = self.cycle.frames;
        if frames > 0 {
            hold::point("bridge.peeked");
        }
        self.append()?;
        self.store_progress(self.cycle.progress)?;
        if frames > 0 {
            hold::point("bridge.progress-stored");
            self.joint.consumer.release(self.cycle.taken)?;
            hold::point("bridge.released");
        }
        self.cycle.clear();
        Ok(over.map_or(Work::Frames(frames), Work::EpochOver))
    }

    /// Whether the ring was removed or replaced. Asked before a cycle that finds nothing, it means that the epoch is
    /// over.
    pub(crate) fn is_retired(&self) -> bool {
        self.joint.consumer.is_retired()
    }

    /// Records that nothing of this epoch will come any more.
    pub(crate) fn end_epoch(mut self) -> Result<(), AgentError> {
        let progress = Progress {
            ended: true,
            ..self.cycle.progress
        };
        self.store_progress(progress)?;
        self.tell(BridgeEvent::EpochEnded {
            source: self.source.clone(),
            epoch: progress.epoch,
            through: progress.through,
            witnessed: true,
        });
        Ok(())
    }

    /// The ring whose messages it waits for.
    pub(crate) fn ring(&self) -> &Consumer {
        &self.joint.consumer
    }

    /// Lets go of the source.
    pub(crate) fn stop(self, drained: bool) {
        self.tell(BridgeEvent::Stopped {
            source: self.source.clone(),
            progress: self.joint.writer.progress(),
            drained,
        });
    }

    pub(crate) fn source(&self) -> &SourceName {
        &self.source
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.cycle.progress.epoch
    }

    fn tell(&self, event: BridgeEvent) {
        (self.surroundings.observer)(&event);
    }

    /// Takes frames until a limit is reached, the ring is empty, or something stands in the way.
    fn take(&mut self) -> Result<(), AgentError> {
        if let Some(halt) = self.halt.take() {
            return Err(halt);
        }
        if self.at_epoch.is_some() {
            self.take_epoch();
            return Ok(());
        }
        let limits = self.joint.limits;
        let mut taker = Taker {
            plan: &self.joint.plan,
            targets: &self.targets,
            relayed: self.joint.relayed,
            source: &self.source,
            source_id: self.source.id(),
            surroundings: self.surroundings,
            recorder: self.recorder,
            cycle: &mut self.cycle,
        };
        while taker.cycle.frames < limits.messages && taker.cycle.payload_bytes < limits.bytes {
            let mut accepted = Ok(Taken::Frame);
            let found = self
                .joint
                .consumer
                .peek(1, |frame| accepted = taker.accept(&frame));
            match (found, accepted) {
                (Ok(0), _) => break,
                (Ok(_), Ok(Taken::Frame)) => taker.cycle.frames += 1,
                (Ok(_), Ok(Taken::Epoch(epoch))) => {
                    self.at_epoch = Some(epoch);
                    break;
                }
                (Ok(_), Err(error)) => {
                    self.halt = Some(error);
                    break;
                }
                (Err(error), _) => {
                    self.halt = Some(error.into());
                    break;
                }
            }
        }
        match self.halt.take() {
            Some(halt) if self.cycle.frames == 0 => Err(halt),
            halt => {
                self.halt = halt;
                if self.cycle.frames == 0 {
                    self.take_epoch();
                }
                Ok(())
            }
        }
    }

    /// Takes the epoch frame that the ring goes on with, if that says again which epoch is on.
    fn take_epoch(&mut self) {
        if self.at_epoch == Some(self.cycle.progress.epoch) {
            self.at_epoch = None;
            self.cycle.frames = 1;
        }
    }

    /// Brings what was taken into the log.
    fn append(&mut self) -> Result<(), AgentError> {
        for (target, batch) in self.targets.iter().zip(&mut self.cycle.batches) {
            let bytes_max = APPEND_BYTES_MAX.min(target.topic.config().segment_bytes as usize / 2);
            loop {
                let entries = batch.next(bytes_max);
                let count = entries.len();
                if count == 0 {
                    break;
                }
                let records: Vec<_> = entries.iter().map(|entry| batch.record(entry)).collect();
                let answer = self
                    .joint
                    .writer
                    .append(&target.topic, target.partition, &records)
                    .map_err(|error| AgentError::refused(target, error))?;
                let now_ns = self.surroundings.clock.monotonic_ns();
                for (entry, answer) in entries.iter().zip(&answer.answers) {
                    let count = match answer {
                        Answer::Stored { .. } => &mut self.cycle.progress.routed,
                        Answer::Duplicate { .. } => &mut self.cycle.progress.duplicate,
                        // The record that was refused says why; the others of its batch only that they were not stored.
                        Answer::Failed => continue,
                        answer => {
                            let identity = Identity {
                                source: self.source.id(),
                                epoch: self.cycle.progress.epoch,
                                sequence: entry.sequence,
                            };
                            return Err(unexpected(target, identity, *answer));
                        }
                    };
                    // A gap is counted as lost when it is found, once and not per partition.
                    if !entry.is_gap() {
                        *count += 1;
                    }
                }
                if answer.durability.is_synced() {
                    for published_ns in entries.iter().filter_map(|entry| entry.published_ns) {
                        self.recorder
                            .record_span(Hop::Durable, published_ns, now_ns);
                    }
                }
                batch.advance(count);
                hold::point("bridge.appended");
            }
        }
        Ok(())
    }

    fn store_progress(&mut self, progress: Progress) -> Result<(), AgentError> {
        assert!(
            is_balanced(&progress),
            "every sequence is counted once: {progress:?}"
        );
        if progress == self.joint.writer.progress() {
            return Ok(());
        }
        Ok(self.joint.writer.store_progress(&progress)?)
    }
}

/// Whether each sequence that is accounted for is counted once.
pub(crate) fn is_balanced(progress: &Progress) -> bool {
    let Progress {
        through,
        routed,
        skipped,
        duplicate,
        lost,
        ..
    } = *progress;
    let sum: u128 = [routed, skipped, duplicate, lost]
        .map(u128::from)
        .iter()
        .sum();
    sum == u128::from(through.0)
}

/// What looks at each frame as it is taken.
struct Taker<'t> {
    plan: &'t Plan,
    targets: &'t [Target],
    relayed: bool,
    source: &'t SourceName,
    source_id: SourceId,
    surroundings: Surroundings<'t>,
    recorder: &'t mut dyn Recorder,
    cycle: &'t mut Cycle,
}

impl Taker<'_> {
    fn accept(&mut self, frame: &Frame<'_>) -> Result<Taken, AgentError> {
        match frame {
            Frame::Message(message) => self.message(message)?,
            Frame::Gap { first, last } => {
                self.notice_hole_before(*first);
                let first = self.cycle.progress.through.next().max(*first);
                if first <= *last {
                    self.lost(first, *last, LossCause::GapFrame);
                }
                self.cycle.taken = *last;
            }
            Frame::Epoch { epoch, .. } if self.relayed => return Ok(Taken::Epoch(*epoch)),
            Frame::Epoch { .. } => {
                return Err(AgentError::EpochFrame {
                    source_name: self.source.clone(),
                });
            }
        }
        Ok(Taken::Frame)
    }

    fn message(&mut self, message: &Message<'_>) -> Result<(), AgentError> {
        let sequence = message.sequence;
        if sequence <= self.cycle.progress.through {
            // Accounted for by a bridge that was stopped before it could release it.
            self.cycle.taken = sequence;
            return Ok(());
        }
        if let Some(published_ns) = message.timestamp_ns {
            let now_ns = self.surroundings.clock.monotonic_ns();
            self.recorder
                .record_span(Hop::RingHop, published_ns, now_ns);
        }
        let identity = Identity {
            source: self.source_id,
            epoch: self.cycle.progress.epoch,
            sequence,
        };
        let kind = message.kind.0;
        let destination = self.plan.destination(identity, kind, message.payload);
        if destination == Destination::Unrouted {
            return Err(AgentError::Unrouted {
                source_name: self.source.clone(),
                epoch: identity.epoch,
                sequence,
                kind,
            });
        }
        self.notice_hole_before(sequence);
        match destination {
            Destination::Target { index, key } => {
                let key = key.unwrap_or_else(|_| {
                    (self.surroundings.observer)(&BridgeEvent::KeyOutOfReach {
                        source: self.source.clone(),
                        epoch: identity.epoch,
                        sequence,
                        topic: self.targets[index].topic.name().clone(),
                    });
                    None
                });
                let payload = message.payload;
                self.cycle.payload_bytes += payload.len();
                self.cycle.batches[index].push_message(
                    sequence,
                    kind,
                    key,
                    payload,
                    message.timestamp_ns,
                );
            }
            Destination::Skipped | Destination::Unrouted => self.cycle.progress.skipped += 1,
        }
        self.cycle.progress.through = sequence;
        self.cycle.taken = sequence;
        Ok(())
    }

    /// Everything between what was accounted for and `sequence` is missing.
    fn notice_hole_before(&mut self, sequence: Sequence) {
        let expected = self.cycle.progress.through.next();
        if sequence > expected {
            self.lost(expected, Sequence(sequence.0 - 1), LossCause::Hole);
        }
    }

    fn lost(&mut self, first: Sequence, last: Sequence, cause: LossCause) {
        self.cycle.lose(self.targets, self.source_id, first, last);
        (self.surroundings.observer)(&BridgeEvent::Lost {
            source: self.source.clone(),
            epoch: self.cycle.progress.epoch,
            first,
            last,
            cause,
        });
    }
}

impl Cycle {
    /// `first` to `last` never come: every partition is told that could have been theirs and has none of them. They count
    /// as lost, also those that a bridge stored which was killed before it could say so: they are not looked at again.
    fn lose(&mut self, targets: &[Target], source: SourceId, first: Sequence, last: Sequence) {
        let identity = Identity {
            source,
            epoch: self.progress.epoch,
            sequence: last,
        };
        for (target, batch) in targets.iter().zip(&mut self.batches) {
            if target.partition.0 < target.topic.partitions_of(&identity) {
                batch.push_gap(first, last);
            }
        }
        self.progress.lost += last.0 - first.0 + 1;
        self.progress.through = last;
    }

    fn clear(&mut self) {
        for batch in &mut self.batches {
            batch.clear();
        }
        self.frames = 0;
        self.payload_bytes = 0;
    }
}

#[cold]
fn unexpected(target: &Target, identity: Identity, answer: Answer) -> AgentError {
    let topic = target.topic.name().clone();
    let partition = target.partition;
    match answer {
        Answer::Conflict { offset } => AgentError::Conflict {
            identity,
            topic,
            partition,
            offset,
        },
        answer => AgentError::Refused {
            identity,
            topic,
            partition,
            answer,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use teeline_core::{Epoch, Partition, Sequence, SourceName, recorder::NoRecorder};
    use teeline_log::{
        Log, LogOptions, NewRecord, Progress, Succession, TopicConfig, fake::FakeDisk,
    };
    use teeline_os::SystemClock;
    use teeline_ring::{Frame, Message, MessageType};

    use super::{Cycle, Surroundings, Taker, is_balanced};
    use crate::{
        batch::Batch,
        config::{Others, RouteConfig, Types},
        event::{BridgeEvent, LossCause},
        plan::{History, Plan, Rules, Target},
        route::KeyRule,
    };

    const EPOCH: Epoch = Epoch(1);

    fn message(sequence: u64) -> Frame<'static> {
        Frame::Message(Message {
            sequence: Sequence(sequence),
            kind: MessageType(1),
            payload: b"fill",
            timestamp_ns: None,
        })
    }

    fn gap(first: u64, last: u64) -> Frame<'static> {
        Frame::Gap {
            first: Sequence(first),
            last: Sequence(last),
        }
    }

    /// Hands `frames` to a taker that has accounted for everything through 10; returns the progress, what was lost and
    /// why, and the numbers that the one partition gets.
    fn take(frames: &[Frame<'_>]) -> (Progress, Vec<(u64, u64, LossCause)>, Vec<u64>) {
        let log =
            Log::open_or_create_on(FakeDisk::new(1).process(), "/log", &LogOptions::default())
                .unwrap();
        let topic = "fills".parse().unwrap();
        let config = TopicConfig {
            segment_bytes: 1 << 20,
            ..TopicConfig::default()
        };
        log.create_topic(&topic, &config).unwrap();
        let routes = [RouteConfig {
            types: Types::All,
            topic,
            key: KeyRule::None,
            weaker_durability: false,
        }];
        let rules = Rules::new(&routes, Others::Stop);
        let history = History::go_on(None, EPOCH, Sequence::NONE, Sequence::NONE, rules);
        let plan = Plan::resolve(&log, &history, &routes).unwrap();
        let losses = Mutex::new(Vec::new());
        let observer = |event: &BridgeEvent| match event {
            BridgeEvent::Lost {
                first, last, cause, ..
            } => {
                losses.lock().unwrap().push((first.0, last.0, *cause));
            }
            other => panic!("{other}"),
        };
        let source: SourceName = "gw1.fills".parse().unwrap();
        let mut cycle = Cycle {
            batches: vec![Batch::behind(Sequence::NONE)],
            progress: Progress {
                through: Sequence(10),
                routed: 10,
                ..Progress::start(EPOCH)
            },
            taken: Sequence::NONE,
            frames: 0,
            payload_bytes: 0,
        };
        let mut taker = Taker {
            plan: &plan,
            targets: &plan.targets(),
            relayed: false,
            source: &source,
            source_id: source.id(),
            surroundings: Surroundings {
                clock: &SystemClock,
                observer: &observer,
            },
            recorder: &mut NoRecorder,
            cycle: &mut cycle,
        };
        for frame in frames {
            taker.accept(frame).unwrap();
        }
        let taken = cycle.batches[0].next(usize::MAX);
        let numbers = taken.iter().map(|entry| entry.sequence.0).collect();
        let messages = taken.iter().filter(|entry| !entry.is_gap()).count();
        cycle.progress.routed += messages as u64;
        assert!(is_balanced(&cycle.progress), "{:?}", cycle.progress);
        (cycle.progress, losses.into_inner().unwrap(), numbers)
    }

    #[test]
    fn a_gap_goes_to_the_partitions_that_its_numbers_could_have_gone_to() {
        let log =
            Log::open_or_create_on(FakeDisk::new(1).process(), "/log", &LogOptions::default())
                .unwrap();
        let source: SourceName = "gw1.fills".parse().unwrap();
        let mut topic = log
            .create_topic(&"fills".parse().unwrap(), &TopicConfig::default())
            .unwrap();
        let mut writer = log.writer(&source, EPOCH, Succession::AfterDrain).unwrap();
        let record = NewRecord::data(Sequence(10), 1, None, b"fill");
        writer.append(&topic, Partition(0), &[record]).unwrap();
        topic.grow(2, false).unwrap();
        let targets: Vec<_> = topic
            .partitions()
            .map(|partition| Target {
                topic: topic.clone(),
                partition,
            })
            .collect();
        let mut cycle = Cycle {
            batches: targets
                .iter()
                .map(|_| Batch::behind(Sequence::NONE))
                .collect(),
            progress: Progress::start(EPOCH),
            taken: Sequence::NONE,
            frames: 0,
            payload_bytes: 0,
        };
        cycle.lose(&targets, source.id(), Sequence(1), Sequence(10));
        cycle.lose(&targets, source.id(), Sequence(11), Sequence(12));
        let gaps = cycle.batches.iter().map(|batch| {
            let gaps = batch.next(usize::MAX).iter();
            gaps.map(|gap| gap.sequence.0).collect::<Vec<_>>()
        });
        assert_eq!(gaps.collect::<Vec<_>>(), [vec![10, 12], vec![12]]);
    }

    #[test]
    fn a_hole_is_reported_with_its_range_and_becomes_a_gap() {
        let (progress, losses, numbers) =
            take(&[message(11), message(15), gap(17, 18), message(19)]);
        let hole = |first, last| (first, last, LossCause::Hole);
        let said = (17, 18, LossCause::GapFrame);
        assert_eq!(losses, [hole(12, 14), hole(16, 16), said]);
        assert_eq!(numbers, [11, 14, 15, 16, 18, 19]);
        assert_eq!((progress.through, progress.lost), (Sequence(19), 6));
    }

    #[test]
    fn what_comes_again_is_passed_over_and_a_gap_counts_only_what_is_new_of_it() {
        let (progress, losses, numbers) = take(&[message(8), gap(9, 10), message(11)]);
        assert_eq!((losses, numbers), (vec![], vec![11]));
        assert_eq!((progress.through, progress.lost), (Sequence(11), 0));
        let (progress, losses, numbers) = take(&[gap(8, 12), message(13)]);
        assert_eq!(losses, [(11, 12, LossCause::GapFrame)]);
        assert_eq!(numbers, [12, 13]);
        assert_eq!((progress.through, progress.lost), (Sequence(13), 2));
    }
}
