//! Observers of a history: every store that its producers made is on a tape, and an observer's loads run the tape on.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use fastrand::Rng;
use teeline_core::{Position, Sequence};
use teeline_ring::{
    Frame, Join, Observed, Resume,
    testing::{Geometry, Memory, Viewer, layout::producer_page},
};
use teeline_sync::atomic::Ordering;

use crate::{
    memory::{File, Stored, Words},
    world::{Content, Published, last_sequence},
};

/// A history as it went: what was there when it began, and every store since.
pub(crate) struct Recording {
    pub(crate) geometry: Geometry,
    pub(crate) control: Words,
    pub(crate) data: Words,
    pub(crate) tape: Vec<Stored>,
    pub(crate) published: Vec<Published>,
}

/// How many stores the producers make while an observer loads one word.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pace {
    /// None: the producers stand.
    Standing,
    /// Up to so many.
    UpTo(usize),
    /// None mostly; now and then up to so many.
    Bursts(usize),
}

/// The memory that an observer sees, and the tape that writes it.
struct Player {
    recording: Rc<Recording>,
    control: Words,
    data: Words,
    played: Cell<usize>,
    pace: Cell<Pace>,
    rng: RefCell<Rng>,
}

impl Player {
    fn new(recording: &Rc<Recording>, seed: u64) -> Rc<Self> {
        let copy = |words: &Words| words.iter().cloned().collect();
        Rc::new(Self {
            recording: Rc::clone(recording),
            control: copy(&recording.control),
            data: copy(&recording.data),
            played: Cell::new(0),
            pace: Cell::new(Pace::Standing),
            rng: RefCell::new(Rng::with_seed(seed)),
        })
    }

    fn words(&self, file: File) -> &Words {
        match file {
            File::Control => &self.control,
            File::Data => &self.data,
        }
    }

    fn play_to(&self, end: usize) {
        let end = end.min(self.recording.tape.len());
        for stored in &self.recording.tape[self.played.get().min(end)..end] {
            self.words(stored.file)[stored.offset / 8].set(stored.value);
        }
        self.played.set(self.played.get().max(end));
    }

    fn play_some(&self) {
        let mut rng = self.rng.borrow_mut();
        let stores = match self.pace.get() {
            Pace::Standing => 0,
            Pace::UpTo(most) => rng.usize(..=most),
            Pace::Bursts(most) if rng.u32(..16) == 0 => rng.usize(..=most),
            Pace::Bursts(_) => 0,
        };
        self.play_to(self.played.get() + stores);
    }

    fn is_at_end(&self) -> bool {
        self.played.get() == self.recording.tape.len()
    }

    fn announced(&self) -> u64 {
        self.control[producer_page::ANNOUNCED / 8].get()
    }
}

struct Eye {
    player: Rc<Player>,
    file: File,
}

impl Memory for Eye {
    fn increment(&self, _: usize) {
        panic!("an observer writes nothing");
    }

    fn wake(&self, _: usize) -> usize {
        panic!("an observer wakes nobody");
    }

    fn load(&self, offset: usize, _: Ordering) -> u64 {
        self.player.play_some();
        self.player.words(self.file)[offset / 8].get()
    }

    fn store(&self, _: usize, _: u64, _: Ordering) {
        panic!("an observer writes nothing");
    }

    fn zero(&self, _: usize, _: usize) {
        panic!("an observer writes nothing");
    }

    fn write(&self, _: usize, _: &[u8]) {
        panic!("an observer writes nothing");
    }

    fn has(&self, offset: usize, len: usize) -> bool {
        offset + len <= self.player.words(self.file).len() * 8
    }

    fn read<R>(&self, _: usize, _: usize, _: impl FnOnce(&[u8]) -> R) -> R {
        panic!("an observer is lent nothing, since it may be written over");
    }
}

/// One observer of a recording, and the oracle beside it.
pub(crate) struct Watching {
    viewer: Viewer<Eye>,
    player: Rc<Player>,
    account: Account,
}

/// What it has been handed: every number once.
struct Account {
    /// The number that has to come next; unknown until the observer has a place.
    next: Option<u64>,
    /// It asked for this number: it may begin in a gap that includes it.
    asked_for: Option<u64>,
    lost: u64,
    laps: u64,
}

impl Watching {
    /// Joins when `played` stores were made; from then on the producers go at `pace`, during the joining, too.
    pub(crate) fn join(
        recording: &Rc<Recording>,
        seed: u64,
        played: usize,
        pace: Pace,
        join: Join,
        resume: Resume,
    ) -> Self {
        let player = Player::new(recording, seed);
        player.play_to(played);
        player.pace.set(pace);
        let eye = |file| Eye {
            player: Rc::clone(&player),
            file,
        };
        let viewer = Viewer::new(
            recording.geometry,
            Sequence(1),
            eye(File::Control),
            eye(File::Data),
            join,
            resume,
        )
        .expect("an honest ring can always be observed");
        let asked_for = match join {
            Join::Sequence(wanted) => Some(wanted.0.max(1)),
            Join::Newest | Join::Oldest => None,
        };
        let account = Account {
            next: asked_for.or_else(|| viewer.next_sequence().map(|next| next.0)),
            asked_for,
            lost: 0,
            laps: 0,
        };
        Self {
            viewer,
            player,
            account,
        }
    }

    /// One poll. Returns how much it handed out.
    pub(crate) fn poll(&mut self, limit: usize) -> usize {
        let Self {
            viewer,
            player,
            account,
        } = self;
        let count = viewer
            .poll(limit, |observed| account.enter(player, &observed))
            .expect("an honest ring can always be observed");
        assert!(count <= limit);
        let losses = viewer.losses();
        assert_eq!(
            (losses.events, losses.messages),
            (account.laps, account.lost)
        );
        count
    }

    /// Lets the producers make all stores up to `played`, while the observer does nothing.
    pub(crate) fn hold_until(&mut self, played: usize) {
        self.player.play_to(played);
    }

    pub(crate) fn set_pace(&mut self, pace: Pace) {
        self.player.pace.set(pace);
    }

    /// Polls until the producers have made their last store and there is nothing more: then every number was delivered, in
    /// a gap, or lost.
    pub(crate) fn finish(mut self) -> u64 {
        while !self.player.is_at_end() {
            if self.poll(3) == 0 {
                // Whatever the pace, time goes on.
                self.player.play_to(self.player.played.get() + 1);
            }
        }
        self.set_pace(Pace::Standing);
        while self.poll(usize::MAX) > 0 {}
        let last = self.player.recording.published.last();
        let end = last.map_or(1, |frame| last_sequence(frame) + 1);
        match self.account.asked_for {
            // It asked for what was never published: it waits.
            Some(wanted) if wanted > end => assert_eq!(self.viewer.next_sequence(), None),
            _ => {
                assert_eq!(
                    self.account.next.unwrap_or(end),
                    end,
                    "all is accounted for"
                );
                assert_eq!(self.viewer.next_sequence(), Some(Sequence(end)));
            }
        }
        self.account.lost
    }
}

impl Account {
    fn enter(&mut self, player: &Player, observed: &Observed<'_>) {
        let recording = &player.recording;
        let (first, last) = match *observed {
            Observed::Frame { frame, position } => recording.check(&frame, position),
            Observed::Lapped { first, last } => {
                assert!(first <= last, "a loss is of something");
                self.laps += 1;
                self.lost += last.0 - first.0 + 1;
                // Who joins can be further back only if a mark is.
                if self.asked_for.is_none() {
                    let lost_at = recording.end_before(first.0);
                    assert!(
                        player.announced() > lost_at + recording.geometry.capacity(),
                        "{first} could still be read"
                    );
                }
                (first.0, last.0)
            }
        };
        match (self.next, self.asked_for.take()) {
            (Some(_), Some(wanted)) => assert!(
                first == wanted || (first < wanted && wanted <= last),
                "asked for {wanted}, and got {first} to {last}"
            ),
            (next, _) => assert_eq!(next.unwrap_or(first), first, "number by number"),
        }
        self.next = Some(last + 1);
    }
}

impl Recording {
    /// The frame that carries a sequence, or the gap that includes it.
    fn find(&self, sequence: u64) -> &Published {
        let index = self
            .published
            .partition_point(|frame| last_sequence(frame) < sequence);
        &self.published[index]
    }

    /// Where the frame ends that comes before a sequence.
    fn end_before(&self, sequence: u64) -> u64 {
        let index = self
            .published
            .partition_point(|frame| last_sequence(frame) < sequence);
        index
            .checked_sub(1)
            .map_or(0, |before| self.published[before].end)
    }

    /// Checks that a frame is what was published under its number, byte for byte; returns its first and last number.
    fn check(&self, frame: &Frame<'_>, position: Position) -> (u64, u64) {
        let (sequence, content) = Content::of(frame);
        let expected = self.find(sequence);
        assert_eq!(
            (expected.sequence, &expected.content, expected.start),
            (sequence, &content, position.0)
        );
        (sequence, last_sequence(expected))
    }
}
