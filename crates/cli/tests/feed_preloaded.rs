//! The feed under a preloaded stack that goes around the kernel: one of the tests' own, which keeps its sockets to itself, and
//! one that Debian has.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod run;

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use run::{Ran, teeline};
use teeline_feed::{
    Transport,
    capture::ItchWriter,
    driver::{Interface, LineOptions, UdpTransport},
    wire::{Content, Downstream},
};

/// What Debian's `librdmacm1` preloads: sockets over RDMA where there is such a card, else the kernel's.
const RSOCKETS: &str = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so";

/// Calls on sockets, by name, that came to the stack of one process.
type Calls = BTreeMap<String, u64>;

/// Builds the tests' own stack; `None` without a C compiler.
fn own_stack(dir: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/preload/stack.c");
    let library = dir.join("stack.so");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .output();
    match built {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}");
            Some(library)
        }
        Err(error) => {
            eprintln!("skipped: a preloaded stack (no C compiler: {error})");
            None
        }
    }
}

/// A line that nobody else uses, and a socket that hears it; `None` where the loopback interface carries no multicast.
fn line() -> Option<(String, UdpTransport)> {
    let free = free_address();
    let group = SocketAddr::new(Ipv4Addr::new(239, 78, 90, 1).into(), free.port());
    let options = LineOptions::new(group, Interface::Address(Ipv4Addr::LOCALHOST.into()));
    let receiver = UdpTransport::receiver(std::slice::from_ref(&options), None);
    match UdpTransport::sender(&[options], None).and(receiver) {
        Ok(receiver) => Some((format!("{group}@127.0.0.1"), receiver)),
        Err(error) => {
            eprintln!("skipped: no multicast on the loopback interface ({error})");
            None
        }
    }
}

/// Waits until the end of a session is said on a line.
fn wait_for_end(line: &mut UdpTransport) {
    let mut ended = false;
    // Not a promise: only an end, should nobody say it.
    for _ in 0..600 {
        line.wait(Duration::from_millis(100)).unwrap();
        let heard = line.receive_lines(64, &mut |_, arrival| {
            let packet = Downstream::parse(arrival.bytes).unwrap();
            ended |= matches!(packet.content(), Content::EndOfSession);
        });
        heard.unwrap();
        if ended {
            return;
        }
    }
    panic!("no end of the session was said");
}

fn free_address() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap()
}

/// A process with a library in front of its C library.
fn start(args: &[&str], library: &Path, calls: &Path) -> Child {
    let mut command = teeline(args.iter().copied()).command();
    command
        .env("LD_PRELOAD", library)
        .env("TEELINE_TEST_CALLS", calls)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn end(child: Child) -> Ran {
    let output = child.wait_with_output().unwrap();
    Ran {
        status: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn calls(path: &Path) -> Calls {
    let text = fs::read_to_string(path).unwrap();
    let call = |line: &str| {
        let (name, count) = line.split_once(' ').unwrap();
        (name.to_owned(), count.parse().unwrap())
    };
    text.lines().map(call).collect()
}

/// Sends a file to a receiver that comes late and asks for the beginning, both under `library`; what the receiver and the
/// publisher said, in this order. `None` where that is not possible here.
fn send_under(library: &Path, dir: &Path) -> Option<[Ran; 2]> {
    let (line, mut heard) = line()?;
    let server = free_address().to_string();
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let mut file = ItchWriter::new(Vec::new());
    for number in 0..3_000 {
        file.write(format!("message {number}").as_bytes()).unwrap();
    }
    let input = file.into_inner();
    fs::write(path("in.itch"), &input).unwrap();
    let publisher = start(
        &[
            "--json",
            "feed",
            "publish",
            &path("in.itch"),
            "--source",
            "md.a",
            "--line",
            &line,
            "--requests",
            &server,
            "--allow",
            "127.0.0.0/8",
            "--linger",
            "4",
            "--state",
            &path("state"),
        ],
        library,
        &dir.join("publisher.calls"),
    );
    wait_for_end(&mut heard);
    let receiver = start(
        &[
            "--json",
            "feed",
            "receive",
            "--line",
            &line,
            "--server",
            &server,
            "--from",
            "beginning",
            "--deadline",
            "30000",
            "--timestamps",
            "--out",
            &path("out.itch"),
        ],
        library,
        &dir.join("receiver.calls"),
    );
    let ran = [receiver, publisher].map(end);
    assert!(ran.iter().all(|ran| ran.status == 0), "{ran:#?}");
    let summary = ran[0].objects().pop().unwrap();
    assert_eq!(
        (&summary["answered_messages"], &summary["lost"]),
        (&3_000.into(), &0.into())
    );
    assert!(
        fs::read(path("out.itch")).unwrap() == input,
        "byte for byte"
    );
    Some(ran)
}

/// A call that went past the stack would find no socket: the descriptor is none of the kernel's.
#[test]
fn under_a_stack_whose_sockets_the_kernel_does_not_know_everything_arrives() {
    let dir = tempfile::tempdir().unwrap();
    let Some(library) = own_stack(dir.path()) else {
        return;
    };
    let Some([receiver, publisher]) = send_under(&library, dir.path()) else {
        return;
    };
    // What it does not have is said, once and per line, and done without.
    let line = |what: &str| format!("line 0: {what}");
    let said: Vec<&str> = receiver.stderr.lines().collect();
    for what in [
        "packets go one by one",
        "the system does not say when packets come in",
        "the system does not say what it drops",
    ] {
        let count = said
            .iter()
            .filter(|said| said.contains(&line(what)))
            .count();
        assert_eq!(count, 1, "{what}: {said:#?}");
    }
    assert_eq!(publisher.stderr.lines().count(), 1, "{}", publisher.stderr);
    let summary = receiver.objects().pop().unwrap();
    let on_line = &summary["lines"][0];
    assert_eq!(
        (
            &on_line["offload"],
            &on_line["timestamps"],
            &on_line["kernel_drops"]
        ),
        (&false.into(), &false.into(), &serde_json::Value::Null)
    );

    // And these are the calls that such a stack has to know.
    let [received, published] =
        ["receiver.calls", "publisher.calls"].map(|name| calls(&dir.path().join(name)));
    let known = |calls: &Calls| -> Vec<String> {
        let made = calls.iter().filter(|(_, count)| **count > 0);
        made.map(|(name, _)| name.clone()).collect()
    };
    for made in known(&received).iter().chain(&known(&published)) {
        let documented = [
            "socket",
            "bind",
            "connect",
            "getsockname",
            "setsockopt",
            "getsockopt",
            "ioctl",
            "fcntl",
            "send",
            "sendto",
            "recvmsg",
            "ppoll",
            "close",
        ];
        assert!(
            documented.contains(&made.as_str()),
            "{made} is not documented"
        );
    }
    for name in ["socket", "bind", "setsockopt", "recvmsg", "sendto", "ppoll"] {
        assert!(received[name] > 0, "{name}: {received:?}");
    }
    for name in ["socket", "connect", "send", "recvmsg", "sendto", "ppoll"] {
        assert!(published[name] > 0, "{name}: {published:?}");
    }
}

#[test]
fn under_the_stack_that_debian_has_everything_arrives() {
    let library = Path::new(RSOCKETS);
    if !library.exists() {
        eprintln!("skipped: rsockets preloaded (no {RSOCKETS}: tools/install-test-tools)");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    send_under(library, dir.path());
}
