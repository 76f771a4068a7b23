//! Multicast lines on the command line, and waiting for what comes in on them.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
    time::Duration,
};

use clap::Args;
use teeline_core::time::Clock;
use teeline_feed::{
    Prefix, Receiver, ReceiverOptions, RequestOptions, RetransmitOptions, RetransmitServer,
    Session, Sessions, Start, Subscription, Transport,
    driver::{Interface, LineOptions, UdpTransport, any_address, own_subnets},
};
use teeline_os::SystemClock;

use crate::output::{Failure, complain};

/// Longest sleep while nothing comes in: how soon a signal is noticed.
const NAP: Duration = Duration::from_millis(50);

/// A group and port, and the interface to use: `239.1.1.1:4000@eth1`, `[ff15::1]:4000@eth1`, `239.1.1.1:4000@10.1.0.0/16`.
#[derive(Debug, Clone)]
pub(super) struct LineArg {
    group: SocketAddr,
    interface: Interface,
}

impl FromStr for LineArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (group, interface) = text
            .split_once('@')
            .filter(|(_, interface)| !interface.is_empty())
            .ok_or("name the interface behind an @: 239.1.1.1:4000@eth1")?;
        Ok(Self {
            group: group.parse().map_err(|_| {
                format!(
                    "`{group}` is not a group and port such as 239.1.1.1:4000 or [ff15::1]:4000"
                )
            })?,
            interface: interface
                .parse()
                .map_err(|error: teeline_feed::NotAPrefix| error.to_string())?,
        })
    }
}

/// The lines of a feed, and how their sockets are set up.
#[derive(Debug, Args)]
pub(super) struct LinesArgs {
    /// A line: group, port and interface (by name, address or prefix). Give two for lines A and B.
    #[arg(long = "line", value_name = "GROUP:PORT@INTERFACE", required = true)]
    lines: Vec<LineArg>,
    /// Socket buffer to ask for, in bytes.
    #[arg(long, value_name = "BYTES")]
    buffer: Option<usize>,
    /// Refuse to start if the kernel gives a smaller buffer.
    #[arg(long, requires = "buffer")]
    strict: bool,
    /// Send and receive packet by packet, also where the system could cut large sends and join what came in together.
    #[arg(long)]
    no_offload: bool,
}

/// What only those who send set up.
#[derive(Debug, Args)]
pub(super) struct SendArgs {
    #[command(flatten)]
    lines: LinesArgs,
    /// How many routers a packet may pass.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(0..=255))]
    ttl: u32,
    /// Differentiated services code point of the packets.
    #[arg(long, value_name = "0..63", value_parser = clap::value_parser!(u8).range(0..=63))]
    dscp: Option<u8>,
    /// Receivers on this host get nothing, except on the loopback interface.
    #[arg(long)]
    no_loopback: bool,
}

impl SendArgs {
    /// The lines as the sockets take them.
    pub(super) fn options(&self) -> Vec<LineOptions> {
        let mut lines = self.lines.options();
        for line in &mut lines {
            (line.ttl, line.dscp, line.loopback) = (self.ttl, self.dscp, !self.no_loopback);
        }
        lines
    }

    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }
}

/// What only those who receive set up.
#[derive(Debug, Args)]
pub(super) struct ListenArgs {
    #[command(flatten)]
    lines: LinesArgs,
    /// Only packets of this sender (source-specific multicast).
    #[arg(long, value_name = "ADDRESS")]
    sender: Option<IpAddr>,
    /// Let the kernel say when packets come in: how far one line trails the other is measured by that.
    #[arg(long)]
    timestamps: bool,
    /// A receive that finds nothing asks the network card itself for so long.
    #[arg(long, value_name = "MICROSECONDS")]
    busy_poll: Option<u32>,
}

impl ListenArgs {
    /// The lines as the sockets take them.
    pub(super) fn options(&self) -> Vec<LineOptions> {
        let mut lines = self.lines.options();
        for line in &mut lines {
            line.source = self.sender;
            line.timestamps = self.timestamps;
            line.busy_poll_us = self.busy_poll;
        }
        lines
    }

    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    pub(super) fn is_ipv6(&self) -> bool {
        self.lines.is_ipv6()
    }
}

/// Prints what the system does not give to lines that were to be set up as `asked`: buffers, so that a burst may be dropped,
/// and what is done without.
pub(super) fn complain_of_sockets(transport: &UdpTransport, asked: &[LineOptions]) {
    for (at, (line, asked)) in transport.lines().zip(asked).enumerate() {
        let say = |what: &dyn std::fmt::Display| complain(&format_args!("line {at}: {what}"));
        if let Some(asked) = line.buffer.asked
            && line.buffer.granted < asked
        {
            say(&format_args!(
                "the kernel gives a buffer of {} bytes where {asked} were asked for",
                line.buffer.granted
            ));
        }
        if asked.offload && !line.offload {
            say(
                &"packets go one by one, since the system neither cuts sends nor joins receives here",
            );
        }
        if asked.timestamps && !line.timestamps {
            say(
                &"the system does not say when packets come in: the times are those at which they were taken",
            );
        }
        if line.kernel_drops.is_none() {
            say(&"the system does not say what it drops for want of room: only numbers tell");
        }
    }
}

/// A count that the system may not tell.
pub(super) fn told(count: Option<u64>) -> String {
    count.map_or_else(|| "an unknown number".to_owned(), |count| count.to_string())
}

impl LinesArgs {
    /// The lines as the sockets take them.
    pub(super) fn options(&self) -> Vec<LineOptions> {
        let options = |line: &LineArg| LineOptions {
            buffer_bytes: self.buffer,
            strict: self.strict,
            offload: !self.no_offload,
            ..LineOptions::new(line.group, line.interface.clone())
        };
        self.lines.iter().map(options).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    pub(super) fn is_ipv6(&self) -> bool {
        self.lines.iter().any(|line| line.group.is_ipv6())
    }
}

/// A feed to receive.
#[derive(Debug, Args)]
pub(super) struct SubscribeArgs {
    #[command(flatten)]
    lines: ListenArgs,
    /// A re-request server. Several are asked in turn.
    #[arg(long = "server", value_name = "ADDRESS:PORT")]
    servers: Vec<SocketAddr>,
    /// How long a gap waits for a late packet, or for the other line, before it is asked for, in milliseconds.
    #[arg(long, default_value_t = 1, value_name = "MS")]
    delay: u64,
    /// How long a gap may hold back what follows it, in milliseconds.
    #[arg(long, default_value_t = 1_000, value_name = "MS")]
    deadline: u64,
    /// Never sleep: look for packets all the time, on a core of its own.
    #[arg(long)]
    spin: bool,
}

impl SubscribeArgs {
    /// How to wait while nothing comes in.
    pub(super) const fn wait(&self) -> Wait {
        if self.spin { Wait::Spin } else { Wait::Sleep }
    }

    /// Joins the lines. Nothing of the sessions `over` is taken.
    pub(super) fn subscribe(
        self,
        start: Start,
        sessions: Sessions,
        over: Vec<Session>,
    ) -> Result<Subscription<UdpTransport>, Failure> {
        let requests = (!self.servers.is_empty()).then(|| any_address(self.lines.is_ipv6()));
        let lines = self.lines.options();
        let transport = UdpTransport::receiver(&lines, requests).map_err(Failure::new)?;
        complain_of_sockets(&transport, &lines);
        let receiver = Receiver::new(ReceiverOptions {
            lines: self.lines.len(),
            servers: self.servers.len(),
            start,
            sessions,
            ignored_sessions: over,
            requests: RequestOptions {
                delay_ns: self.delay.saturating_mul(1_000_000),
                deadline_ns: self.deadline.saturating_mul(1_000_000),
                ..RequestOptions::default()
            },
            // Receivers that are started together must not ask together.
            seed: SystemClock.wall_ns() ^ u64::from(std::process::id()),
            ..ReceiverOptions::default()
        });
        Ok(Subscription::new(receiver, self.servers, transport))
    }
}

/// A re-request server that answers `allowed`, or this host's own subnets if that is empty.
pub(super) fn retransmit_server(
    allowed: Vec<Prefix>,
    packet_bytes_max: usize,
) -> Result<RetransmitServer, Failure> {
    let allowed = if allowed.is_empty() {
        own_subnets().map_err(|error| {
            Failure::new(format_args!("cannot list this host's subnets: {error}"))
        })?
    } else {
        allowed
    };
    Ok(RetransmitServer::new(RetransmitOptions {
        packet_bytes_max,
        allowed,
        ..RetransmitOptions::default()
    }))
}

/// How somebody waits while nothing comes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// Until the system says that something is there.
    Sleep,
    /// Not at all.
    Spin,
}

impl Wait {
    /// Waits until `due_ns`, or until something comes in, and not for long.
    pub(super) fn nap(
        self,
        transport: &mut UdpTransport,
        due_ns: Option<u64>,
    ) -> Result<(), Failure> {
        match self {
            Self::Sleep => nap(transport, due_ns),
            Self::Spin => Ok(()),
        }
    }
}

/// Waits until `due_ns`, or until something comes in, and not for long.
pub(super) fn nap(transport: &mut UdpTransport, due_ns: Option<u64>) -> Result<(), Failure> {
    let until = due_ns.map_or(NAP, |due_ns| {
        Duration::from_nanos(due_ns.saturating_sub(SystemClock.monotonic_ns()))
    });
    transport
        .wait(until.min(NAP))
        .map_err(|error| Failure::new(format_args!("cannot wait for packets: {error}")))
}
