use super::*;
use crate::{WindowOptions, wire::Downstream};

const SECOND: u64 = 1_000_000_000;

fn session() -> Session {
    "HDAAEUVB40".parse().unwrap()
}

fn address(text: &str) -> SocketAddr {
    SocketAddr::new(text.parse().unwrap(), 4_000)
}

/// Messages of one earlier session and of the current one, from 1 on.
struct Store {
    sessions: Vec<(Session, u64)>,
}

fn message(number: u64) -> Vec<u8> {
    number.to_be_bytes().to_vec()
}

impl MessageStore for Store {
    fn range(&mut self, session: Session) -> io::Result<Option<Range<Sequence>>> {
        let found = self.sessions.iter().find(|(known, _)| *known == session);
        Ok(found.map(|(_, last)| Sequence(1)..Sequence(last + 1)))
    }

    fn read(
        &mut self,
        session: Session,
        first: Sequence,
        each: &mut dyn FnMut(Sequence, &[u8]) -> bool,
    ) -> io::Result<()> {
        let range = self.range(session)?.unwrap();
        for number in first.0..range.end.0 {
            if !each(Sequence(number), &message(number)) {
                break;
            }
        }
        Ok(())
    }
}

/// A window of ten packets of ten messages.
fn empty_window(first: u64) -> Window {
    let options = WindowOptions {
        packet_bytes_max: 20 + 10 * 10,
        bytes: 10_000,
        messages_max: 100,
    };
    Window::new(session(), Sequence(first), options)
}

/// The window holds 101 to 200.
fn window() -> Window {
    let mut window = empty_window(51);
    for number in 51..=200 {
        assert!(window.push(&message(number), Sequence(u64::MAX)));
    }
    assert_eq!(window.first(), Sequence(101));
    window
}

fn server(address_rate: Option<Rate>, total_rate: Option<Rate>) -> RetransmitServer {
    RetransmitServer::new(RetransmitOptions {
        // Twelve messages of eight bytes.
        packet_bytes_max: 20 + 12 * 10,
        allowed: vec!["10.1.0.0/16".parse().unwrap(), "fd00::/8".parse().unwrap()],
        address_rate,
        total_rate,
    })
}

fn request(session: Session, sequence: u64, count: u16) -> [u8; 20] {
    let sequence = Sequence(sequence);
    Request {
        session,
        sequence,
        count,
    }
    .to_bytes()
}

/// First and last number of an answer, checked against what was published; (n, n − 1) is `nothing before n`.
fn range(answer: Answer<'_>) -> Result<(u64, u64), Silence> {
    match answer {
        Answer::Silence(silence) => Err(silence),
        Answer::Packet(bytes) => {
            let packet = Downstream::parse(bytes).unwrap();
            for (sequence, bytes) in packet.messages() {
                assert_eq!(bytes, message(sequence.0));
            }
            Ok((packet.sequence().0, packet.next_sequence().0 - 1))
        }
    }
}

#[test]
fn one_packet_answers_with_as_much_as_fits_from_window_and_store() {
    let window = window();
    let old: Session = "HDAAEUVB30".parse().unwrap();
    let mut store = Store {
        sessions: vec![(old, 30), (session(), 150)],
    };
    let mut server = server(None, None);
    let mut ask = |session_asked, first, count, with_store: bool| {
        let store: Option<&mut dyn MessageStore> = if with_store { Some(&mut store) } else { None };
        let bytes = request(session_asked, first, count);
        range(server.answer(0, address("10.1.2.3"), &bytes, Some(&window), store))
    };
    // From the window.
    assert_eq!(ask(session(), 120, 5, false), Ok((120, 124)));
    assert_eq!(ask(session(), 120, 50, false), Ok((120, 131)), "one packet");
    assert_eq!(
        ask(session(), 195, 50, false),
        Ok((195, 200)),
        "what is published"
    );
    assert_eq!(
        ask(session(), 95, 50, false),
        Ok((101, 112)),
        "what is left"
    );
    assert_eq!(ask(session(), 95, 6, false), Ok((101, 100)), "too old");
    assert_eq!(ask(session(), 201, 1, false), Err(Silence::NotPublished));
    assert_eq!(
        ask(session(), u64::MAX, 2, false),
        Err(Silence::NotPublished)
    );
    assert_eq!(ask(old, 1, 1, false), Err(Silence::UnknownSession));
    assert_eq!(ask(session(), 120, 0, false), Err(Silence::Malformed));
    assert_eq!(ask(session(), 0, 5, false), Err(Silence::Malformed));
    // From the store, and from both.
    assert_eq!(ask(session(), 1, 5, true), Ok((1, 5)));
    assert_eq!(ask(session(), 95, 50, true), Ok((95, 106)));
    assert_eq!(ask(session(), 195, 50, true), Ok((195, 200)));
    assert_eq!(ask(old, 25, 50, true), Ok((25, 30)));
    assert_eq!(ask(old, 31, 1, true), Err(Silence::NotPublished));
    let stats = server.stats();
    assert_eq!((stats.answers, stats.too_old), (8, 1));
    assert_eq!(stats.messages, 5 + 12 + 6 + 12 + 5 + 12 + 6 + 6);
    assert_eq!(
        (stats.not_published, stats.unknown_session, stats.malformed),
        (3, 1, 2)
    );
}

#[test]
fn numbers_that_never_had_a_message_are_said_not_to_be_there() {
    let mut window = empty_window(1);
    for number in [1, 2, 3] {
        window.push(&message(number), Sequence(1));
    }
    window.skip_to(Sequence(10), Sequence(1));
    window.push(&message(10), Sequence(1));
    window.skip_to(Sequence(15), Sequence(1));
    let mut server = server(None, None);
    let mut ask = |first, count| {
        let bytes = request(session(), first, count);
        range(server.answer(0, address("10.1.2.3"), &bytes, Some(&window), None))
    };
    assert_eq!(ask(2, 20), Ok((2, 3)));
    assert_eq!(ask(4, 20), Ok((10, 10)));
    assert_eq!(ask(4, 6), Ok((10, 9)), "nothing before 10");
    assert_eq!(ask(5, 2), Ok((10, 9)));
    assert_eq!(ask(11, 4), Ok((15, 14)));
    assert_eq!(ask(11, 20), Ok((15, 14)), "of what is published");
    assert_eq!(ask(15, 1), Err(Silence::NotPublished));
}

#[test]
fn only_named_prefixes_are_answered() {
    let window = window();
    let mut server = server(None, None);
    let bytes = request(session(), 120, 5);
    let mut ask = |from| range(server.answer(0, address(from), &bytes, Some(&window), None));
    for friend in ["10.1.0.1", "10.1.255.255", "fd12::1", "::ffff:10.1.2.3"] {
        assert_eq!(ask(friend), Ok((120, 124)), "{friend}");
    }
    for stranger in ["10.2.0.1", "192.0.2.1", "fe80::1", "::ffff:10.2.0.1"] {
        assert_eq!(ask(stranger), Err(Silence::NotAllowed), "{stranger}");
    }
    assert_eq!(server.stats().not_allowed, 4);
    let mut closed = RetransmitServer::new(RetransmitOptions::default());
    let answer = closed.answer(0, address("10.1.0.1"), &bytes, Some(&window), None);
    assert_eq!(answer, Answer::Silence(Silence::NotAllowed));
}

/// HAZARDS MC-10: the server rate-limits and says so.
#[test]
fn an_address_gets_its_rate_and_all_together_theirs_and_refusals_are_counted() {
    let window = window();
    let bytes = request(session(), 120, 12);
    let packet_bytes = 140;
    let rate = |packets_per_s: u64, burst: u64| {
        Some(Rate {
            bytes_per_s: packets_per_s * packet_bytes,
            burst_bytes: burst * packet_bytes,
        })
    };
    // Ten packets a second for each, after a burst of five (and the one that makes it busy).
    let mut server = server(rate(10, 5), rate(15, 100));
    let sent = |server: &mut RetransmitServer, now, from: &str, asked| {
        let got =
            |_: &u32| range(server.answer(now, address(from), &bytes, Some(&window), None)).is_ok();
        (0..asked).filter(got).count()
    };
    assert_eq!(sent(&mut server, 0, "10.1.0.1", 100), 6);
    assert_eq!(
        sent(&mut server, 0, "10.1.0.2", 100),
        6,
        "others have their own"
    );
    assert_eq!(sent(&mut server, SECOND / 10, "10.1.0.1", 100), 1);
    assert_eq!(
        sent(&mut server, SECOND, "10.1.0.1", 100),
        6,
        "no more than the burst"
    );
    // All together: 100 at once, whoever asks.
    let all: usize = (0..100)
        .map(|host| sent(&mut server, SECOND, &format!("10.1.7.{host}"), 6))
        .sum();
    assert_eq!(all, 101 - 6, "the last six still count");
    let stats = server.stats();
    assert_eq!(stats.answers + stats.rate_limited, 4 * 100 + 600);
}

#[test]
fn random_bytes_are_answered_with_silence_and_never_panic() {
    let seed = crate::test_seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let window = window();
    let mut server = server(None, None);
    for _ in 0..50_000 {
        let mut bytes = vec![0; random.usize(0..40)];
        random.fill(&mut bytes);
        if random.bool() && bytes.len() >= 10 {
            bytes[..10].copy_from_slice(session().as_bytes());
        }
        let from = address("10.1.0.1");
        let answer = server.answer(0, from, &bytes, Some(&window), None);
        if let Answer::Packet(packet) = answer {
            assert!(packet.len() <= 140 && bytes.len() == 20, "seed {seed}");
        }
    }
}

#[test]
fn prefixes_are_read_and_nonsense_is_refused() {
    for text in ["10.1.0.0/16", "0.0.0.0/0", "10.1.2.3", "fd00::/8", "::1"] {
        assert!(text.parse::<Prefix>().is_ok(), "{text}");
    }
    for text in [
        "",
        "10.1.0.0/33",
        "fd00::/129",
        "10.1/16",
        "host",
        "10.1.0.0/-1",
    ] {
        assert!(text.parse::<Prefix>().is_err(), "{text}");
    }
}
