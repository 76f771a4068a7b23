//! What receivers promise, case by case.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use support::world::{MS, SECOND, World, session};
use teeline_core::Sequence;
use teeline_feed::{
    Event, GapReason, PublisherOptions, Receiver, ReceiverOptions, ReceiverState, RequestOptions,
    Session, Sessions, Start,
    faults::LineFaults,
    wire::{Downstream, Encoder, Request},
};

fn packet(session: Session, first: u64, last: u64) -> Vec<u8> {
    let mut packet = Encoder::new(session, Sequence(first), 1_400);
    for number in first..=last {
        assert!(packet.push(format!("message {number}").as_bytes()));
    }
    packet.bytes().to_vec()
}

/// A receiver with everything that it delivered, as short texts.
struct Subject {
    receiver: Receiver,
    events: Vec<String>,
}

impl Subject {
    fn new(options: ReceiverOptions) -> Self {
        Self {
            receiver: Receiver::new(options),
            events: Vec::new(),
        }
    }

    fn line(&mut self, now: u64, line: usize, packet: &[u8]) {
        let events = &mut self.events;
        self.receiver
            .packet(now, line, packet, &mut |event| note(events, event));
    }

    fn answer(&mut self, now: u64, server: usize, packet: &[u8]) {
        let events = &mut self.events;
        self.receiver
            .answer(now, server, packet, &mut |event| note(events, event));
    }

    /// Polls, and gives the requests that are due: server, first number, count.
    fn requests(&mut self, now: u64) -> Vec<(usize, u64, u16)> {
        let events = &mut self.events;
        self.receiver.poll(now, &mut |event| note(events, event));
        let next = |receiver: &mut Receiver| receiver.next_request();
        std::iter::from_fn(|| next(&mut self.receiver))
            .map(|(server, bytes)| {
                let request = Request::parse(&bytes).unwrap();
                (server, request.sequence.0, request.count)
            })
            .collect()
    }

    fn line_stats(&self, line: usize) -> teeline_feed::LineStats {
        *self.receiver.lines().nth(line).unwrap()
    }
}

/// `1..3` for messages in a row, `lost 4..5 Deadline`, `session X@1`, `end X@9`.
fn note(events: &mut Vec<String>, event: Event<'_>) {
    match event {
        Event::Message { sequence, bytes } => {
            assert_eq!(bytes, format!("message {sequence}").as_bytes());
            let extended = events.last().and_then(|last| {
                let (first, end) = last.split_once("..")?;
                (end.parse::<u64>().ok()? + 1 == sequence.0).then(|| format!("{first}..{sequence}"))
            });
            match extended.filter(|text| text.starts_with(|c: char| c.is_ascii_digit())) {
                Some(text) => *events.last_mut().unwrap() = text,
                None => events.push(format!("{sequence}..{sequence}")),
            }
        }
        Event::Gap {
            first,
            last,
            reason,
        } => events.push(format!("lost {first}..{last} {reason:?}")),
        Event::SessionChange { to, next, .. } => events.push(format!("session {to}@{next}")),
        Event::EndOfSession { session, next } => events.push(format!("end {session}@{next}")),
        Event::NumberingWentBack {
            heard, expected, ..
        } => {
            events.push(format!("numbering went back to {heard} from {expected}"));
        }
    }
}

fn options() -> ReceiverOptions {
    ReceiverOptions {
        requests: RequestOptions {
            jitter_ns: 0,
            ..RequestOptions::default()
        },
        ..ReceiverOptions::default()
    }
}

fn with_servers(servers: usize) -> ReceiverOptions {
    ReceiverOptions {
        servers,
        ..options()
    }
}

fn growing(servers: usize) -> ReceiverOptions {
    ReceiverOptions {
        sessions: Sessions::Growing,
        ..with_servers(servers)
    }
}

/// HAZARDS MC-01
#[test]
fn overlapping_packets_and_a_second_line_deliver_once_in_order_without_requests() {
    let mut subject = Subject::new(with_servers(1));
    for (first, last) in [(1, 10), (5, 15), (12, 12), (16, 20)] {
        subject.line(0, 0, &packet(session(0), first, last));
    }
    subject.line(0, 1, &packet(session(0), 1, 20));
    assert_eq!(subject.events, ["session HDAAEUVB40@1", "1..20"]);
    assert_eq!(subject.requests(10 * SECOND), []);
    let duplicates = [subject.line_stats(0), subject.line_stats(1)].map(|line| line.duplicates);
    assert_eq!(duplicates, [6 + 1, 20]);
    let firsts = [subject.line_stats(0), subject.line_stats(1)].map(|line| line.first_copies);
    assert_eq!(firsts, [20, 0]);
    assert_eq!(subject.receiver.state(), ReceiverState::InSync);
}

/// HAZARDS MC-03
#[test]
fn loss_of_the_last_packet_is_seen_at_the_first_heartbeat_and_repaired_in_one_round_trip() {
    let mut subject = Subject::new(with_servers(1));
    subject.line(0, 0, &packet(session(0), 1, 5));
    assert_eq!(subject.receiver.state(), ReceiverState::InSync);
    // 6 and 7 are lost on both lines.
    subject.line(SECOND, 0, &Downstream::heartbeat(session(0), Sequence(8)));
    assert_eq!(subject.receiver.state(), ReceiverState::Recovering);
    assert_eq!(subject.receiver.lag(), 2);
    let due = subject.receiver.deadline().unwrap();
    assert_eq!(due, SECOND + MS, "after the delay");
    assert_eq!(subject.requests(due), [(0, 6, 2)]);
    subject.answer(due + MS, 0, &packet(session(0), 6, 7));
    assert_eq!(subject.receiver.state(), ReceiverState::InSync);
    assert_eq!(subject.events, ["session HDAAEUVB40@1", "1..7"]);
    assert_eq!(subject.receiver.deadline(), None);
}

/// HAZARDS MC-04
#[test]
fn packets_of_another_session_are_counted_and_never_delivered() {
    let mut subject = Subject::new(with_servers(1));
    let (ours, other) = (session(0), session(1));
    subject.line(0, 0, &packet(ours, 1, 5));
    for number in 6..40 {
        for _ in 0..3 {
            subject.line(number, 0, &packet(other, number, number));
        }
        if number != 20 {
            subject.line(number, 0, &packet(ours, number, number));
        }
    }
    assert_eq!(subject.line_stats(0).wrong_session, 34 * 3);
    assert_eq!(subject.requests(MS + 100), [(0, 20, 1)]);
    // An answer of the other session fills nothing.
    subject.answer(MS + 200, 0, &packet(other, 20, 20));
    assert_eq!(subject.receiver.stats().answers_wrong_session, 1);
    assert_eq!(subject.events, ["session HDAAEUVB40@1", "1..19"]);
    subject.answer(MS + 300, 0, &packet(ours, 20, 20));
    assert_eq!(subject.events, ["session HDAAEUVB40@1", "1..39"]);
}

/// HAZARDS MC-04
#[test]
fn a_change_of_session_is_one_event_and_the_old_session_stays_ignored() {
    let mut subject = Subject::new(growing(0));
    let (old, new) = (session(0), session(1));
    subject.line(0, 0, &packet(old, 1, 5));
    for number in 1..=9 {
        subject.line(number, 0, &packet(new, number, number));
        subject.line(number, 1, &packet(new, number, number));
    }
    for number in 6..=9 {
        subject.line(10, 0, &packet(old, number, number));
    }
    assert_eq!(
        subject.events,
        [
            "session HDAAEUVB40@1",
            "1..5",
            "session HDAAEUVB41@1",
            "1..9"
        ]
    );
    assert_eq!(
        subject.line_stats(0).wrong_session,
        4,
        "late packets of the old session"
    );
    assert_eq!(subject.line_stats(1).wrong_session, 0);
    assert_eq!(subject.receiver.stats().sessions, 2);
}

#[test]
fn open_gaps_of_the_old_session_are_filled_or_reported_before_the_new_one_begins() {
    for filled in [true, false] {
        let mut subject = Subject::new(growing(1));
        let (old, new) = (session(0), session(1));
        subject.line(0, 0, &packet(old, 1, 5));
        subject.line(0, 0, &packet(old, 8, 9));
        for number in 1..=6 {
            subject.line(number, 0, &packet(new, number, number));
        }
        assert_eq!(subject.events, ["session HDAAEUVB40@1", "1..5"]);
        assert_eq!(subject.receiver.state(), ReceiverState::Recovering);
        assert_eq!(subject.requests(2 * MS), [(0, 6, 2)]);
        if filled {
            subject.answer(3 * MS, 0, &packet(old, 6, 7));
            assert_eq!(
                subject.events[1..],
                ["1..9", "session HDAAEUVB41@1", "1..6"]
            );
        } else {
            let due = SECOND;
            subject.requests(due);
            let expected = [
                "1..5",
                "lost 6..7 Deadline",
                "8..9",
                "session HDAAEUVB41@1",
                "1..6",
            ];
            assert_eq!(subject.events[1..], expected);
        }
    }
}

#[test]
fn a_session_is_followed_when_it_may_be_and_never_while_the_current_one_is_heard() {
    // Twenty packets of another session, `interval` apart, while heartbeats of the current one come or do not.
    let wrong = |sessions, other, interval, heard: bool| {
        let mut subject = Subject::new(ReceiverOptions {
            sessions,
            ..options()
        });
        subject.line(0, 0, &packet(session(5), 1, 1));
        for number in 1..=20 {
            let now = number * interval;
            subject.line(now, 0, &packet(session(other), number, number));
            if heard {
                subject.line(now, 1, &Downstream::heartbeat(session(5), Sequence(2)));
            }
        }
        let followed = subject.events.len() == 4 && subject.events[3] == "1..20";
        assert!(
            followed || subject.events.len() == 2,
            "{:?}",
            subject.events
        );
        (subject.line_stats(0).wrong_session, followed)
    };
    for other in [4, 6] {
        assert_eq!(wrong(Sessions::Follow, other, SECOND, false), (0, true));
        assert_eq!(
            wrong(Sessions::Follow, other, MS, false),
            (20, false),
            "not silent yet"
        );
        assert_eq!(wrong(Sessions::Follow, other, SECOND, true), (20, false));
        let only = Sessions::Only(session(5));
        assert_eq!(wrong(only, other, SECOND, false), (20, false));
    }
    assert_eq!(wrong(Sessions::Growing, 6, MS, false), (0, true));
    assert_eq!(wrong(Sessions::Growing, 6, MS, true), (20, false));
    assert_eq!(
        wrong(Sessions::Growing, 4, SECOND, false),
        (20, false),
        "an older one"
    );
}

/// HAZARDS MC-04
#[test]
fn a_receiver_that_goes_on_in_a_session_begins_none_that_orders_before_it() {
    let start = Start::From {
        session: Some(session(5)),
        next: Sequence(50),
    };
    let mut subject = Subject::new(ReceiverOptions {
        start,
        ..growing(1)
    });
    subject.line(0, 0, &packet(session(4), 80, 89));
    assert_eq!(subject.events, [""; 0], "late, of one that is over");
    subject.line(0, 0, &packet(session(5), 50, 54));
    assert_eq!(subject.events, ["session HDAAEUVB45@50", "50..54"]);
    let later = ReceiverOptions {
        start,
        ..growing(1)
    };
    let mut subject = Subject::new(later);
    subject.line(0, 0, &packet(session(6), 1, 3));
    assert_eq!(subject.events, ["session HDAAEUVB46@1", "1..3"]);
}

/// HAZARDS MC-09
#[test]
fn a_gap_that_nobody_fills_is_one_loss_at_the_deadline_and_the_data_continues() {
    let mut subject = Subject::new(with_servers(1));
    subject.line(0, 0, &packet(session(0), 1, 5));
    subject.line(0, 0, &packet(session(0), 7, 9));
    assert_eq!(subject.events.last().unwrap(), "1..5");
    let mut asked = 0;
    while let Some(due) = subject.receiver.deadline() {
        asked += subject.requests(due).len();
        if subject.events.len() > 2 {
            assert_eq!(due, SECOND, "the deadline, not earlier or later");
        }
    }
    assert!(asked > 3, "asked {asked} times");
    subject.line(SECOND + 1, 0, &packet(session(0), 10, 10));
    assert_eq!(subject.events[1..], ["1..5", "lost 6..6 Deadline", "7..10"]);
    // Nobody answers: the next gap holds back nothing for another deadline.
    subject.line(2 * SECOND, 0, &packet(session(0), 12, 12));
    while let Some(due) = subject.receiver.deadline() {
        subject.requests(due);
        assert!(due <= 2 * SECOND + 30 * MS, "{due}");
    }
    assert_eq!(subject.events[4..], ["lost 11..11 Deadline", "12..12"]);
    assert_eq!(subject.receiver.state(), ReceiverState::InSync);
    let stats = subject.receiver.stats();
    assert_eq!((stats.delivered, stats.lost, stats.gaps), (10, 2, 2));
}

/// HAZARDS MC-09
#[test]
fn a_server_that_sends_what_nobody_asked_for_is_as_good_as_silent() {
    let mut subject = Subject::new(with_servers(1));
    subject.line(0, 0, &packet(session(0), 1, 5));
    subject.line(0, 0, &packet(session(0), 7, 9));
    while let Some(due) = subject.receiver.deadline() {
        subject.requests(due);
        subject.answer(due, 0, &packet(session(0), 1, 5));
    }
    assert_eq!(subject.events[1..], ["1..5", "lost 6..6 Deadline", "7..9"]);
    subject.line(2 * SECOND, 0, &packet(session(0), 11, 11));
    while let Some(due) = subject.receiver.deadline() {
        subject.requests(due);
        subject.answer(due, 0, &packet(session(0), 1, 5));
        assert!(due <= 2 * SECOND + 30 * MS, "{due}");
    }
    assert_eq!(subject.events[4..], ["lost 10..10 Deadline", "11..11"]);
}

/// HAZARDS MC-09
#[test]
fn what_every_server_has_thrown_away_is_lost_without_waiting() {
    let mut subject = Subject::new(with_servers(2));
    subject.line(0, 0, &packet(session(0), 1, 5));
    subject.line(0, 0, &packet(session(0), 7, 9));
    assert_eq!(subject.requests(MS), [(0, 6, 1)]);
    subject.answer(2 * MS, 0, &Downstream::heartbeat(session(0), Sequence(7)));
    assert_eq!(
        subject.requests(2 * MS),
        [(1, 6, 1)],
        "the other one at once"
    );
    // A heartbeat with an earlier number refuses nothing.
    subject.answer(3 * MS, 1, &Downstream::heartbeat(session(0), Sequence(6)));
    assert_eq!(subject.events.last().unwrap(), "1..5");
    subject.answer(3 * MS, 1, &Downstream::heartbeat(session(0), Sequence(9)));
    subject.requests(3 * MS);
    assert_eq!(subject.events[1..], ["1..5", "lost 6..6 Refused", "7..9"]);
}

/// HAZARDS MC-09
#[test]
fn a_dead_server_is_passed_over_and_the_one_that_answers_is_asked_first() {
    let mut subject = Subject::new(with_servers(2));
    subject.line(0, 0, &packet(session(0), 1, 5));
    subject.line(0, 0, &packet(session(0), 7, 9));
    assert_eq!(subject.requests(MS), [(0, 6, 1)]);
    assert_eq!(subject.requests(21 * MS), [(1, 6, 1)]);
    subject.answer(22 * MS, 1, &packet(session(0), 6, 6));
    subject.line(30 * MS, 0, &packet(session(0), 11, 11));
    assert_eq!(subject.requests(31 * MS), [(1, 10, 1)]);
    subject.answer(32 * MS, 1, &packet(session(0), 10, 10));
    assert_eq!(subject.events[1..], ["1..11"]);
    let stats = subject.receiver.stats();
    assert_eq!((stats.requests, stats.retries), (2, 1));
}

#[test]
fn without_a_server_a_gap_waits_for_the_other_line_only() {
    let mut subject = Subject::new(options());
    subject.line(0, 0, &packet(session(0), 1, 5));
    subject.line(0, 0, &packet(session(0), 8, 9));
    subject.line(MS / 2, 1, &packet(session(0), 6, 6));
    assert_eq!(subject.events[1..], ["1..6"]);
    let due = subject.receiver.deadline().unwrap();
    assert_eq!(due, MS / 2 + MS);
    assert_eq!(subject.requests(due), []);
    assert_eq!(subject.events[1..], ["1..6", "lost 7..7 NoServer", "8..9"]);
    assert_eq!(subject.receiver.deadline(), None);
    // The late copy is a duplicate of what was reported.
    subject.line(due + 1, 1, &packet(session(0), 7, 7));
    assert_eq!(subject.line_stats(1).duplicates, 1);
}

#[test]
fn a_partial_answer_is_progress_and_the_rest_is_asked_for_at_once() {
    let mut subject = Subject::new(with_servers(1));
    subject.line(0, 0, &packet(session(0), 1, 20));
    subject.line(0, 0, &packet(session(0), 31, 31));
    assert_eq!(subject.requests(MS), [(0, 21, 10)]);
    subject.answer(2 * MS, 0, &packet(session(0), 21, 24));
    assert_eq!(subject.receiver.deadline(), Some(2 * MS));
    assert_eq!(subject.requests(2 * MS), [(0, 25, 6)]);
    subject.answer(3 * MS, 0, &packet(session(0), 25, 30));
    assert_eq!(subject.events[1..], ["1..31"]);
    assert_eq!(subject.receiver.stats().requests, 2);
}

#[test]
fn answers_that_nobody_asked_for_change_nothing() {
    let mut subject = Subject::new(with_servers(1));
    subject.line(0, 0, &packet(session(0), 1, 5));
    subject.line(0, 0, &packet(session(0), 8, 9));
    // The gap is known and not asked for yet; and there is nothing beyond 9.
    subject.answer(1, 0, &packet(session(0), 6, 12));
    assert_eq!(subject.events[1..], ["1..5"]);
    let stats = subject.receiver.stats();
    assert_eq!((stats.answers_unrequested, stats.answer_duplicates), (5, 2));
    assert_eq!(subject.receiver.lag(), 4);
    subject.answer(1, 0, b"noise");
    assert_eq!(subject.receiver.stats().answers_malformed, 1);
    assert_eq!(subject.requests(MS), [(0, 6, 2)]);
    // Asked: now the part that was asked for is taken, and no more.
    subject.answer(2 * MS, 0, &packet(session(0), 6, 12));
    assert_eq!(subject.events[1..], ["1..9"]);
    assert_eq!(subject.receiver.state(), ReceiverState::InSync);
}

#[test]
fn adjacent_gaps_are_asked_for_together_and_long_ones_in_packets() {
    let mut subject = Subject::new(with_servers(1));
    subject.line(0, 0, &packet(session(0), 1, 10));
    subject.line(0, 0, &Downstream::heartbeat(session(0), Sequence(15)));
    subject.line(0, 0, &Downstream::heartbeat(session(0), Sequence(19)));
    assert_eq!(subject.receiver.open_gaps(), 1);
    assert_eq!(subject.requests(MS), [(0, 11, 8)]);
    subject.answer(MS, 0, &packet(session(0), 11, 18));
    // 1,380 bytes hold 125 messages of 9 to 10 bytes and their lengths, of which the largest packet had 10.
    subject.line(2 * MS, 0, &Downstream::heartbeat(session(0), Sequence(319)));
    let requests = subject.requests(3 * MS);
    let asked: u64 = requests.iter().map(|(_, _, count)| u64::from(*count)).sum();
    assert_eq!(asked, 300);
    assert_eq!(requests.len(), 3, "{requests:?}");
}

/// HAZARDS MC-11
#[test]
fn a_publisher_that_repeats_old_numbers_is_named_once_and_ignored() {
    let mut subject = Subject::new(options());
    for number in 1..=100 {
        subject.line(number, 0, &packet(session(0), number, number));
    }
    for number in 1..=50 {
        subject.line(200 + number, 0, &packet(session(0), number, number));
    }
    let expected = ["1..100", "numbering went back to 9 from 101"];
    assert_eq!(subject.events[1..], expected);
    assert_eq!(subject.line_stats(0).duplicates, 50);
}

#[test]
fn one_forged_packet_far_ahead_opens_no_gap_and_a_real_jump_is_believed() {
    let mut subject = Subject::new(with_servers(1));
    subject.line(0, 0, &packet(session(0), 1, 5));
    let far = 1 << 40;
    subject.line(1, 0, &Downstream::heartbeat(session(0), Sequence(far)));
    subject.line(
        1,
        0,
        &Downstream::end_of_session(session(0), Sequence(2 * far)),
    );
    assert_eq!(subject.receiver.lag(), 0);
    assert_eq!(subject.line_stats(0).beyond_jump, 2);
    subject.line(2, 0, &packet(session(0), 6, 6));
    assert_eq!(subject.events[1..], ["1..6"]);
    // 4,194,304 is near enough.
    subject.line(
        3,
        0,
        &Downstream::heartbeat(session(0), Sequence(7 + (1 << 22))),
    );
    assert_eq!(subject.receiver.lag(), 1 << 22);

    let mut subject = Subject::new(options());
    subject.line(0, 0, &packet(session(0), 1, 5));
    for number in 0..8 {
        subject.line(1, 0, &packet(session(0), far + number, far + number));
    }
    assert_eq!(subject.line_stats(0).beyond_jump, 7);
    subject.requests(10 * MS);
    let lost = format!("lost 6..{} NoServer", far + 6);
    assert_eq!(
        subject.events[1..],
        ["1..5", lost.as_str(), &format!("{0}..{0}", far + 7)]
    );
}

#[test]
fn receivers_join_now_at_the_beginning_or_at_a_number() {
    let join = |start| {
        let mut subject = Subject::new(ReceiverOptions {
            start,
            ..with_servers(1)
        });
        subject.line(0, 0, &packet(session(3), 100, 104));
        let asked = subject.requests(MS);
        (
            subject.events.join(", "),
            asked.first().map(|(_, first, _)| *first),
        )
    };
    let from = |session, next| Start::From {
        session,
        next: Sequence(next),
    };
    assert_eq!(
        join(Start::Now),
        ("session HDAAEUVB43@100, 100..104".into(), None)
    );
    assert_eq!(
        join(Start::Beginning),
        ("session HDAAEUVB43@1".into(), Some(1))
    );
    let at_50 = ("session HDAAEUVB43@50".to_owned(), Some(50));
    assert_eq!(join(from(None, 50)), at_50);
    assert_eq!(join(from(Some(session(3)), 50)), at_50);
    // That number was of another session: this one is wanted whole.
    assert_eq!(
        join(from(Some(session(2)), 50)),
        ("session HDAAEUVB43@1".into(), Some(1))
    );
    assert_eq!(
        join(from(None, 103)),
        ("session HDAAEUVB43@103, 103..104".into(), None)
    );
    let mut subject = Subject::new(options());
    subject.line(0, 0, &Downstream::heartbeat(session(3), Sequence(100)));
    subject.line(0, 0, &packet(session(3), 100, 101));
    assert_eq!(subject.events, ["session HDAAEUVB43@100", "100..101"]);
}

#[test]
fn the_end_of_a_session_is_said_once_when_nothing_is_missing() {
    let mut subject = Subject::new(with_servers(1));
    let end = |next| Downstream::end_of_session(session(0), Sequence(next));
    subject.line(0, 0, &packet(session(0), 1, 5));
    subject.line(1, 0, &end(8));
    subject.line(1, 1, &end(8));
    assert_eq!(subject.events[1..], ["1..5"]);
    assert_eq!(subject.requests(2 * MS), [(0, 6, 2)]);
    subject.answer(3 * MS, 0, &packet(session(0), 6, 7));
    subject.line(4 * MS, 0, &end(8));
    assert_eq!(subject.events[1..], ["1..7", "end HDAAEUVB40@8"]);
    assert_eq!(subject.receiver.state(), ReceiverState::Ended);
    // An end in front of what was published is none; data behind one undoes it.
    subject.line(5 * MS, 0, &end(4));
    assert_eq!(subject.receiver.stats().ends_refused, 1);
    subject.line(6 * MS, 0, &packet(session(0), 8, 8));
    assert_eq!(subject.receiver.state(), ReceiverState::InSync);
    assert_eq!(subject.receiver.stats().after_end, 1);
    // After an end, one packet of a new session is enough.
    subject.line(7 * MS, 0, &end(9));
    subject.line(8 * MS, 0, &packet(session(1), 1, 1));
    assert_eq!(
        subject.events[3..],
        ["8..8", "end HDAAEUVB40@9", "session HDAAEUVB41@1", "1..1"]
    );
}

#[test]
fn messages_beyond_the_window_are_dropped_and_asked_for_when_there_is_room() {
    let mut subject = Subject::new(ReceiverOptions {
        reorder_messages_max: 10,
        ..with_servers(1)
    });
    subject.line(0, 0, &packet(session(0), 1, 1));
    // 2 is missing; 3 to 11 are held, 12 to 20 have no room.
    for number in 3..=20 {
        subject.line(1, 0, &packet(session(0), number, number));
    }
    assert_eq!(subject.line_stats(0).beyond_window, 9);
    assert_eq!(subject.receiver.lag(), 19);
    assert_eq!(subject.requests(2 * MS), [(0, 2, 1)]);
    subject.answer(3 * MS, 0, &packet(session(0), 2, 2));
    assert_eq!(subject.events[1..], ["1..11"]);
    let requests = subject.requests(5 * MS);
    let asked: u64 = requests.iter().map(|(_, _, count)| u64::from(*count)).sum();
    assert_eq!((requests[0].1, asked), (12, 9), "{requests:?}");
    subject.answer(6 * MS, 0, &packet(session(0), 12, 20));
    assert_eq!(subject.events[1..], ["1..20"]);
}

#[test]
fn how_far_one_line_trails_the_other_is_measured() {
    let mut subject = Subject::new(options());
    for number in 1..=10 {
        subject.line(number * MS, 0, &packet(session(0), number, number));
        subject.line(
            number * MS + 700 * number,
            1,
            &packet(session(0), number, number),
        );
    }
    let (a, b) = (subject.line_stats(0), subject.line_stats(1));
    assert_eq!((a.lag_ns_max, b.lag_ns, b.lag_ns_max), (0, 7_000, 7_000));
    assert_eq!(
        (a.first_copies, b.duplicates, a.next, b.next),
        (10, 10, 11, 11)
    );
}

#[test]
fn number_zero_and_noise_are_counted_as_malformed() {
    let mut subject = Subject::new(options());
    let mut zero = packet(session(0), 1, 2);
    zero[10..18].fill(0);
    subject.line(0, 0, &zero);
    subject.line(0, 0, b"noise");
    assert_eq!(subject.line_stats(0).malformed, 2);
    assert_eq!(subject.receiver.state(), ReceiverState::Joining);
    assert!(subject.events.is_empty());
}

/// HAZARDS MC-10
#[test]
fn every_tenth_packet_lost_is_repaired_within_three_round_trips() {
    let round_trip = 50 * MS;
    let publisher = PublisherOptions::default();
    let receiver = ReceiverOptions {
        requests: RequestOptions {
            timeout_ns: 3 * round_trip,
            deadline_ns: 10 * SECOND,
            ..RequestOptions::default()
        },
        ..ReceiverOptions::default()
    };
    let path = LineFaults {
        delay_ns: round_trip / 2,
        ..LineFaults::default()
    };
    let mut world = World::new(1, publisher, receiver, &[LineFaults::default()], &[path]);
    // 1,000 packets at one instant, of which every tenth is not put on the line.
    for number in 0..1_000 {
        world.publish_numbered(3);
        if number % 10 == 5 {
            world.publisher.transmit(world.now).unwrap();
        }
        world.settle();
    }
    let before = world.now;
    world.run_for(SECOND - 1);
    assert_eq!(world.oracle.delivered, 3_000);
    assert_eq!(world.oracle.lost(), 0);
    let first_request = world.requests_ns[0];
    let in_step = *world.oracle.delivered_ns.last().unwrap();
    assert!(
        first_request - before <= 2 * MS,
        "after the delay and the jitter"
    );
    assert!(
        in_step - first_request <= 3 * round_trip,
        "{}",
        in_step - first_request
    );
    assert_eq!(world.requests_ns.len(), 100, "one request per gap");
}

/// HAZARDS MC-10
#[test]
fn receivers_that_miss_the_same_do_not_ask_at_the_same_instant() {
    let mut times = Vec::new();
    for seed in 0..20 {
        let mut subject = Subject::new(ReceiverOptions {
            servers: 1,
            seed,
            ..ReceiverOptions::default()
        });
        subject.line(0, 0, &packet(session(0), 1, 1));
        subject.line(0, 0, &packet(session(0), 3, 3));
        times.push(subject.receiver.deadline().unwrap());
    }
    times.sort_unstable();
    assert!(times[0] >= MS && times[19] <= 2 * MS);
    times.dedup();
    assert!(times.len() >= 19, "{times:?}");
}

/// HAZARDS MC-11
#[test]
fn a_publisher_killed_goes_on_from_its_record_or_in_a_new_session_and_says_so() {
    let line = [LineFaults::default()];
    let receiver = ReceiverOptions {
        sessions: Sessions::Growing,
        ..ReceiverOptions::default()
    };
    let mut world = World::new(1, PublisherOptions::default(), receiver, &line, &[]);
    world.publish_numbered(5_000);
    world.run_for(MS);
    // (a) with its durable number
    world.restart_publisher(session(0));
    world.publish_numbered(100);
    world.run_for(MS);
    assert_eq!(world.oracle.delivered, 5_100);
    assert_eq!(world.receiver.lines().next().unwrap().duplicates, 0);
    // (b) with lost state
    world.restart_publisher(session(1));
    world.publish_numbered(100);
    world.run_for(5 * SECOND);
    assert_eq!(world.oracle.delivered, 5_200);
    assert_eq!(
        world.oracle.changes,
        [(session(0), true), (session(1), false)]
    );
    world.finish();
    assert_eq!(world.oracle.delivered, world.published());
}

/// HAZARDS MC-11
#[test]
fn a_receiver_restarted_five_times_gets_one_copy_each_time() {
    let path = LineFaults {
        delay_ns: MS,
        ..LineFaults::default()
    };
    let receiver = ReceiverOptions {
        start: Start::Beginning,
        ..ReceiverOptions::default()
    };
    let line = [LineFaults::default()];
    let mut world = World::new(
        1,
        PublisherOptions::default(),
        receiver.clone(),
        &line,
        &[path],
    );
    world.publish_numbered(20_000);
    world.run_for(MS);
    for run in 0..5 {
        let options = ReceiverOptions {
            lines: 1,
            servers: 1,
            seed: run,
            ..receiver.clone()
        };
        world.receiver = Receiver::new(options);
        world.oracle = support::world::Oracle::default();
        world.run_for(3 * SECOND);
        assert_eq!(world.oracle.delivered, 20_000, "run {run}");
        assert_eq!(world.receiver.stats().answer_duplicates, 0, "run {run}");
        assert_eq!(world.receiver.state(), ReceiverState::InSync);
    }
    assert!(
        world
            .oracle
            .gaps
            .iter()
            .all(|gap| gap.3 == GapReason::Deadline)
    );
}

#[test]
fn hostile_packets_never_panic_and_what_is_delivered_is_in_order() {
    // One that believes every session and jump in the end, and one that does not.
    hostile(with_servers(2));
    let delivered = hostile(ReceiverOptions {
        sessions: Sessions::Only(session(0)),
        jump_packets_min: 1_000,
        ..with_servers(2)
    });
    assert!(delivered > 100, "{delivered} delivered");
}

/// Sends noise that is nearly right to a receiver. How many messages it delivered.
fn hostile(options: ReceiverOptions) -> u64 {
    let seed = support::seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut subject = Receiver::new(ReceiverOptions {
        reorder_messages_max: 50,
        reorder_bytes_max: 500,
        ..options
    });
    let mut next = None;
    let mut check = |event: Event<'_>| match event {
        Event::Message { sequence, .. } => {
            assert_eq!(next, Some(sequence.0), "seed {seed}");
            next = Some(sequence.0 + 1);
        }
        Event::Gap { first, last, .. } => {
            assert_eq!(next, Some(first.0), "seed {seed}");
            next = Some(last.0 + 1);
        }
        Event::SessionChange { next: begins, .. } => next = Some(begins.0),
        Event::EndOfSession { .. } | Event::NumberingWentBack { .. } => {}
    };
    subject.packet(0, 0, &packet(session(0), 1, 1), &mut check);
    for now in 0..100_000 {
        let first = match random.u8(..8) {
            0 => random.u64(..),
            1 => u64::MAX - random.u64(..3),
            _ => 1 + now / 10 + random.u64(..100),
        };
        let mut bytes = packet(session(random.u64(..2)), 1, random.u64(..5));
        bytes[10..18].copy_from_slice(&first.to_be_bytes());
        if random.u8(..20) == 0 {
            bytes[18..20].fill(0xFF);
        }
        for _ in 0..random.usize(..2) * random.usize(..3) {
            let at = random.usize(..bytes.len());
            bytes[at] = random.u8(..);
        }
        bytes.truncate(if random.bool() {
            bytes.len()
        } else {
            random.usize(..=bytes.len())
        });
        let now = now * MS;
        match random.u8(..4) {
            0 => subject.answer(now, random.usize(..2), &bytes, &mut check),
            _ => subject.packet(now, random.usize(..2), &bytes, &mut check),
        }
        if random.u8(..4) == 0 {
            subject.poll(now, &mut check);
            while subject.next_request().is_some() {}
        }
    }
    subject.stats().delivered
}
