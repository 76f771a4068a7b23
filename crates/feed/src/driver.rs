//! A transport over UDP sockets. The only file of this crate that knows sockets.

use std::{
    fmt, fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    str::FromStr,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use socket2::{Domain, InterfaceIndexOrAddress, Protocol, Socket, Type};

use crate::{Path, Prefix, Transport};

/// Largest datagram that UDP can carry.
const DATAGRAM_BYTES_MAX: usize = 1 << 16;

/// Which interface a line uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Interface {
    /// By name, as `ip link` shows it.
    Name(String),
    /// The one that has this address.
    Address(IpAddr),
    /// The one that has an address of this prefix.
    Prefix(Prefix),
}

impl FromStr for Interface {
    type Err = crate::NotAPrefix;

    /// `10.1.0.0/16` is a prefix, `10.1.2.3` an address, and everything else a name.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.contains('/') {
            return text.parse().map(Self::Prefix);
        }
        Ok(text
            .parse()
            .map_or_else(|_| Self::Name(text.to_owned()), Self::Address))
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "interface `{name}`"),
            Self::Address(address) => write!(f, "interface with address {address}"),
            Self::Prefix(prefix) => write!(f, "interface with an address of {prefix}"),
        }
    }
}

/// One multicast line.
#[derive(Debug, Clone)]
pub struct LineOptions {
    /// Group and port.
    pub group: SocketAddr,
    /// The interface that the group is joined on, or sent to. There is no default: the one with the default route is
    /// often the wrong one.
    pub interface: Interface,
    /// Only packets of this sender are received (source-specific multicast, IPv4).
    pub source: Option<Ipv4Addr>,
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
        }
    }
}

/// Why sockets could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No interface is the one named.
    #[error("there is no {wanted}: there are {have}")]
    NoInterface {
        /// What was named.
        wanted: Interface,
        /// What there is.
        have: String,
    },
    /// The interface is down.
    #[error("interface `{name}` is down: bring it up, or choose another")]
    InterfaceDown {
        /// Its name.
        name: String,
    },
    /// The interface has no address of the group's kind.
    #[error("interface `{name}` has no address of the same kind as group {group}")]
    NoAddress {
        /// Its name.
        name: String,
        /// The group.
        group: SocketAddr,
    },
    /// The address is of no group.
    #[error("{group} is not a multicast group: 224.0.0.0/4 and ff00::/8 are")]
    NotAGroup {
        /// The address.
        group: SocketAddr,
    },
    /// A sender was named for an IPv6 group.
    #[error("group {group}: senders can be chosen for IPv4 groups only")]
    SourceOfIpv6 {
        /// The group.
        group: SocketAddr,
    },
    /// The kernel gave a smaller buffer, and the configuration does not put up with that.
    #[error(
        "group {group}: the kernel gives a buffer of {granted} bytes where {asked} were asked for: raise net.core.{limit}"
    )]
    BufferCut {
        /// The group.
        group: SocketAddr,
        /// Bytes asked for.
        asked: usize,
        /// Bytes granted.
        granted: usize,
        /// The kernel setting that limits it.
        limit: &'static str,
    },
    /// The system refused.
    #[error("cannot {op} ({address}): {source}")]
    System {
        /// What was tried.
        op: &'static str,
        /// For which address.
        address: SocketAddr,
        /// What it said.
        source: io::Error,
    },
}

/// UDP sockets for the lines of a feed and for requests and their answers.
#[derive(Debug)]
pub struct UdpTransport {
    lines: Vec<LineSocket>,
    unicast: Option<UdpSocket>,
    buffer: Box<[u8]>,
    /// The socket that is looked at first next time: no line starves another.
    turn: usize,
}

#[derive(Debug)]
struct LineSocket {
    socket: UdpSocket,
    group: SocketAddr,
    role: Role,
    buffer: Buffer,
    inode: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Sends,
    Receives,
}

/// A socket buffer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// What was asked for, if anything was.
    pub asked: Option<usize>,
    /// What the kernel gave.
    pub granted: usize,
}

impl UdpTransport {
    /// Sockets that send to lines, and one that receives requests on `requests` and answers them.
    ///
    /// # Errors
    /// [`DriverError`]
    pub fn sender(
        lines: &[LineOptions],
        requests: Option<SocketAddr>,
    ) -> Result<Self, DriverError> {
        let lines = lines.iter().map(LineSocket::sender);
        Self::new(lines.collect::<Result<_, _>>()?, requests)
    }

    /// Sockets that join lines, and one that sends requests from `requests` and receives their answers.
    ///
    /// # Errors
    /// [`DriverError`]
    pub fn receiver(
        lines: &[LineOptions],
        requests: Option<SocketAddr>,
    ) -> Result<Self, DriverError> {
        let lines = lines.iter().map(LineSocket::receiver);
        Self::new(lines.collect::<Result<_, _>>()?, requests)
    }

    fn new(lines: Vec<LineSocket>, requests: Option<SocketAddr>) -> Result<Self, DriverError> {
        let bind = |address: SocketAddr| {
            let socket = UdpSocket::bind(address)
                .and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
            socket.map_err(|source| DriverError::System {
                op: "bind the socket for requests",
                address,
                source,
            })
        };
        Ok(Self {
            lines,
            unicast: requests.map(bind).transpose()?,
            buffer: vec![0; DATAGRAM_BYTES_MAX].into_boxed_slice(),
            turn: 0,
        })
    }

    /// Where requests are received, or sent from.
    #[must_use]
    pub fn request_address(&self) -> Option<SocketAddr> {
        self.unicast.as_ref()?.local_addr().ok()
    }

    /// The buffer of each line's socket.
    pub fn buffers(&self) -> impl Iterator<Item = Buffer> {
        self.lines.iter().map(|line| line.buffer)
    }

    /// Datagrams that the kernel dropped on each line since the socket was opened, for want of room in its buffer.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn kernel_drops(&self) -> io::Result<Vec<u64>> {
        let v4 = fs::read_to_string("/proc/net/udp")?;
        let v6 = fs::read_to_string("/proc/net/udp6").unwrap_or_default();
        let drops = |line: &LineSocket| {
            let table = if line.group.is_ipv4() { &v4 } else { &v6 };
            drops_of(table, line.inode).unwrap_or(0)
        };
        Ok(self.lines.iter().map(drops).collect())
    }
}

/// The last column of a socket's row, which is found by its inode.
fn drops_of(table: &str, inode: u64) -> Option<u64> {
    const INODE_COLUMN: usize = 9;
    table.lines().skip(1).find_map(|row| {
        let mut columns = row.split_whitespace();
        let found = columns.clone().nth(INODE_COLUMN)?.parse::<u64>().ok()?;
        (found == inode).then(|| columns.next_back()?.parse().ok())?
    })
}

impl Transport for UdpTransport {
    fn send(&mut self, path: Path, packet: &[u8]) -> io::Result<()> {
        let (socket, to) = match path {
            Path::Line(line) => self
                .lines
                .get(line)
                .filter(|line| line.role == Role::Sends)
                .map(|line| (&line.socket, line.group))
                .ok_or(io::ErrorKind::NotFound)?,
            Path::Peer(peer) => {
                let unicast = self.unicast.as_ref().ok_or(io::ErrorKind::NotConnected)?;
                (unicast, peer)
            }
        };
        socket.send_to(packet, to).map(drop)
    }

    fn receive(&mut self, limit: usize, each: &mut dyn FnMut(Path, &[u8])) -> io::Result<usize> {
        let mut received = 0;
        let mut failure = None;
        let sockets = self.lines.len() + 1;
        for step in 0..sockets {
            let at = (self.turn + step) % sockets;
            let (socket, line) = match self.lines.get(at) {
                Some(line) if line.role == Role::Receives => (&line.socket, Some(at)),
                Some(_) => continue,
                None => match &self.unicast {
                    Some(unicast) => (unicast, None),
                    None => continue,
                },
            };
            while received < limit {
                match socket.recv_from(&mut self.buffer) {
                    Ok((bytes, from)) => {
                        received += 1;
                        let path = line.map_or(Path::Peer(from), Path::Line);
                        each(path, &self.buffer[..bytes]);
                    }
                    Err(error) => {
                        match error.kind() {
                            io::ErrorKind::WouldBlock => {}
                            // A server that is down: the host told us so. Its timeout says it, too.
                            io::ErrorKind::ConnectionRefused | io::ErrorKind::Interrupted => {}
                            _ => failure = Some(error),
                        }
                        break;
                    }
                }
            }
        }
        self.turn = (self.turn + 1) % sockets;
        match failure {
            Some(error) => Err(error),
            None => Ok(received),
        }
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        let receiving = |line: &&LineSocket| line.role == Role::Receives;
        let sockets = self.lines.iter().filter(receiving).map(|line| &line.socket);
        let mut watched: Vec<PollFd<'_>> = sockets
            .chain(&self.unicast)
            .map(|socket| PollFd::new(socket, PollFlags::IN))
            .collect();
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match poll(&mut watched, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl LineSocket {
    fn sender(options: &LineOptions) -> Result<Self, DriverError> {
        let group = options.group;
        let socket = open(group)?;
        let system = |op| {
            move |source| DriverError::System {
                op,
                address: group,
                source,
            }
        };
        let set = system("set the options of the sending socket");
        match resolve(&options.interface, group)? {
            Found::V4(address, _) => {
                let bind = SocketAddr::new(address.into(), 0);
                socket
                    .bind(&bind.into())
                    .map_err(system("bind the sending socket"))?;
                socket.set_multicast_if_v4(&address).map_err(set)?;
                socket.set_multicast_ttl_v4(options.ttl).map_err(set)?;
                socket
                    .set_multicast_loop_v4(options.loopback)
                    .map_err(set)?;
                if let Some(dscp) = options.dscp {
                    socket.set_tos_v4(u32::from(dscp) << 2).map_err(set)?;
                }
            }
            Found::V6(index) => {
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
        let granted = socket.send_buffer_size().map_err(set)?;
        Self::finish(socket, options, Role::Sends, granted)
    }

    fn receiver(options: &LineOptions) -> Result<Self, DriverError> {
        let group = options.group;
        let socket = open(group)?;
        let system = |op| {
            move |source| DriverError::System {
                op,
                address: group,
                source,
            }
        };
        let (set, join) = (
            system("set the options of the line's socket"),
            system("join the group"),
        );
        // Several receivers of one line on a host each get their copy.
        socket.set_reuse_address(true).map_err(set)?;
        socket
            .bind(&group.into())
            .map_err(system("bind the line's socket"))?;
        match (resolve(&options.interface, group)?, group.ip()) {
            (Found::V4(address, index), IpAddr::V4(multicast)) => {
                // Otherwise every group that any process of the host joined would come in here.
                socket.set_multicast_all_v4(false).map_err(set)?;
                match &options.source {
                    Some(source) => socket.join_ssm_v4(source, &multicast, &address),
                    None => {
                        let interface = InterfaceIndexOrAddress::Index(index);
                        socket.join_multicast_v4_n(&multicast, &interface)
                    }
                }
                .map_err(join)?;
            }
            (Found::V6(index), IpAddr::V6(multicast)) if options.source.is_none() => {
                socket.set_multicast_all_v6(false).map_err(set)?;
                socket.join_multicast_v6(&multicast, index).map_err(join)?;
            }
            _ => return Err(DriverError::SourceOfIpv6 { group }),
        }
        if let Some(asked) = options.buffer_bytes {
            socket.set_recv_buffer_size(asked).map_err(set)?;
        }
        let granted = socket.recv_buffer_size().map_err(set)?;
        Self::finish(socket, options, Role::Receives, granted)
    }

    fn finish(
        socket: Socket,
        options: &LineOptions,
        role: Role,
        reported: usize,
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
        let socket = UdpSocket::from(socket);
        let inode = fs::metadata(format!("/proc/self/fd/{}", socket.as_raw_fd()));
        Ok(Self {
            inode: inode.map_or(0, |inode| inode.ino()),
            socket,
            group,
            role,
            buffer,
        })
    }
}

/// A socket of the group's kind that never waits.
fn open(group: SocketAddr) -> Result<Socket, DriverError> {
    if !group.ip().is_multicast() {
        return Err(DriverError::NotAGroup { group });
    }
    Socket::new(Domain::for_address(group), Type::DGRAM, Some(Protocol::UDP))
        .and_then(|socket| socket.set_nonblocking(true).map(|()| socket))
        .map_err(|source| DriverError::System {
            op: "open a socket",
            address: group,
            source,
        })
}

/// How an interface is told to the kernel.
#[derive(Debug, Clone, Copy)]
enum Found {
    /// Its address, and its index.
    V4(Ipv4Addr, u32),
    /// Its index.
    V6(u32),
}

/// Finds the interface that is meant.
fn resolve(wanted: &Interface, group: SocketAddr) -> Result<Found, DriverError> {
    let system = |source| DriverError::System {
        op: "list the interfaces",
        address: group,
        source,
    };
    let all = if_addrs::get_if_addrs().map_err(system)?;
    let matches = |interface: &&if_addrs::Interface| match wanted {
        Interface::Name(name) => interface.name == *name,
        Interface::Address(address) => interface.ip() == *address,
        Interface::Prefix(prefix) => prefix.contains(interface.ip()),
    };
    let Some(found) = all.iter().find(matches) else {
        // Interfaces without an address are not listed.
        if let Interface::Name(name) = wanted
            && fs::exists(format!("/sys/class/net/{name}")).unwrap_or(false)
        {
            let name = name.clone();
            return Err(DriverError::NoAddress { name, group });
        }
        let mut have: Vec<_> = all
            .iter()
            .map(|interface| format!("{} ({})", interface.name, interface.ip()))
            .collect();
        have.sort();
        return Err(DriverError::NoInterface {
            wanted: wanted.clone(),
            have: have.join(", "),
        });
    };
    let name = found.name.clone();
    if !is_up(found) {
        return Err(DriverError::InterfaceDown { name });
    }
    let no_address = || DriverError::NoAddress {
        name: name.clone(),
        group,
    };
    let index = found.index.ok_or_else(no_address)?;
    if group.is_ipv6() {
        return Ok(Found::V6(index));
    }
    // The address that was named, or the interface's first.
    let same = all.iter().filter(|interface| interface.name == name);
    std::iter::once(found)
        .chain(same)
        .find_map(|interface| match interface.ip() {
            IpAddr::V4(address) => Some(Found::V4(address, index)),
            IpAddr::V6(_) => None,
        })
        .ok_or_else(no_address)
}

/// Whether somebody brought the interface up. One without a carrier will work when its cable is plugged in.
fn is_up(interface: &if_addrs::Interface) -> bool {
    const IFF_UP: u32 = 1;
    fs::read_to_string(format!("/sys/class/net/{}/flags", interface.name))
        .ok()
        .and_then(|flags| u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).ok())
        .map_or(interface.is_oper_up(), |flags| flags & IFF_UP != 0)
}

/// The subnets of this host's own interfaces: who a re-request server answers unless somebody else is named.
///
/// # Errors
/// When the interfaces cannot be listed.
pub fn own_subnets() -> io::Result<Vec<Prefix>> {
    let prefix = |interface: if_addrs::Interface| match interface.addr {
        if_addrs::IfAddr::V4(address) => Prefix::new(address.ip.into(), address.prefixlen.into()),
        if_addrs::IfAddr::V6(address) => Prefix::new(address.ip.into(), address.prefixlen.into()),
    };
    Ok(if_addrs::get_if_addrs()?
        .into_iter()
        .filter_map(prefix)
        .collect())
}

/// The address to bind a socket for requests to, if any of the host's will do and any port.
#[must_use]
pub const fn any_address(ipv6: bool) -> SocketAddr {
    if ipv6 {
        SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0)
    } else {
        SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0)
    }
}
