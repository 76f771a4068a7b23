//! Every size at every offset with every remainder at the wrap, in the smallest rings; and random operations of everybody
//! beside a queue that knows what has to come.

use std::{collections::VecDeque, path::Path};

use fastrand::Rng;
use teeline_core::{Name, Sequence};
use teeline_ring::{
    Alignment, Consumer, Frame, Join, Producer, PublishError, RingOptions, evict, inspect,
};

use crate::{Base, KIND, bridge, consumer, impatient, is_full, options, poll, producer, source};

/// What the rules say of room, from positions alone.
#[derive(Debug, Clone, Copy)]
struct Room {
    capacity: u64,
    slot: u64,
    header: u64,
}

impl Room {
    fn of(options: &RingOptions, dir: &Path) -> Self {
        let ring = inspect::stat(dir).unwrap().ring;
        options.check().unwrap();
        Self {
            capacity: ring.capacity,
            slot: ring.alignment,
            header: if ring.stamped { 24 } else { 16 },
        }
    }

    /// Where a frame of `len` bytes ends when the one before it ends at `position`.
    fn end(self, position: u64, len: usize) -> u64 {
        let bytes = (self.header + len as u64).next_multiple_of(self.slot);
        let left = self.capacity - position % self.capacity;
        if bytes > left {
            position + left + bytes
        } else {
            position + bytes
        }
    }

    /// Publishes and reads until the next frame starts at `start` in the ring.
    fn go_to(self, start: u64, producer: &mut Producer, consumer: &mut Consumer) {
        let smallest = self.header.next_multiple_of(self.slot);
        let largest = self.header + producer.ring().max_payload() as u64;
        loop {
            let offset = producer.position().0 % self.capacity;
            let step = match start.checked_sub(offset) {
                Some(0) => return,
                Some(distance) if (smallest..=largest).contains(&distance) => distance,
                // Nearer to it, or round the ring.
                _ => smallest,
            };
            let len = usize::try_from(step - self.header).unwrap();
            producer.publish(KIND, &vec![0; len]).unwrap();
            poll(consumer, usize::MAX);
        }
    }

    /// Whether it has room, with the zero slot behind it, when everything before `released` is free.
    fn has_room(self, position: u64, len: usize, released: u64) -> bool {
        self.end(position, len) + self.slot <= released + self.capacity
    }
}

/// HAZARDS RB-01: one message of every size behind one of every size, from every start: each is accepted if and only if there
/// is room, and what was accepted is what comes, byte for byte.
#[test]
fn every_pair_of_sizes_from_every_start_is_accepted_if_and_only_if_there_is_room() {
    for alignment in Alignment::ALL {
        for stamped in [false, true] {
            let base = Base::new();
            let options = options()
                .capacity(alignment.capacity_min())
                .alignment(alignment)
                .stamped(stamped);
            let (dir, _) = base.create(&options);
            let room = Room::of(&options, &dir);
            let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
            let max = producer.ring().max_payload();
            // Around each slot, where it makes a difference; every one for the first of a pair.
            let around: Vec<usize> = (0..=max)
                .filter(|len| {
                    let remainder = (room.header + *len as u64) % room.slot;
                    [0, 1].contains(&remainder) || *len == max
                })
                .collect();
            // A lap begins with a frame, so none starts within the shortest.
            let shortest = room.header.next_multiple_of(room.slot);
            let starts = (0..room.capacity).step_by(usize::try_from(room.slot).unwrap());
            for start in starts.filter(|start| *start == 0 || *start >= shortest) {
                for first in 0..=max {
                    for &second in &around {
                        room.go_to(start, &mut producer, &mut consumer);
                        let mut accepted = Vec::new();
                        for len in [first, second, first] {
                            let payload: Vec<u8> = (0..len)
                                .map(|at| u8::try_from((at + len) % 251).unwrap())
                                .collect();
                            let fits =
                                room.has_room(producer.position().0, len, consumer.position().0);
                            match producer.publish(KIND, &payload) {
                                Ok(sequence) => {
                                    assert!(fits, "{len} bytes at {start}, behind {first}");
                                    accepted.push((sequence.0, payload));
                                }
                                Err(error) => {
                                    assert!(
                                        is_full(&error) && !fits,
                                        "{error}: {len} bytes at {start}, behind {first}"
                                    );
                                }
                            }
                        }
                        assert_eq!(poll(&mut consumer, usize::MAX), accepted);
                    }
                }
            }
        }
    }
}

/// What somebody may do with a ring.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Publish { len: usize },
    Commit { claimed: usize, len: usize },
    Abort { claimed: usize },
    Gap { messages: u64 },
    ReattachProducer,
    Poll { who: usize, limit: usize },
    Peek { who: usize, limit: usize },
    Release { who: usize, more: u64 },
    Rewind { who: usize },
    Reattach { who: usize },
    Evict { who: usize },
}

impl Operation {
    fn random(rng: &mut Rng, max: usize) -> Self {
        let who = rng.usize(..2);
        let mut len = || {
            if rng.bool() {
                rng.usize(..=max)
            } else {
                rng.usize(..40)
            }
        };
        let (a, b) = (len(), len());
        let (claimed, len) = (a.max(b), a.min(b));
        let limit = rng.usize(..5);
        match rng.u32(..40) {
            0..12 => Self::Publish { len },
            12..15 => Self::Commit { claimed, len },
            15 => Self::Abort { claimed },
            16 => Self::Gap {
                messages: rng.u64(1..4),
            },
            17 => Self::ReattachProducer,
            18..28 => Self::Poll { who, limit },
            28..32 => Self::Peek { who, limit },
            32..36 => Self::Release {
                who,
                more: rng.u64(..4),
            },
            36 => Self::Rewind { who },
            37 | 38 => Self::Reattach { who },
            _ => Self::Evict { who },
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Content {
    Message(Vec<u8>),
    Gap(u64),
}

/// A frame: its first and last sequence, and what it is.
#[derive(Debug, Clone, PartialEq)]
struct Published {
    first: u64,
    last: u64,
    content: Content,
}

impl Published {
    fn of(frame: &Frame<'_>) -> Self {
        match frame {
            Frame::Message(message) => Self {
                first: message.sequence.0,
                last: message.sequence.0,
                content: Content::Message(message.payload.to_vec()),
            },
            Frame::Gap { first, last } => Self {
                first: first.0,
                last: last.0,
                content: Content::Gap(last.0),
            },
            Frame::Epoch { .. } => panic!("nobody publishes epochs here"),
        }
    }
}

/// A reliable consumer, and the queue of what it has not released, the first `read` of which it has seen.
struct Reading {
    name: Name,
    consumer: Option<Consumer>,
    queue: VecDeque<Published>,
    read: usize,
    evicted: bool,
}

struct Scene {
    dir: std::path::PathBuf,
    room: Room,
    producer: Option<Producer>,
    readings: [Reading; 2],
    losses: u64,
}

impl Scene {
    fn producer(&mut self) -> &mut Producer {
        let dir = &self.dir;
        self.producer.get_or_insert_with(|| producer(dir))
    }

    /// The slowest position of a counted consumer.
    fn released(&self) -> u64 {
        let counted = self.readings.iter().filter(|reading| !reading.evicted);
        counted
            .map(|reading| reading.consumer.as_ref().unwrap().position().0)
            .min()
            .unwrap_or(u64::MAX / 2)
    }

    fn published(&mut self, first: u64, content: Content) {
        let last = match content {
            Content::Message(_) => first,
            Content::Gap(last) => last,
        };
        for reading in &mut self.readings {
            reading.queue.push_back(Published {
                first,
                last,
                content: content.clone(),
            });
        }
    }

    fn room_or_full(
        &mut self,
        len: usize,
        result: Result<(), PublishError>,
        before: u64,
        released: u64,
    ) -> bool {
        let fits = self.room.has_room(before, len, released);
        match result {
            Ok(()) => assert!(fits, "{len} bytes at {before}, {released} released"),
            Err(error) => assert!(
                is_full(&error) && !fits,
                "{error}: {len} bytes at {before}, {released} released"
            ),
        }
        fits
    }

    fn apply(&mut self, operation: Operation, rng: &mut Rng) {
        let released = self.released();
        let mut bytes = |len: usize| -> Vec<u8> { (0..len).map(|_| rng.u8(..)).collect() };
        match operation {
            Operation::Publish { len } => {
                let payload = bytes(len);
                let before = self.producer().position().0;
                let result = self.producer().publish(KIND, &payload);
                let sequence = result.as_ref().map_or(0, |sequence| sequence.0);
                if self.room_or_full(len, result.map(|_| ()), before, released) {
                    self.published(sequence, Content::Message(payload));
                }
            }
            Operation::Commit { claimed, len } => {
                let payload = bytes(len);
                let before = self.producer().position().0;
                let result = self.producer().try_claim(claimed, KIND).map(|mut claim| {
                    claim[..len].copy_from_slice(&payload);
                    claim.commit_short(len)
                });
                let sequence = result.as_ref().map_or(0, |sequence| sequence.0);
                if self.room_or_full(claimed, result.map(|_| ()), before, released) {
                    self.published(sequence, Content::Message(payload));
                }
            }
            Operation::Abort { claimed } => {
                let before = self.producer().position().0;
                let result = self
                    .producer()
                    .try_claim(claimed, KIND)
                    .map(|mut claim| claim.fill(0xEE));
                self.room_or_full(claimed, result, before, released);
            }
            Operation::Gap { messages } => {
                let first = self.producer().last_sequence().next();
                let last = Sequence(first.0 + messages - 1);
                let before = self.producer().position().0;
                let result = self.producer().publish_gap(first, last);
                if self.room_or_full(16, result, before, released) {
                    self.published(first.0, Content::Gap(last.0));
                }
            }
            Operation::ReattachProducer => {
                let last = self.producer().last_sequence();
                self.producer = None;
                assert_eq!(self.producer().last_sequence(), last);
            }
            Operation::Poll { who, limit } | Operation::Peek { who, limit } => {
                let Reading {
                    consumer: Some(consumer),
                    queue,
                    read,
                    ..
                } = &mut self.readings[who]
                else {
                    return;
                };
                let mut seen = Vec::new();
                let polls = matches!(operation, Operation::Poll { .. });
                let mut handler = |frame: Frame<'_>| seen.push(Published::of(&frame));
                let count = if polls {
                    consumer.poll(limit, &mut handler)
                } else {
                    consumer.peek(limit, &mut handler)
                };
                assert_eq!(count.unwrap(), seen.len());
                assert_eq!(seen.len(), limit.min(queue.len() - *read));
                assert!(
                    queue
                        .iter()
                        .skip(*read)
                        .zip(&seen)
                        .all(|(expected, seen)| expected == seen)
                );
                *read += seen.len();
                if polls {
                    queue.drain(..*read);
                    *read = 0;
                }
            }
            Operation::Release { who, more } => {
                let Reading {
                    consumer: Some(consumer),
                    queue,
                    read,
                    ..
                } = &mut self.readings[who]
                else {
                    return;
                };
                let through = consumer.last_released().0 + more;
                consumer.release(Sequence(through)).unwrap();
                while *read > 0 && queue[0].last <= through {
                    queue.pop_front();
                    *read -= 1;
                }
                let last = consumer.last_released().0;
                assert!(queue.front().is_none_or(|next| next.first == last + 1));
            }
            Operation::Rewind { who } => {
                let Reading {
                    consumer: Some(consumer),
                    read,
                    ..
                } = &mut self.readings[who]
                else {
                    return;
                };
                consumer.rewind();
                *read = 0;
            }
            Operation::Reattach { who } => self.reattach(who),
            Operation::Evict { who } => {
                let reading = &mut self.readings[who];
                reading.consumer = None;
                reading.read = 0;
                let evicted = evict(&self.dir, &reading.name, false, &impatient()).unwrap();
                assert_eq!(evicted.already, reading.evicted);
                let unreleased = reading.queue.front().map(|first| first.first);
                assert_eq!(evicted.unreleased.map(|lost| lost.first.0), unreleased);
                reading.evicted = true;
            }
        }
    }

    /// Leaves and comes back, or rejoins: what is lost is told, and is what does not come.
    fn reattach(&mut self, who: usize) {
        let reading = &mut self.readings[who];
        reading.consumer = None;
        reading.read = 0;
        let consumer = Consumer::rejoin(&self.dir, &reading.name, &impatient()).unwrap();
        // What was told before, and nothing released behind it, is told again.
        if let Some(lost) = consumer.lost()
            && reading.evicted
        {
            let gone = reading
                .queue
                .iter()
                .take_while(|frame| frame.last <= lost.last.0)
                .count();
            self.losses += gone as u64;
            reading.queue.drain(..gone);
        }
        let next = consumer.last_released().0 + 1;
        assert!(
            reading
                .queue
                .front()
                .is_none_or(|first| first.first == next)
        );
        reading.evicted = false;
        reading.consumer = Some(consumer);
    }
}

/// HAZARDS RB-01, RB-21: whatever everybody does in whatever order, each consumer gets what was published, in order, byte for
/// byte, or is told that it is lost; and a producer is refused if and only if there is no room.
#[test]
fn operations_of_everybody_agree_with_a_queue() {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().unwrap())
    };
    let seeds = match number("TEELINE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TEELINE_HISTORIES").unwrap_or(150),
    };
    let mut losses = 0;
    for seed in seeds {
        let mut rng = Rng::with_seed(seed);
        let base = Base::new();
        let alignment = Alignment::ALL[rng.usize(..4)];
        let options = RingOptions::new(source())
            .consumer(bridge())
            .spares(1)
            .capacity(alignment.capacity_min() << rng.u32(..3))
            .alignment(alignment)
            .stamped(rng.bool());
        let (dir, _) = base.create(&options);
        let late: Name = "late".parse().unwrap();
        let joined = Consumer::join(&dir, &late, Join::Newest, &impatient()).unwrap();
        let reading = |name, consumer| Reading {
            name,
            consumer: Some(consumer),
            queue: VecDeque::new(),
            read: 0,
            evicted: false,
        };
        let mut scene = Scene {
            room: Room::of(&options, &dir),
            producer: None,
            readings: [reading(bridge(), consumer(&dir)), reading(late, joined)],
            dir,
            losses: 0,
        };
        let max = scene.producer().ring().max_payload();
        for _ in 0..300 {
            let operation = Operation::random(&mut rng, max);
            let applied = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                scene.apply(operation, &mut rng)
            }));
            assert!(
                applied.is_ok(),
                "TEELINE_SEED={seed} reproduces it: {operation:?}"
            );
        }
        losses += scene.losses;
        for who in 0..2 {
            scene.reattach(who);
            let limit = scene.readings[who].queue.len();
            scene.apply(
                Operation::Poll {
                    who,
                    limit: limit + 1,
                },
                &mut rng,
            );
            assert!(scene.readings[who].queue.is_empty());
        }
    }
    assert!(
        losses > 0 || number("TEELINE_SEED").is_some(),
        "some were evicted long enough to lose something"
    );
}
