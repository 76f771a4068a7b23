//! A transport over UDP sockets. The only folder of this crate that knows sockets.
//!
//! It takes what the system has: many datagrams per call where the system cuts sends and joins receives, one where it does
//! not, as under a stack that goes around the kernel and takes the usual calls alone. Nobody above it sees a difference but
//! in [`LineSocketStats`].
//!
//! Every call on a socket goes through the C library, so that such a stack can be preloaded. It has to know: `socket`, `bind`,
//! `connect`, `getsockname`, `setsockopt`, `getsockopt`, `ioctl` or `fcntl` (sockets never block), `send`, `sendto`, `recvmsg`,
//! `ppoll` (not for those who spin), `close`; and `sendmsg` where it says that it cuts sends.

mod interface;
mod line;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::AsFd,
    time::Duration,
};

use teeline_os::datagram::{self, Inbox};

pub use interface::{Interface, own_subnets};
pub use line::{Buffer, LineOptions, LineSocketStats};
use line::{LineSocket, Role};

use crate::{Arrival, Path, Run, Sent, Transport};

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
    /// The sender named for a group is of the other kind.
    #[error("group {group}: {sender} cannot send to it, since it is not of the same kind")]
    OtherKind {
        /// The group.
        group: SocketAddr,
        /// The sender named.
        sender: IpAddr,
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

impl DriverError {
    /// What the system's refusal of `op` becomes.
    fn system(op: &'static str, address: SocketAddr) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::System {
            op,
            address,
            source,
        }
    }
}

/// UDP sockets for the lines of a feed and for requests and their answers.
#[derive(Debug)]
pub struct UdpTransport {
    lines: Vec<LineSocket>,
    unicast: Option<UdpSocket>,
    inbox: Inbox,
    /// The line that is looked at first next time: none starves another.
    turn: usize,
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
            UdpSocket::bind(address)
                .and_then(|socket| socket.set_nonblocking(true).map(|()| socket))
                .map_err(DriverError::system("bind the socket for requests", address))
        };
        Ok(Self {
            lines,
            unicast: requests.map(bind).transpose()?,
            inbox: Inbox::default(),
            turn: 0,
        })
    }

    /// Where requests are received, or sent from.
    #[must_use]
    pub fn request_address(&self) -> Option<SocketAddr> {
        self.unicast.as_ref()?.local_addr().ok()
    }

    /// The socket of a line, for what is not here.
    #[must_use]
    pub fn line_socket(&self, line: usize) -> Option<&UdpSocket> {
        self.lines.get(line).map(|line| &line.socket)
    }

    /// How each line's socket was set up, and what the kernel dropped there by now.
    pub fn lines(&self) -> impl Iterator<Item = LineSocketStats> {
        self.lines.iter().map(LineSocket::stats)
    }
}

impl Transport for UdpTransport {
    fn send(&mut self, path: Path, packet: &[u8]) -> io::Result<()> {
        match path {
            Path::Line(line) => self.sending(line)?.send(packet),
            Path::Peer(peer) => {
                let unicast = self.unicast.as_ref().ok_or(io::ErrorKind::NotConnected)?;
                unicast.send_to(packet, peer).map(drop)
            }
        }
    }

    fn send_run(&mut self, line: usize, run: Run<'_>) -> Sent {
        match self.sending(line) {
            Ok(line) => line.send_run(run),
            Err(error) => Sent::nothing(run, error),
        }
    }

    fn receive_lines(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(usize, Arrival<'_>),
    ) -> io::Result<usize> {
        let mut received = 0;
        let mut failure = None;
        let lines = self.lines.len();
        for step in 0..lines {
            let at = (self.turn + step) % lines;
            let line = &mut self.lines[at];
            if line.role != Role::Receives {
                continue;
            }
            while received < limit {
                match line.receive(&mut self.inbox, &mut |arrival| each(at, arrival)) {
                    Ok(datagrams) => received += datagrams,
                    Err(error) => {
                        failure = worth_telling(error).or(failure);
                        break;
                    }
                }
            }
        }
        self.turn = (self.turn + 1) % lines.max(1);
        failure.map_or(Ok(received), Err)
    }

    fn receive_peers(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(SocketAddr, &[u8]),
    ) -> io::Result<usize> {
        let Some(unicast) = &self.unicast else {
            return Ok(0);
        };
        let mut received = 0;
        while received < limit {
            match self.inbox.receive(unicast) {
                Ok(datagram) => {
                    received += 1;
                    if let Some(from) = datagram.from {
                        each(from, datagram.bytes);
                    }
                }
                Err(error) => return worth_telling(error).map_or(Ok(received), Err),
            }
        }
        Ok(received)
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        let receiving = |line: &&LineSocket| line.role == Role::Receives;
        let sockets = self.lines.iter().filter(receiving).map(|line| &line.socket);
        let sockets = sockets.chain(&self.unicast).map(AsFd::as_fd);
        datagram::wait_for_any(sockets, timeout)
    }
}

impl UdpTransport {
    fn sending(&mut self, line: usize) -> io::Result<&mut LineSocket> {
        let line = self.lines.get_mut(line);
        line.filter(|line| line.role == Role::Sends)
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// The errors of a receive that are more than `nothing is there`.
fn worth_telling(error: io::Error) -> Option<io::Error> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => None,
        // A server that is down: its host told us so. The timeout of the request says it, too.
        io::ErrorKind::ConnectionRefused => None,
        _ => Some(error),
    }
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
