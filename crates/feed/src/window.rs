//! The latest messages in memory, packed as they are sent.

use std::{collections::VecDeque, hint, mem};

use teeline_core::Sequence;

use crate::{
    Run, Session,
    wire::{Downstream, HEADER_BYTES, LENGTH_BYTES, Messages},
};

/// How much a [`Window`] holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowOptions {
    /// Largest packet, in bytes of UDP payload.
    pub packet_bytes_max: usize,
    /// Memory for packets, in bytes: one at least.
    pub bytes: usize,
    /// Most messages, and numbers without one.
    pub messages_max: usize,
}

/// The latest messages of a session, in memory of a fixed size: what is waiting to be sent, and behind it what can be
/// asked for again without a store.
///
/// A message is written once, into the packet that it is sent in. Packets lie one behind the other, so that several are
/// sent at once as they lie there. The oldest go in whole packets.
#[derive(Debug)]
pub struct Window {
    session: Session,
    options: WindowOptions,
    memory: Box<[u8]>,
    /// Packets that take nothing more, and holes, oldest first.
    closed: VecDeque<Packet>,
    /// The oldest number.
    first: Sequence,
    next: Sequence,
    /// The number with which the open packet begins; the next one if none is open.
    open_first: Sequence,
    /// Where the open packet begins, or the next one may: counted in bytes since the beginning, and never wrapped.
    open_start: u64,
    /// The same, as a place in the memory.
    open_index: usize,
    /// Where the open packet's next block goes.
    write: usize,
    /// Bytes left in it; nothing if none is open.
    room: usize,
    /// Where the packet behind the last run lies among the closed ones.
    behind_run: usize,
}

/// What has numbers: a packet, or nothing.
#[derive(Debug, Clone, Copy)]
struct Packet {
    first: Sequence,
    next: Sequence,
    /// Where it begins, counted in bytes since the beginning and never wrapped.
    start: u64,
    /// Where it begins in the memory.
    index: usize,
    /// How long it is; 0 of a hole, where the source's own numbers jump.
    bytes: usize,
}

impl Packet {
    const fn is_hole(&self) -> bool {
        self.bytes == 0
    }
}

impl Window {
    /// An empty window; the first message pushed will have the number `first`.
    #[must_use]
    pub fn new(session: Session, first: Sequence, options: WindowOptions) -> Self {
        let packet_bytes_max = options.packet_bytes_max.max(HEADER_BYTES + LENGTH_BYTES);
        Self {
            session,
            options: WindowOptions {
                packet_bytes_max,
                ..options
            },
            memory: vec![0; options.bytes.max(packet_bytes_max)].into_boxed_slice(),
            closed: VecDeque::new(),
            first,
            next: first,
            open_first: first,
            open_start: 0,
            open_index: 0,
            write: 0,
            room: 0,
            behind_run: 0,
        }
    }

    /// The session that the messages belong to.
    #[must_use]
    pub const fn session(&self) -> Session {
        self.session
    }

    /// Number of the oldest message here, or of the next one if there is none.
    #[must_use]
    pub const fn first(&self) -> Sequence {
        self.first
    }

    /// Number that the next message pushed will have.
    #[must_use]
    #[inline]
    pub const fn next_sequence(&self) -> Sequence {
        self.next
    }

    /// The messages from the number `from` on that are here, in order. Numbers without a message are left out.
    pub fn messages(&self, from: Sequence) -> impl Iterator<Item = (Sequence, &[u8])> {
        let at = self.closed_at(from);
        let closed = self.closed.range(at..).copied();
        closed
            .chain(self.open())
            .flat_map(|packet| self.blocks(packet))
            .skip_while(move |(sequence, _)| *sequence < from)
    }

    /// The first number at or after `from` whose message is here.
    #[must_use]
    pub fn next_held(&self, from: Sequence) -> Option<Sequence> {
        let from = from.max(self.first);
        if from >= self.open_first {
            return (from < self.next).then_some(from);
        }
        let closed = self.closed.range(self.closed_at(from)..).copied();
        let held = closed.chain(self.open()).find(|packet| !packet.is_hole());
        held.map(|packet| packet.first.max(from))
    }

    /// Appends a message and drops the oldest packets in its way, none with a message at or after `keep`. False, and
    /// nothing changed, if that leaves no room.
    #[inline]
    pub fn push(&mut self, message: &[u8], keep: Sequence) -> bool {
        let block_bytes = LENGTH_BYTES + message.len();
        let held = self.next.0 - self.first.0;
        if (block_bytes > self.room || held >= self.options.messages_max as u64)
            && !self.make_room(block_bytes, keep)
        {
            return false;
        }
        let block = &mut self.memory[self.write..self.write + block_bytes];
        write_block(block, message);
        self.write += block_bytes;
        self.room -= block_bytes;
        self.next.0 += 1;
        true
    }

    /// Appends messages as [`push`](Self::push) does each, until there is no room for one, which is handed back.
    #[inline]
    pub fn push_all<'m>(
        &mut self,
        messages: impl IntoIterator<Item = &'m [u8]>,
        keep: Sequence,
    ) -> Option<&'m [u8]> {
        let mut messages = messages.into_iter();
        let mut message = messages.next();
        while let Some(first) = message
            && self.push(first, keep)
        {
            message = messages.next();
            // The rest of its packet is filled without a look at anything else.
            let mut next_sequence = self.next.0;
            let end = self.first.0 + self.options.messages_max as u64;
            let mut place = &mut self.memory[self.write..self.write + self.room];
            while let Some(next) = message
                && next_sequence < end
                && LENGTH_BYTES + next.len() <= place.len()
            {
                let (block, rest) = mem::take(&mut place).split_at_mut(LENGTH_BYTES + next.len());
                write_block(block, next);
                place = rest;
                next_sequence += 1;
                message = messages.next();
            }
            let room = place.len();
            self.next.0 = next_sequence;
            self.write += self.room - room;
            self.room = room;
        }
        message
    }

    /// Leaves the numbers up to `next` without a message. Drops the oldest packets in the way, none with a message at or
    /// after `keep`. False, and nothing changed, if that leaves no room.
    pub fn skip_to(&mut self, next: Sequence, keep: Sequence) -> bool {
        if next <= self.next {
            return true;
        }
        self.close();
        let hole = next.0 - self.next.0;
        let messages_max = self.options.messages_max as u64;
        if hole > messages_max {
            // Longer than all that is kept.
            if keep < self.next {
                return false;
            }
            self.closed.clear();
            (self.first, self.next, self.open_first) = (next, next, next);
            return true;
        }
        let in_the_way = self
            .closed
            .iter()
            .take_while(|packet| next.0 - packet.first.0 > messages_max);
        let (dropped, first) = in_the_way.fold((0, self.first), |(dropped, _), packet| {
            (dropped + 1, packet.next)
        });
        if first > keep {
            return false;
        }
        self.closed.drain(..dropped);
        self.first = first;
        self.closed.push_back(Packet {
            first: self.next,
            next,
            start: self.open_start,
            index: self.open_index,
            bytes: 0,
        });
        (self.next, self.open_first) = (next, next);
        true
    }

    /// The packets to send from the number `from` on, which begins one: as many as lie in one piece and are of one length,
    /// but for the last, which may be shorter; `packets_max` at most. With the number behind them.
    pub(crate) fn run(
        &mut self,
        from: Sequence,
        packets_max: usize,
    ) -> Option<(Run<'_>, Sequence)> {
        self.close();
        let at = match self.closed.get(self.behind_run) {
            Some(next) if next.first == from => self.behind_run,
            _ => self.closed_at(from),
        };
        let mut packets = self
            .closed
            .range(at..)
            .skip_while(|packet| packet.is_hole());
        let head = packets.next()?;
        let (mut end, mut next, mut count) = (head.index + head.bytes, head.next, 1);
        for packet in packets.take(packets_max - 1) {
            let fits = (1..=head.bytes).contains(&packet.bytes)
                && packet.index == end
                && end + packet.bytes - head.index <= Run::BYTES_MAX;
            if !fits {
                break;
            }
            (end, next, count) = (end + packet.bytes, packet.next, count + 1);
            if packet.bytes < head.bytes {
                break;
            }
        }
        self.behind_run = at + count;
        let bytes = &self.memory[head.index..end];
        Some((Run::new(bytes, head.bytes), next))
    }

    /// Makes room for a block: in the open packet, or in a new one.
    #[inline(never)]
    fn make_room(&mut self, block_bytes: usize, keep: Sequence) -> bool {
        let packet_bytes_max = self.options.packet_bytes_max;
        if block_bytes > packet_bytes_max - HEADER_BYTES {
            return false;
        }
        while self.next.0 - self.first.0 >= self.options.messages_max as u64 {
            if !self.drop_oldest(keep) {
                return false;
            }
        }
        if block_bytes <= self.room {
            return true;
        }
        self.close();
        let capacity = self.memory.len();
        let (mut start, mut index) = (self.open_start, self.open_index);
        // Packets stay in one piece: one that might not fit before the end begins at the front.
        if index + packet_bytes_max > capacity {
            start += (capacity - index) as u64;
            index = 0;
        }
        let end = start + packet_bytes_max as u64;
        while self
            .closed
            .front()
            .is_some_and(|oldest| oldest.start + (capacity as u64) < end)
        {
            if !self.drop_oldest(keep) {
                return false;
            }
        }
        (self.open_start, self.open_index) = (start, index);
        touch(&self.memory[index..index + packet_bytes_max]);
        self.write = index + HEADER_BYTES;
        self.room = packet_bytes_max - HEADER_BYTES;
        true
    }

    /// Drops the oldest packet or hole; false if something of it is to be kept, or there is none.
    fn drop_oldest(&mut self, keep: Sequence) -> bool {
        match self.closed.front() {
            Some(oldest) if oldest.next <= keep => {
                self.first = oldest.next;
                self.closed.pop_front();
                self.behind_run = self.behind_run.saturating_sub(1);
                true
            }
            _ => false,
        }
    }

    /// Writes the open packet's header: it takes nothing more.
    fn close(&mut self) {
        let Some(packet) = self.open() else { return };
        let messages = packet.next.0 - packet.first.0;
        let count = u16::try_from(messages).expect("a packet has room for fewer");
        let header = &mut self.memory[packet.index..packet.index + HEADER_BYTES];
        Downstream::write_header(header, self.session, packet.first, count);
        self.closed.push_back(packet);
        self.open_first = packet.next;
        self.open_start += packet.bytes as u64;
        self.open_index += packet.bytes;
        self.room = 0;
    }

    fn open(&self) -> Option<Packet> {
        (self.open_first < self.next).then(|| Packet {
            first: self.open_first,
            next: self.next,
            start: self.open_start,
            index: self.open_index,
            bytes: self.write - self.open_index,
        })
    }

    /// The first closed packet or hole with a number at or after `from`.
    fn closed_at(&self, from: Sequence) -> usize {
        self.closed.partition_point(|packet| packet.next <= from)
    }

    fn blocks(&self, packet: Packet) -> Messages<'_> {
        if packet.is_hole() {
            return Messages::none();
        }
        let blocks = &self.memory[packet.index + HEADER_BYTES..packet.index + packet.bytes];
        let count = packet.next.0 - packet.first.0;
        let count = u16::try_from(count).expect("a packet has room for fewer");
        Messages::new(packet.first, count, blocks)
    }
}

/// Writes a message behind its length. Most messages of a feed have 16 to 64 bytes: two pieces of one length that overlap
/// are copied without a call, in a third of the time.
#[inline]
fn write_block(block: &mut [u8], message: &[u8]) {
    let (length, place) = block.split_at_mut(LENGTH_BYTES);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a packet is shorter than 2^16 bytes"
    )]
    length.copy_from_slice(&(message.len() as u16).to_be_bytes());
    match message.len() {
        16..=32 => copy_ends::<16, 16>(place, message),
        33..=48 => copy_ends::<32, 16>(place, message),
        49..=64 => copy_ends::<32, 32>(place, message),
        _ => place.copy_from_slice(message),
    }
}

/// Has the processor fetch memory that is written next: stores that miss its nearest cache wait for each other, loads do
/// not. Messages of 40 bytes take 2.0 ns each instead of 3.1.
#[inline]
fn touch(memory: &[u8]) {
    const CACHE_LINE_BYTES: usize = 64;
    let lines = memory.iter().step_by(CACHE_LINE_BYTES);
    hint::black_box(lines.fold(0, |all, byte| all ^ byte));
}

/// Copies the first and the last bytes, which are all if there are no more than both together.
#[inline]
fn copy_ends<const FIRST: usize, const LAST: usize>(place: &mut [u8], message: &[u8]) {
    if let (Some(to), Some(first)) = (place.first_chunk_mut::<FIRST>(), message.first_chunk()) {
        *to = *first;
    }
    if let (Some(to), Some(last)) = (place.last_chunk_mut::<LAST>(), message.last_chunk()) {
        *to = *last;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(packet_messages: usize, bytes: usize, messages_max: usize) -> Window {
        let options = WindowOptions {
            packet_bytes_max: HEADER_BYTES + packet_messages * (LENGTH_BYTES + 4),
            bytes,
            messages_max,
        };
        Window::new("HDAAEUVB40".parse().unwrap(), Sequence(7), options)
    }

    fn held(window: &Window) -> Vec<u64> {
        window
            .messages(Sequence(0))
            .map(|(number, _)| number.0)
            .collect()
    }

    /// A message, if it is still here.
    fn get(window: &Window, number: u64) -> Option<&[u8]> {
        let (found, message) = window.messages(Sequence(number)).next()?;
        (found == Sequence(number)).then_some(message)
    }

    #[test]
    fn a_full_window_drops_the_oldest_packets_and_never_what_must_be_kept() {
        // Two messages of four bytes to a packet of 32 bytes, and room for three packets.
        let mut window = window(2, 100, 100);
        for message in [b"aaaa", b"bbbb", b"cccc", b"dddd", b"eeee", b"ffff"] {
            assert!(window.push(message, Sequence(7)));
        }
        assert_eq!(held(&window), [7, 8, 9, 10, 11, 12]);
        assert!(!window.push(b"gggg", Sequence(8)), "8 is kept");
        assert_eq!(window.next_sequence(), Sequence(13));
        assert!(window.push(b"gggg", Sequence(9)));
        assert_eq!((window.first(), get(&window, 8)), (Sequence(9), None));
        assert_eq!(get(&window, 9), Some(&b"cccc"[..]));
        assert_eq!(get(&window, 13), Some(&b"gggg"[..]));
        assert_eq!(get(&window, 14), None);
        assert!(!window.push(&[0; 11], Sequence(13)), "larger than a packet");
        assert!(window.push(b"", Sequence(9)));
        assert_eq!(get(&window, 14), Some(&b""[..]));
    }

    #[test]
    fn many_at_once_are_as_many_one_by_one() {
        let messages: Vec<Vec<u8>> = (0..200u8)
            .map(|at| vec![at; usize::from(at % 90)])
            .collect();
        let slices = || messages.iter().map(Vec::as_slice);
        let options = WindowOptions {
            packet_bytes_max: 150,
            bytes: 100_000,
            messages_max: 150,
        };
        let empty = || Window::new("HDAAEUVB40".parse().unwrap(), Sequence(1), options);
        let (mut one_by_one, mut at_once) = (empty(), empty());
        let taken = slices().take_while(|message| one_by_one.push(message, Sequence(20)));
        assert!(
            taken.count() < messages.len(),
            "the window is full of what is kept"
        );
        let refused = at_once.push_all(slices(), Sequence(20));
        let left = usize::try_from(at_once.next_sequence().0 - 1).unwrap();
        assert_eq!(refused, Some(messages[left].as_slice()));
        let all = |window: &Window| -> Vec<_> {
            let held = window.messages(Sequence(1));
            held.map(|(number, message)| (number, message.to_vec()))
                .collect()
        };
        assert_eq!(all(&one_by_one), all(&at_once));
        assert_eq!(at_once.push_all(slices().take(3), Sequence(150)), None);
    }

    #[test]
    fn no_more_messages_are_held_than_there_may_be() {
        let mut window = window(2, 1_000, 4);
        for number in 7..12 {
            assert!(window.push(b"xxxx", Sequence(number)), "{number}");
        }
        assert_eq!(held(&window), [9, 10, 11]);
    }

    #[test]
    fn packets_of_one_length_are_one_run_and_a_shorter_one_ends_it() {
        let mut window = window(2, 1_000, 100);
        for message in [&b"aaaa"[..], b"bbbb", b"cccc", b"dddd", b"e"] {
            assert!(window.push(message, Sequence(7)));
        }
        let (run, next) = window.run(Sequence(7), 10).unwrap();
        assert_eq!(
            (run.packet_bytes(), run.bytes().len(), next),
            (32, 32 + 32 + 23, Sequence(12))
        );
        let numbers = run.packets().map(|packet| {
            let packet = Downstream::parse(packet).unwrap();
            (packet.sequence().0, packet.messages().len())
        });
        assert_eq!(numbers.collect::<Vec<_>>(), [(7, 2), (9, 2), (11, 1)]);
        // Sent: what follows is not packed with it. It is longer, so it ends the run, too.
        assert!(window.push(b"ffff", Sequence(7)));
        assert_eq!(window.run(Sequence(11), 10).unwrap().1, Sequence(12));
        assert_eq!(window.run(Sequence(9), 10).unwrap().1, Sequence(12));
        assert_eq!(window.run(Sequence(7), 1).unwrap().1, Sequence(9));
        assert_eq!(window.run(Sequence(12), 10).unwrap().1, Sequence(13));
        assert!(window.run(Sequence(13), 10).is_none());
    }

    #[test]
    fn numbers_can_be_left_out_and_longer_ranges_than_the_window_empty_it() {
        let mut window = window(2, 1_000, 10);
        for message in [b"aaaa", b"bbbb", b"cccc"] {
            assert!(window.push(message, Sequence(7)));
        }
        assert!(window.skip_to(Sequence(14), Sequence(7)));
        assert!(window.push(b"hhhh", Sequence(7)));
        assert_eq!(window.next_sequence(), Sequence(15));
        let next = |window: &Window, from| window.next_held(Sequence(from)).map(|found| found.0);
        assert_eq!(
            [1, 9, 10, 13, 14, 15].map(|from| next(&window, from)),
            [Some(7), Some(9), Some(14), Some(14), Some(14), None]
        );
        assert_eq!(get(&window, 11), None);
        assert_eq!(
            window.run(Sequence(9), 10).unwrap().1,
            Sequence(10),
            "a hole ends a run"
        );
        assert_eq!(window.run(Sequence(10), 10).unwrap().1, Sequence(15));
        assert!(!window.skip_to(Sequence(19), Sequence(8)), "8 is kept");
        assert!(window.skip_to(Sequence(19), Sequence(9)));
        assert_eq!((window.first(), next(&window, 15)), (Sequence(9), None));
        assert!(!window.skip_to(Sequence(1_000), Sequence(18)));
        assert!(window.skip_to(Sequence(1_000), Sequence(19)));
        assert_eq!(
            (window.first(), window.next_sequence()),
            (Sequence(1_000), Sequence(1_000))
        );
        assert!(window.push(b"x", Sequence(1_000)));
        assert_eq!(held(&window), [1_000]);
    }

    #[test]
    fn random_histories_agree_with_a_plain_list() {
        let seed = crate::test_seed();
        let mut random = fastrand::Rng::with_seed(seed);
        let options = WindowOptions {
            packet_bytes_max: 90,
            bytes: 400,
            messages_max: 20,
        };
        let mut window = Window::new("HDAAEUVB40".parse().unwrap(), Sequence(1), options);
        let mut all: Vec<Option<Vec<u8>>> = Vec::new();
        let mut keep = 1;
        for _ in 0..20_000 {
            let message = vec![random.u8(..); random.usize(0..60)];
            let hole = random.usize(1..25);
            let next = Sequence(window.next_sequence().0 + hole as u64);
            if random.u8(..10) == 0 && window.skip_to(next, Sequence(keep)) {
                all.extend(std::iter::repeat_n(None, hole));
                keep = keep.max(window.first().0);
            } else if window.push(&message, Sequence(keep)) {
                all.push(Some(message));
            } else {
                assert!(window.first().0 <= keep, "seed {seed}");
                // Sends what waits.
                while let Some((run, next)) = window.run(Sequence(keep), random.usize(1..5)) {
                    for packet in run.packets() {
                        let packet = Downstream::parse(packet).unwrap();
                        assert!(packet.sequence().0 >= keep, "seed {seed}");
                        keep = packet.next_sequence().0;
                        for (number, message) in packet.messages() {
                            let expected = &all[usize::try_from(number.0).unwrap() - 1];
                            assert_eq!(Some(message), expected.as_deref(), "seed {seed}");
                        }
                    }
                    assert_eq!(next.0, keep, "seed {seed}");
                }
                keep = window.next_sequence().0;
            }
            assert_eq!(
                window.next_sequence().0,
                all.len() as u64 + 1,
                "seed {seed}"
            );
            assert!(
                window.next_sequence().0 - window.first().0 <= 20,
                "seed {seed}"
            );
            for number in window.first().0..window.next_sequence().0 {
                let expected = &all[usize::try_from(number).unwrap() - 1];
                assert_eq!(get(&window, number), expected.as_deref(), "seed {seed}");
            }
        }
    }
}
