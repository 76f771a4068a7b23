//! The socket of one multicast line.

use std::{
    io,
    net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket},
};

use rustix::io::Errno;
use socket2::{Domain, InterfaceIndexOrAddress, Protocol, Socket, Type};
use teeline_os::datagram::{self, Inbox};

use super::{
    DriverError,
    interface::{Found, Interface, resolve},
};
use crate::{Arrival, Run, Sent};

/// One multicast line.
#[derive(Debug, Clone)]
pub struct LineOptions {
    /// Group and port.
    pub group: SocketAddr,
    /// The interface that the group is joined on, or sent to. There is no default: the one with the default route is
    /// often the wrong one.
    pub interface: Interface,
    /// Only packets of this sender are received (source-specific multicast).
    pub source: Option<IpAddr>,
    /// How many routers a packet may pass.
    pub ttl: u32,
    /// Whether receivers on the sending host get the packets. Without it, a local receiver gets nothing, except on the
    /// loopback interface, from which everything comes back.
    pub loopback: bool,
    /// Differentiated services code point of packets sent, 0 to 63.
    pub dscp: Option<u8>,
    /// Socket buffer to ask for, in bytes; the kernel's default if nothing is said.
    pub buffer_bytes: Option<usize>,
    /// Refuse to start with a smaller buffer than asked for.
    pub strict: bool,
    /// Let the system cut large sends into packets, and join packets that came in together, where it can. On by default.
    pub offload: bool,
    /// Let the kernel say when packets came in. A buffer of several packets has one time, and one that was there before
    /// the kernel began to look has the time at which it was taken.
    pub timestamps: bool,
    /// How long a receive that finds nothing asks the network card itself, in microseconds.
    pub busy_poll_us: Option<u32>,
}

impl LineOptions {
    /// A line with the usual options: it stays within the subnet, and reaches receivers on this host.
    #[must_use]
    pub const fn new(group: SocketAddr, interface: Interface) -> Self {
        Self {
            group,
            interface,
            source: None,
            ttl: 1,
            loopback: true,
            dscp: None,
            buffer_bytes: None,
            strict: false,
            offload: true,
            timestamps: false,
            busy_poll_us: None,
        }
    }
}

/// A socket buffer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// What was asked for, if anything was.
    pub asked: Option<usize>,
    /// What the kernel gave.
    pub granted: usize,
}

/// How a line's socket was set up, and what became of what came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineSocketStats {
    /// Its buffer.
    pub buffer: Buffer,
    /// Whether many packets go with one call of the system.
    pub offload: bool,
    /// Whether the kernel says when packets came in.
    pub timestamps: bool,
    /// Buffers that the kernel dropped since the socket was opened, for want of room. One may hold many packets, where the
    /// system joins them: how many messages are missing, only their numbers say. `None` where the system does not tell.
    pub kernel_drops: Option<u64>,
}

#[derive(Debug)]
pub(super) struct LineSocket {
    pub(super) socket: UdpSocket,
    pub(super) role: Role,
    buffer: Buffer,
    offload: bool,
    timestamps: bool,
    /// What the kernel said with the latest packet, where it does not say it otherwise; `None` where it says nothing.
    dropped: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Sends,
    Receives,
}

impl LineSocket {
    pub(super) fn sender(options: &LineOptions) -> Result<Self, DriverError> {
        let group = options.group;
        let socket = open(group)?;
        let set = DriverError::system("set the options of the sending socket", group);
        let Found { index, address } = resolve(&options.interface, group)?;
        match group {
            SocketAddr::V4(_) => {
                let bind = SocketAddr::new(address.into(), 0);
                socket
                    .bind(&bind.into())
                    .map_err(DriverError::system("bind the sending socket", group))?;
                socket.set_multicast_if_v4(&address).map_err(set)?;
                socket.set_multicast_ttl_v4(options.ttl).map_err(set)?;
                socket
                    .set_multicast_loop_v4(options.loopback)
                    .map_err(set)?;
                if let Some(dscp) = options.dscp {
                    socket.set_tos_v4(u32::from(dscp) << 2).map_err(set)?;
                }
            }
            SocketAddr::V6(_) => {
                socket.set_multicast_if_v6(index).map_err(set)?;
                socket.set_multicast_hops_v6(options.ttl).map_err(set)?;
                socket
                    .set_multicast_loop_v6(options.loopback)
                    .map_err(set)?;
                if let Some(dscp) = options.dscp {
                    socket.set_tclass_v6(u32::from(dscp) << 2).map_err(set)?;
                }
            }
        }
        if let Some(asked) = options.buffer_bytes {
            socket.set_send_buffer_size(asked).map_err(set)?;
        }
        // The way to a group is looked up once: a seventh of the round trip on loopback.
        socket
            .connect(&scoped(group, index).into())
            .map_err(DriverError::system("connect the sending socket", group))?;
        let offload = options.offload && datagram::probe_segmentation(&socket).is_ok();
        let granted = socket.send_buffer_size().map_err(set)?;
        Self::finish(socket, options, Role::Sends, granted, offload)
    }

    pub(super) fn receiver(options: &LineOptions) -> Result<Self, DriverError> {
        let group = options.group;
        let socket = open(group)?;
        let set = DriverError::system("set the options of the line's socket", group);
        let join = DriverError::system("join the group", group);
        // Several receivers of one line on a host each get their copy.
        socket.set_reuse_address(true).map_err(set)?;
        let Found { index, .. } = resolve(&options.interface, group)?;
        socket
            .bind(&scoped(group, index).into())
            .map_err(DriverError::system("bind the line's socket", group))?;
        // Otherwise every group that any process of the host joined would come in here.
        match group {
            SocketAddr::V4(_) => socket.set_multicast_all_v4(false).map_err(set)?,
            SocketAddr::V6(_) => socket.set_multicast_all_v6(false).map_err(set)?,
        }
        match (group.ip(), options.source) {
            (group, Some(sender)) if group.is_ipv4() == sender.is_ipv4() => {
                datagram::join_source(&socket, index, group, sender).map_err(join)?;
            }
            (_, Some(sender)) => {
                return Err(DriverError::OtherKind {
                    group: options.group,
                    sender,
                });
            }
            (IpAddr::V4(multicast), None) => {
                let interface = InterfaceIndexOrAddress::Index(index);
                socket
                    .join_multicast_v4_n(&multicast, &interface)
                    .map_err(join)?;
            }
            (IpAddr::V6(multicast), None) => {
                socket.join_multicast_v6(&multicast, index).map_err(join)?;
            }
        }
        if let Some(asked) = options.buffer_bytes {
            socket.set_recv_buffer_size(asked).map_err(set)?;
        }
        if let Some(microseconds) = options.busy_poll_us {
            datagram::set_busy_poll(&socket, microseconds).map_err(DriverError::system(
                "let receives poll the network card",
                group,
            ))?;
        }
        let offload = options.offload && datagram::set_coalescing(&socket, true).is_ok();
        let granted = socket.recv_buffer_size().map_err(set)?;
        let mut line = Self::finish(socket, options, Role::Receives, granted, offload)?;
        line.timestamps =
            options.timestamps && datagram::set_timestamps(&line.socket, true).is_ok();
        // Told with packets, and only after there was one. Where it is not, `stats` asks.
        line.dropped = datagram::set_drop_counts(&line.socket, true)
            .map(|()| 0)
            .ok();
        Ok(line)
    }

    fn finish(
        socket: Socket,
        options: &LineOptions,
        role: Role,
        reported: usize,
        offload: bool,
    ) -> Result<Self, DriverError> {
        let group = options.group;
        let buffer = Buffer {
            asked: options.buffer_bytes,
            // The kernel doubles what it is asked for, for its own books, and reports the double.
            granted: reported / 2,
        };
        if options.strict
            && let Some(asked) = buffer.asked
            && buffer.granted < asked
        {
            return Err(DriverError::BufferCut {
                group,
                asked,
                granted: buffer.granted,
                limit: match role {
                    Role::Sends => "wmem_max",
                    Role::Receives => "rmem_max",
                },
            });
        }
        Ok(Self {
            socket: UdpSocket::from(socket),
            role,
            buffer,
            offload,
            timestamps: false,
            dropped: Some(0),
        })
    }

    pub(super) fn stats(&self) -> LineSocketStats {
        let dropped = datagram::dropped(&self.socket).ok().or(self.dropped);
        LineSocketStats {
            buffer: self.buffer,
            offload: self.offload,
            timestamps: self.timestamps,
            kernel_drops: dropped.map(u64::from),
        }
    }

    pub(super) fn send(&self, packet: &[u8]) -> io::Result<()> {
        self.socket.send(packet).map(drop)
    }

    pub(super) fn send_run(&mut self, run: Run<'_>) -> Sent {
        let segment = u16::try_from(run.packet_bytes());
        if self.offload
            && run.count() > 1
            && let Ok(segment) = segment
        {
            match datagram::send_segments(&self.socket, run.bytes(), segment) {
                Ok(()) => {
                    return Sent {
                        packets: run.count(),
                        ..Sent::default()
                    };
                }
                // The way out does not cut, or not into packets of this size: from now on, one by one.
                Err(error) if is_refusal(&error) => self.offload = false,
                Err(error) => return Sent::nothing(run, error),
            }
        }
        Sent::one_by_one(run, |packet| self.send(packet))
    }

    /// One receive; how many packets it brought.
    pub(super) fn receive(
        &mut self,
        inbox: &mut Inbox,
        each: &mut dyn FnMut(Arrival<'_>),
    ) -> io::Result<usize> {
        let received = inbox.receive(&self.socket)?;
        self.dropped = received.dropped.or(self.dropped);
        let mut packets = 0;
        for bytes in received.datagrams() {
            packets += 1;
            each(Arrival {
                bytes,
                from: received.from,
                kernel_ns: received.kernel_ns,
            });
        }
        Ok(packets)
    }
}

/// Whether the system says that it does not cut sends here.
fn is_refusal(error: &io::Error) -> bool {
    let refusals = [Errno::IO, Errno::INVAL, Errno::OPNOTSUPP, Errno::MSGSIZE];
    Errno::from_io_error(error).is_some_and(|error| refusals.contains(&error))
}

/// A socket of the group's kind that never waits.
fn open(group: SocketAddr) -> Result<Socket, DriverError> {
    if !group.ip().is_multicast() {
        return Err(DriverError::NotAGroup { group });
    }
    Socket::new(Domain::for_address(group), Type::DGRAM, Some(Protocol::UDP))
        .and_then(|socket| socket.set_nonblocking(true).map(|()| socket))
        .map_err(DriverError::system("open a socket", group))
}

/// A group on the interface with this index: groups of IPv6 mean little without one.
fn scoped(group: SocketAddr, index: u32) -> SocketAddr {
    match group {
        SocketAddr::V4(_) => group,
        SocketAddr::V6(group) => {
            SocketAddrV6::new(*group.ip(), group.port(), group.flowinfo(), index).into()
        }
    }
}
