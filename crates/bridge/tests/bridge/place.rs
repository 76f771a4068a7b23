//! A ring, a log and a state directory of a test's own, and what should be in the log.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use teeline_bridge::{Bridge, BridgeError, BridgeEvent};
use teeline_core::{
    Epoch, Offset, Partition, Sequence, SourceName, recorder::NoRecorder, time::Clock,
};
use teeline_log::{Control, Log, LogOptions, Progress};
use teeline_os::{SystemClock, state::StateDir};
use teeline_ring::{AttachOptions, Consumer, MessageType, Producer, RingOptions};
use teeline_sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

pub(crate) const SOURCE: &str = "gw1.fills";

/// Types 1 and 2 go to `fills` by account, type 3 to `orders` in turn, all others are skipped.
pub(crate) const ROUTES: &str = r#"
    others = "skip"
    [[source.route]]
    types = [1, 2]
    topic = "fills"
    key = { offset = 0, prefix = "u8" }
    [[source.route]]
    types = [3]
    topic = "orders"
"#;

pub(crate) struct Place {
    base: TempDir,
    pub(crate) state: StateDir,
}

/// A message as it was published, or as it stands in the log.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Fact {
    pub(crate) epoch: Epoch,
    pub(crate) sequence: Sequence,
    pub(crate) kind: u16,
    pub(crate) value: Vec<u8>,
}

type ByPlace<T> = BTreeMap<(String, Partition), Vec<T>>;

/// What is in the log: messages and gaps per topic and partition, in their order there.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) messages: ByPlace<Fact>,
    /// Epoch, first and last.
    pub(crate) gaps: ByPlace<(Epoch, Sequence, Sequence)>,
    /// Offsets, first and last, that were given out and are not durable.
    pub(crate) lost: ByPlace<(Offset, Offset)>,
}

impl Place {
    pub(crate) fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        let state = StateDir::open(base.path().join("state")).unwrap();
        Self { base, state }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.base.path().join(name)
    }

    pub(crate) fn ring(&self) -> PathBuf {
        self.path(SOURCE)
    }

    pub(crate) fn source(&self) -> SourceName {
        SOURCE.parse().unwrap()
    }

    pub(crate) fn create_ring(&self) -> Epoch {
        self.create_ring_by(&self.state, &SystemClock)
    }

    pub(crate) fn create_ring_by(&self, state: &StateDir, clock: &dyn Clock) -> Epoch {
        RingOptions::new(self.source())
            .capacity(1 << 16)
            .consumer("bridge".parse().unwrap())
            .stamped(true)
            .create(self.ring(), state, clock)
            .unwrap()
    }

    /// The ring's producer, which publishes from scratch if the ring is new.
    pub(crate) fn producer(&self) -> Producer {
        self.producer_of(&self.ring())
    }

    pub(crate) fn producer_of(&self, ring: &Path) -> Producer {
        let mut producer = Producer::attach(ring, &AttachOptions::default()).unwrap();
        if producer.last_sequence() == Sequence::NONE {
            producer.from_scratch();
        }
        producer
    }

    /// A configuration with small batches and segments; `routes` goes on where the table of the source is open.
    pub(crate) fn config(&self, routes: &str) -> String {
        let [log, state, ring] = [self.path("log"), self.path("state"), self.ring()];
        let [log, state, ring] = [log.display(), state.display(), ring.display()];
        format!(
            r#"
            log = {{ root = "{log}", any_filesystem = true }}
            state.dir = "{state}"
            topic = [
                {{ name = "fills", partitions = 3, segment_bytes = 1048576 }},
                {{ name = "orders", partitions = 2, segment_bytes = 1048576 }},
            ]
            [[source]]
            ring = "{ring}"
            consumer = "bridge"
            batch = {{ messages = 16 }}
            {routes}
            "#
        )
    }

    pub(crate) fn bridge(&self, routes: &str) -> Bridge {
        Bridge::open(self.config(routes).parse().unwrap()).unwrap()
    }

    /// Runs a bridge until it has drained the ring, or waits for something; returns what it told.
    pub(crate) fn drain(&self, routes: &str) -> (Vec<BridgeEvent>, Result<(), BridgeError>) {
        drain(&self.bridge(routes))
    }

    /// As [`drain`](Self::drain), and nothing goes wrong.
    #[track_caller]
    pub(crate) fn drain_well(&self, routes: &str) -> Vec<BridgeEvent> {
        let (events, result) = self.drain(routes);
        result.unwrap();
        events
    }

    pub(crate) fn log(&self) -> Log {
        let options = LogOptions {
            any_filesystem: true,
            ..LogOptions::read_only()
        };
        Log::open(self.path("log"), &options).unwrap()
    }

    pub(crate) fn content(&self) -> Content {
        Content::read(&self.log())
    }

    /// The last sequence that the ring's consumer has released.
    pub(crate) fn released(&self) -> Sequence {
        let name = "bridge".parse().unwrap();
        let consumer = Consumer::attach(self.ring(), &name, &AttachOptions::default()).unwrap();
        consumer.last_released()
    }

    pub(crate) fn progress(&self) -> Progress {
        let options = LogOptions {
            any_filesystem: true,
            ..LogOptions::default()
        };
        let log = Log::open(self.path("log"), &options).unwrap();
        let resumed = log.resume(&self.source()).unwrap();
        resumed.progress.unwrap()
    }
}

/// See [`Place::drain`].
pub(crate) fn drain(bridge: &Bridge) -> (Vec<BridgeEvent>, Result<(), BridgeError>) {
    let stop = AtomicBool::new(false);
    let events = Mutex::new(Vec::new());
    let result = bridge.run(&stop, &|_| Box::new(NoRecorder), &|event| {
        if matches!(
            event,
            BridgeEvent::Attached { .. } | BridgeEvent::Waiting { .. }
        ) {
            stop.store(true, Ordering::Relaxed);
        }
        events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(event.clone());
    });
    (events.into_inner().unwrap(), result)
}

/// Publishes a message and returns it; waits while the ring is full.
pub(crate) fn publish(producer: &mut Producer, kind: u16, value: &[u8]) -> Fact {
    loop {
        match producer.publish(MessageType(kind), value) {
            Ok(sequence) => {
                return Fact {
                    epoch: producer.ring().epoch(),
                    sequence,
                    kind,
                    value: value.to_vec(),
                };
            }
            Err(teeline_ring::PublishError::Full { .. }) => {
                teeline_os::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A payload that begins with its account, as [`ROUTES`] has it, and is told from others by `number`.
pub(crate) fn payload(number: u64) -> Vec<u8> {
    let account = format!("acct-{}", number % 7);
    let mut payload = vec![u8::try_from(account.len()).unwrap()];
    payload.extend(account.as_bytes());
    payload.extend(number.to_le_bytes());
    payload.resize(payload.len() + usize::try_from(number % 50).unwrap(), b'.');
    payload
}

impl Content {
    pub(crate) fn read(log: &Log) -> Self {
        let mut content = Self::default();
        for topic in log.topics().unwrap() {
            for partition in topic.partitions() {
                let place = (topic.name().to_string(), partition);
                let mut reader = log.reader(&topic, partition, Offset(0)).unwrap();
                while 0 < reader
                    .poll(100, |record| {
                        if let Some(Control::Lost { first, last }) = record.control {
                            let lost = content.lost.entry(place.clone()).or_default();
                            return lost.push((first, last));
                        }
                        let (epoch, sequence) = record.identity.unwrap().numbers();
                        match record.control {
                            None => content
                                .messages
                                .entry(place.clone())
                                .or_default()
                                .push(Fact {
                                    epoch,
                                    sequence,
                                    kind: record.kind,
                                    value: record.value.to_vec(),
                                }),
                            Some(Control::Gap { first, last }) => content
                                .gaps
                                .entry(place.clone())
                                .or_default()
                                .push((epoch, first, last)),
                            Some(Control::Lost { .. } | Control::Forgotten { .. }) => {
                                unreachable!("the one is pushed above, the other has no identity")
                            }
                        }
                    })
                    .unwrap()
                {}
            }
        }
        content
    }

    /// All messages of a topic, by identity.
    pub(crate) fn of(&self, topic: &str) -> Vec<Fact> {
        let mut facts: Vec<Fact> = self
            .messages
            .iter()
            .filter(|((name, _), _)| name == topic)
            .flat_map(|(_, facts)| facts.iter().cloned())
            .collect();
        facts.sort();
        facts
    }

    /// Holds exactly `published`, each once and in order, as [`ROUTES`] says.
    #[track_caller]
    pub(crate) fn assert_exactly(&self, published: &[Fact]) {
        assert!(self.lost.is_empty(), "offsets were lost: {:?}", self.lost);
        let of = |kinds: &[u16]| -> Vec<Fact> {
            let routed = published.iter().filter(|fact| kinds.contains(&fact.kind));
            let mut routed: Vec<Fact> = routed.cloned().collect();
            routed.sort();
            routed
        };
        assert_eq!(self.of("fills"), of(&[1, 2]));
        assert_eq!(self.of("orders"), of(&[3]));
        for ((topic, partition), facts) in &self.messages {
            assert!(facts.is_sorted(), "{topic}/{partition} is out of order");
            for fact in facts {
                let expected = match topic.as_str() {
                    "fills" => {
                        let account = &fact.value[1..=usize::from(fact.value[0])];
                        teeline_log::partition_for_key(account, 3)
                    }
                    _ => Partition(u32::try_from(fact.sequence.0 % 2).unwrap()),
                };
                assert_eq!(*partition, expected, "{fact:?}");
            }
        }
    }
}
