//! What the sockets promise, over multicast on the loopback interface.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use teeline_core::{Epoch, Sequence, time::Clock};
use teeline_feed::{
    Event, NoStore, Path, Publication, Publisher, PublisherOptions, Receiver, ReceiverOptions,
    ReceiverState, RequestOptions, RetransmitOptions, RetransmitServer, Run, Session, Sessions,
    Start, Subscription, Transport,
    driver::{DriverError, Interface, LineOptions, UdpTransport, own_subnets},
    faults::{Faulty, FaultyLine, LineFaults},
};
use teeline_os::SystemClock;

/// How long a test waits for what has to come. Not a promise: only an end.
const PATIENCE: Duration = Duration::from_secs(20);

fn loopback() -> Interface {
    Interface::Address(Ipv4Addr::LOCALHOST.into())
}

fn session(life: u64) -> Session {
    Session::from_epoch(Epoch(1_764_000_000_000_000 + life)).unwrap()
}

/// Lines of their own for each test: groups by `test`, and a port that nobody uses.
fn lines<const N: usize>(test: u8) -> [LineOptions; N] {
    let free = UdpSocket::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    std::array::from_fn(|line| {
        let ip = Ipv4Addr::new(239, 77, test, u8::try_from(line).unwrap() + 1);
        LineOptions::new(SocketAddr::new(ip.into(), free.port()), loopback())
    })
}

type Sender = Publication<UdpTransport, NoStore>;

/// A publication that answers requests on the loopback interface.
fn publication(lines: &[LineOptions], life: u64) -> Sender {
    let transport = UdpTransport::sender(lines, Some("127.0.0.1:0".parse().unwrap())).unwrap();
    let options = PublisherOptions {
        heartbeat_interval_ns: 20_000_000,
        window_bytes: 64 << 20,
        ..PublisherOptions::default()
    };
    let server = RetransmitServer::new(RetransmitOptions {
        allowed: vec!["127.0.0.0/8".parse().unwrap()],
        address_rate: None,
        total_rate: None,
        ..RetransmitOptions::default()
    });
    let publisher = Publisher::new(session(life), Sequence(1), options);
    Publication::new(publisher, server, None, transport, lines.len())
}

fn receiver_options(lines: usize) -> ReceiverOptions {
    ReceiverOptions {
        lines,
        servers: 1,
        start: Start::Beginning,
        requests: RequestOptions {
            deadline_ns: 10_000_000_000,
            ..RequestOptions::default()
        },
        ..ReceiverOptions::default()
    }
}

fn subscription<T: Transport>(
    sender: &mut Sender,
    options: ReceiverOptions,
    transport: T,
) -> Subscription<T> {
    let server = sender.transport().request_address().unwrap();
    Subscription::new(Receiver::new(options), vec![server], transport)
}

fn receiving(lines: &[LineOptions]) -> UdpTransport {
    UdpTransport::receiver(lines, Some("127.0.0.1:0".parse().unwrap())).unwrap()
}

/// Messages delivered, checked to be `message 1`, `message 2` and so on.
#[derive(Debug, Default)]
struct Check {
    next: u64,
    lost: u64,
    ended: bool,
}

impl Check {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Message { sequence, bytes } => {
                assert_eq!(sequence.0, self.next);
                assert_eq!(bytes, format!("message {sequence}").as_bytes());
                self.next += 1;
            }
            Event::Gap { first, last, .. } => {
                assert_eq!(first.0, self.next);
                self.lost += last.0 - first.0 + 1;
                self.next = last.0 + 1;
            }
            Event::SessionChange { next, .. } => self.next = next.0,
            Event::EndOfSession { .. } => self.ended = true,
            Event::NumberingWentBack { .. } => panic!("{event:?}"),
        }
    }
}

/// Lets both sides work until `done`, or there is no more patience.
#[track_caller]
fn work<T: Transport>(
    sender: &mut Sender,
    subscription: &mut Subscription<T>,
    check: &mut Check,
    done: impl Fn(&Subscription<T>, &Check) -> bool,
) {
    let end = SystemClock.monotonic_ns() + u64::try_from(PATIENCE.as_nanos()).unwrap();
    while !done(subscription, check) {
        let now = SystemClock.monotonic_ns();
        assert!(now < end, "{check:?} {:?}", subscription.receiver().stats());
        sender.do_work(now).unwrap();
        subscription
            .do_work(now, 256, &mut |event| check.event(event))
            .unwrap();
        subscription
            .transport()
            .wait(Duration::from_micros(100))
            .unwrap();
    }
}

fn publish(sender: &mut Sender, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        assert_eq!(
            sender.publish(format!("message {number}").as_bytes()),
            Ok(Sequence(number))
        );
    }
}

/// Whether multicast works on the loopback interface of this machine. Says so if not.
fn multicast_works() -> bool {
    let lines = lines::<1>(250);
    let try_it = || {
        let mut receiver = UdpTransport::receiver(&lines, None).ok()?;
        let mut sender = UdpTransport::sender(&lines, None).ok()?;
        sender.send(Path::Line(0), b"probe").ok()?;
        receiver.wait(Duration::from_secs(1)).ok()?;
        let received = receiver.receive_lines(1, &mut |_, _| ()).ok()?;
        (received == 1).then_some(())
    };
    let works = try_it().is_some();
    if !works {
        eprintln!("skipped: no multicast on the loopback interface");
    }
    works
}

#[test]
fn two_lines_merge_to_one_and_the_end_is_said() {
    if !multicast_works() {
        return;
    }
    let lines = lines::<2>(1);
    let mut sender = publication(&lines, 0);
    let mut subscription = subscription(&mut sender, receiver_options(2), receiving(&lines));
    let mut check = Check::default();
    for batch in 0..50 {
        publish(&mut sender, batch * 20 + 1..=batch * 20 + 20);
        work(&mut sender, &mut subscription, &mut check, |_, check| {
            check.next == batch * 20 + 21
        });
    }
    sender.end();
    work(&mut sender, &mut subscription, &mut check, |_, check| {
        check.ended
    });
    assert_eq!((check.next, check.lost), (1_001, 0));
    let receiver = subscription.receiver();
    assert_eq!(receiver.state(), ReceiverState::Ended);
    let messages: Vec<_> = receiver.lines().map(|line| line.messages).collect();
    assert_eq!(messages, [1_000, 1_000]);
    let firsts: u64 = receiver.lines().map(|line| line.first_copies).sum();
    assert_eq!(firsts, 1_000);
}

#[test]
fn a_late_receiver_asks_for_the_beginning_over_unicast() {
    if !multicast_works() {
        return;
    }
    let lines = lines::<1>(2);
    let mut sender = publication(&lines, 0);
    publish(&mut sender, 1..=5_000);
    sender.do_work(SystemClock.monotonic_ns()).unwrap();
    let mut subscription = subscription(&mut sender, receiver_options(1), receiving(&lines));
    let mut check = Check::default();
    work(&mut sender, &mut subscription, &mut check, |_, check| {
        check.next == 5_001
    });
    let stats = subscription.receiver().stats();
    assert_eq!((stats.answered_messages, stats.lost), (5_000, 0));
    assert_eq!(
        sender.server().stats().messages,
        5_000 + stats.answer_duplicates
    );
}

#[test]
fn faults_on_both_lines_are_repaired_over_sockets() {
    if !multicast_works() {
        return;
    }
    let seed = support::seed();
    let lines = lines::<2>(3);
    let mut sender = publication(&lines, 0);
    let faults = LineFaults {
        loss_ppm: 200_000,
        burst_ppm: 10_000,
        burst_packets_max: 10,
        duplicate_ppm: 50_000,
        reorder_ppm: 50_000,
        // Few enough that eight in a row are not behind their line when somebody stops the sender.
        reorder_ns_max: 100_000,
        ..LineFaults::default()
    };
    let faulty = (0..2)
        .map(|line| FaultyLine::new(faults.clone(), seed + line))
        .collect();
    let transport = Faulty::new(receiving(&lines), faulty, SystemClock);
    let mut subscription = subscription(&mut sender, receiver_options(2), transport);
    let mut check = Check::default();
    for number in 1..=3_000 {
        publish(&mut sender, number..=number);
        let now = SystemClock.monotonic_ns();
        sender.do_work(now).unwrap();
        subscription
            .do_work(now, 256, &mut |event| check.event(event))
            .unwrap();
    }
    sender.end();
    work(&mut sender, &mut subscription, &mut check, |_, check| {
        check.ended
    });
    assert_eq!((check.next, check.lost), (3_001, 0), "seed {seed}");
    let lost: u64 = subscription.transport().stats().map(|line| line.lost).sum();
    assert!(lost > 100, "seed {seed}: the faults happened");
    assert!(subscription.receiver().stats().requests > 0, "seed {seed}");
}

/// HAZARDS MC-07
#[test]
fn a_hosts_own_feed_in_the_same_group_never_enters_another() {
    if !multicast_works() {
        return;
    }
    let lines = lines::<1>(4);
    let mut own = publication(&lines, 7);
    let mut other = publication(&lines, 3);
    let options = ReceiverOptions {
        ignored_sessions: vec![session(7)],
        sessions: Sessions::Follow,
        ..receiver_options(1)
    };
    let mut subscription = subscription(&mut other, options, receiving(&lines));
    let mut check = Check::default();
    // Its own packets come first, and all the time.
    for number in 1..=100 {
        own.publish(b"own").unwrap();
        own.do_work(SystemClock.monotonic_ns()).unwrap();
        publish(&mut other, number..=number);
        work(&mut other, &mut subscription, &mut check, |_, check| {
            check.next == number + 1
        });
    }
    // All of them came in, and none went further.
    let wrong = |subscription: &Subscription<UdpTransport>| {
        subscription
            .receiver()
            .lines()
            .next()
            .unwrap()
            .wrong_session
    };
    work(
        &mut other,
        &mut subscription,
        &mut check,
        |subscription, _| wrong(subscription) >= 100,
    );
    assert_eq!((check.next, check.lost), (101, 0));
    assert_eq!(subscription.receiver().session(), Some(session(3)));
}

/// HAZARDS MC-07
#[test]
fn with_loopback_off_a_receiver_on_the_same_host_gets_nothing() {
    // On the loopback interface everything comes back, whatever the option says.
    let outside = if_addrs::get_if_addrs()
        .unwrap()
        .into_iter()
        .find(|interface| {
            interface.is_oper_up() && !interface.is_loopback() && interface.ip().is_ipv4()
        });
    let Some(outside) = outside.filter(|_| multicast_works()) else {
        eprintln!("skipped: no interface but the loopback one");
        return;
    };
    let mut lines = lines::<1>(5);
    lines[0].interface = Interface::Name(outside.name);
    // Nothing of this leaves the host.
    lines[0].ttl = 0;
    let mut heard = UdpTransport::sender(&lines, None).unwrap();
    let mut receiver = UdpTransport::receiver(&lines, None).unwrap();
    lines[0].loopback = false;
    let mut unheard = UdpTransport::sender(&lines, None).unwrap();
    unheard.send(Path::Line(0), b"unheard").unwrap();
    // Sent later, on the same way: when this is there, the other one is not coming.
    if heard.send(Path::Line(0), b"heard").is_err() {
        eprintln!("skipped: the interface carries no multicast");
        return;
    }
    receiver.wait(PATIENCE).unwrap();
    let mut packets = Vec::new();
    receiver
        .receive_lines(10, &mut |_, arrival| packets.push(arrival.bytes.to_vec()))
        .unwrap();
    assert_eq!(packets, [b"heard"]);
}

/// HAZARDS MC-08
#[test]
fn a_buffer_cut_by_the_kernel_is_named_and_the_configuration_may_refuse_it() {
    let [mut line] = lines::<1>(6);
    line.buffer_bytes = Some(1 << 30);
    let cut = UdpTransport::receiver(std::slice::from_ref(&line), None).unwrap();
    let buffer = cut.lines().next().unwrap().buffer;
    assert_eq!(buffer.asked, Some(1 << 30));
    assert!(buffer.granted < 1 << 30, "{buffer:?}");
    line.strict = true;
    let error = UdpTransport::receiver(std::slice::from_ref(&line), None).unwrap_err();
    assert!(matches!(error, DriverError::BufferCut { granted, .. } if granted == buffer.granted));
    assert!(
        error.to_string().contains("raise net.core.rmem_max"),
        "{error}"
    );
    line.buffer_bytes = Some(50_000);
    let granted = UdpTransport::receiver(&[line], None).unwrap();
    assert_eq!(granted.lines().next().unwrap().buffer.granted, 50_000);
}

fn kernel_drops(subscription: &mut Subscription<UdpTransport>) -> u64 {
    subscription
        .transport()
        .lines()
        .next()
        .unwrap()
        .kernel_drops
        .expect("the kernel tells")
}

/// HAZARDS MC-08
#[test]
fn what_the_kernel_drops_is_counted_exactly_and_recovered_by_request() {
    if !multicast_works() {
        return;
    }
    let mut lines = lines::<1>(7);
    let mut sender = publication(&lines, 0);
    lines[0].buffer_bytes = Some(100_000);
    let mut subscription = subscription(&mut sender, receiver_options(1), receiving(&lines));
    let mut check = Check::default();
    publish(&mut sender, 1..=1);
    work(&mut sender, &mut subscription, &mut check, |_, check| {
        check.next == 2
    });
    assert_eq!(kernel_drops(&mut subscription), 0);
    // A burst while the receiver does nothing.
    for number in 2..=20_001 {
        publish(&mut sender, number..=number);
        sender.do_work(SystemClock.monotonic_ns()).unwrap();
    }
    let dropped = kernel_drops(&mut subscription);
    assert!(dropped > 1_000, "{dropped} dropped");
    work(&mut sender, &mut subscription, &mut check, |_, check| {
        check.next == 20_002
    });
    assert_eq!(check.lost, 0);
    assert!(subscription.receiver().stats().answered_messages >= dropped);
    // What was sent either came in or was dropped and counted.
    let end = SystemClock.monotonic_ns() + u64::try_from(PATIENCE.as_nanos()).unwrap();
    loop {
        let now = SystemClock.monotonic_ns();
        subscription
            .do_work(now, 256, &mut |event| check.event(event))
            .unwrap();
        let received = subscription.receiver().lines().next().unwrap().packets;
        let dropped = kernel_drops(&mut subscription);
        let sent = sender.lines()[0].packets;
        if received + dropped == sent {
            break;
        }
        assert!(
            now < end,
            "{received} received and {dropped} dropped of {sent}"
        );
    }
}

/// Packets that a receiver with these options gets of `sent`, which a sender with those options sends on one line.
fn carried(sending: LineOptions, receiving: LineOptions, sent: &[&[u8]]) -> Vec<Vec<u8>> {
    let mut receiver = UdpTransport::receiver(&[receiving], None).unwrap();
    let mut sender = UdpTransport::sender(&[sending], None).unwrap();
    for packet in sent {
        sender.send(Path::Line(0), packet).unwrap();
    }
    let mut received = Vec::new();
    // What comes on the loopback interface is there when the send returns.
    receiver
        .receive_lines(100, &mut |_, arrival| received.push(arrival.bytes.to_vec()))
        .unwrap();
    received
}

#[test]
fn a_source_that_was_chosen_is_heard_and_no_other() {
    if !multicast_works() {
        return;
    }
    let [line] = lines::<1>(8);
    let from = |source: &str| LineOptions {
        source: Some(source.parse().unwrap()),
        ..line.clone()
    };
    let sent: [&[u8]; 2] = [b"one", b"two"];
    assert_eq!(carried(line.clone(), from("127.0.0.1"), &sent), sent);
    assert!(carried(line.clone(), from("127.0.0.99"), &sent).is_empty());
    let error = UdpTransport::receiver(&[from("::1")], None).unwrap_err();
    assert!(matches!(error, DriverError::OtherKind { .. }), "{error}");
}

#[test]
fn runs_arrive_packet_by_packet_whoever_has_offload() {
    if !multicast_works() {
        return;
    }
    for (sends, receives) in [(true, true), (true, false), (false, true), (false, false)] {
        let [line] = lines::<1>(9);
        let options = |offload| LineOptions {
            offload,
            timestamps: true,
            ..line.clone()
        };
        let mut receiver = UdpTransport::receiver(&[options(receives)], None).unwrap();
        let mut sender = UdpTransport::sender(&[options(sends)], None).unwrap();
        let bytes: Vec<u8> = (0..=255).cycle().take(40 * 1_000 + 500).collect();
        let run = Run::new(&bytes, 1_000);
        let before_ns = SystemClock.wall_ns();
        let sent = sender.send_run(0, run);
        assert_eq!((sent.packets, sent.failed), (41, 0), "{sent:?}");
        let mut received: Vec<Vec<u8>> = Vec::new();
        let stamped = receiver.lines().next().unwrap().timestamps;
        receiver
            .receive_lines(100, &mut |_, arrival| {
                assert_eq!(arrival.kernel_ns.is_some(), stamped);
                let wall_ns = before_ns..=SystemClock.wall_ns();
                assert!(
                    arrival
                        .kernel_ns
                        .is_none_or(|at_ns| wall_ns.contains(&at_ns))
                );
                assert!(arrival.from.unwrap().ip().is_loopback());
                received.push(arrival.bytes.to_vec());
            })
            .unwrap();
        assert!(run.packets().eq(received.iter().map(Vec::as_slice)));
        assert!(sends || !sender.lines().next().unwrap().offload);
    }
}

#[test]
fn a_feed_goes_over_ipv6_with_requests_and_chosen_sources() {
    // The loopback interface has no way to groups of IPv6. Nothing of this leaves the host.
    let outside = if_addrs::get_if_addrs()
        .unwrap()
        .into_iter()
        .find(|interface| {
            interface.is_oper_up() && !interface.is_loopback() && interface.ip().is_ipv6()
        });
    let Some(outside) = outside else {
        eprintln!("skipped: no interface with IPv6 but the loopback one");
        return;
    };
    let port = lines::<1>(10)[0].group.port();
    let line = |group: &str| LineOptions {
        ttl: 0,
        dscp: Some(46),
        ..LineOptions::new(
            SocketAddr::new(group.parse().unwrap(), port),
            Interface::Address(outside.ip()),
        )
    };
    let lines = [line("ff15::77:1"), line("ff15::77:2")];
    let transport = UdpTransport::sender(&lines, Some("[::1]:0".parse().unwrap()));
    let mut transport = transport.unwrap();
    if let Err(error) = transport.send(Path::Line(0), b"probe") {
        eprintln!(
            "skipped: no multicast over IPv6 on {} ({error})",
            outside.name
        );
        return;
    }
    let server = RetransmitServer::new(RetransmitOptions {
        allowed: vec!["::1".parse().unwrap()],
        ..RetransmitOptions::default()
    });
    let publisher = Publisher::new(session(0), Sequence(1), PublisherOptions::default());
    let mut sender: Sender = Publication::new(publisher, server, None, transport, 2);
    // Before anybody listens: asked for later.
    publish(&mut sender, 1..=100);
    sender.do_work(SystemClock.monotonic_ns()).unwrap();
    let sockets = UdpTransport::receiver(&lines, Some("[::1]:0".parse().unwrap())).unwrap();
    let mut subscription = subscription(&mut sender, receiver_options(2), sockets);
    let mut check = Check::default();
    publish(&mut sender, 101..=1_000);
    sender.end();
    work(&mut sender, &mut subscription, &mut check, |_, check| {
        check.ended
    });
    assert_eq!((check.next, check.lost), (1_001, 0));
    let messages: Vec<_> = (subscription.receiver().lines())
        .map(|line| line.messages)
        .collect();
    assert_eq!(messages, [900, 900]);
    assert!(subscription.receiver().stats().answered_messages >= 100);
    // A source: that of what is sent from here, and another.
    let heard = |source: IpAddr| {
        let options = LineOptions {
            source: Some(source),
            ..lines[0].clone()
        };
        let mut receiver = UdpTransport::receiver(&[options], None).unwrap();
        let mut from = None;
        sender_of(&lines[0]).send(Path::Line(0), b"x").unwrap();
        let received = receiver.receive_lines(10, &mut |_, arrival| from = arrival.from);
        (received.unwrap(), from)
    };
    let mut listener = UdpTransport::receiver(&lines[..1], None).unwrap();
    let mut own = None;
    sender_of(&lines[0]).send(Path::Line(0), b"x").unwrap();
    listener
        .receive_lines(10, &mut |_, arrival| own = arrival.from)
        .unwrap();
    let own = own.unwrap().ip();
    assert_eq!(heard(own).0, 1);
    assert_eq!(heard("2001:db8::1".parse().unwrap()), (0, None));
}

fn sender_of(line: &LineOptions) -> UdpTransport {
    UdpTransport::sender(std::slice::from_ref(line), None).unwrap()
}

/// HAZARDS MC-06
#[test]
fn an_interface_that_is_not_there_is_an_error_that_names_what_is() {
    let group: SocketAddr = "239.77.7.1:4000".parse().unwrap();
    let open = |interface: &str| {
        let line = LineOptions::new(group, interface.parse().unwrap());
        let sender = UdpTransport::sender(std::slice::from_ref(&line), None).map(drop);
        let receiver = UdpTransport::receiver(&[line], None).map(drop);
        assert_eq!(sender.is_ok(), receiver.is_ok(), "{interface}");
        receiver
    };
    for wanted in ["nosuch0", "192.0.2.250", "198.51.100.0/24"] {
        let error = open(wanted).unwrap_err().to_string();
        assert!(error.contains("there is no interface"), "{error}");
        assert!(
            error.contains(wanted) && error.contains("lo (127.0.0.1)"),
            "{error}"
        );
    }
    for wanted in ["lo", "127.0.0.1", "127.0.0.0/8"] {
        open(wanted).unwrap();
    }
    let not_a_group = LineOptions::new("10.0.0.1:4000".parse().unwrap(), loopback());
    let error = UdpTransport::receiver(&[not_a_group], None).unwrap_err();
    assert!(matches!(error, DriverError::NotAGroup { .. }));
}

#[test]
fn own_subnets_hold_the_loopback_addresses() {
    let subnets = own_subnets().unwrap();
    let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
    assert!(subnets.iter().any(|subnet| subnet.contains(local)));
}
