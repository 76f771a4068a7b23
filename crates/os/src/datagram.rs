//! Datagram sockets, as far as the standard library does not know them: many datagrams per system call by segmentation
//! offload and receive coalescing, and what the kernel tells beside a datagram.
//!
//! Each of these is asked for once, and an error says that this system does not have it. Nobody has to have any of it.
//!
//! All of it goes through the C library, as the standard library's sockets do: there a stack that goes around the kernel puts
//! itself in front of the calls, and of its sockets the kernel knows nothing.
#![expect(
    unsafe_code,
    reason = "control messages and these socket options have no safe wrapper"
)]

use std::{
    fmt, io,
    mem::{offset_of, size_of, size_of_val},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    ptr,
    time::Duration,
};

use libc::{c_int, c_void};

/// Socket option and control message: how long the segments of a send are. Not in `libc` for this system.
const UDP_SEGMENT: c_int = 103;

/// Socket option and control message: how long the segments of a receive are. Not in `libc` for this system.
const UDP_GRO: c_int = 104;

/// Most segments of one send that every kernel takes.
pub const SEGMENTS_MAX: usize = 64;

/// Most bytes of one send that is worth cutting: with all headers, fewer than 2^16. A longer one is cut in software before
/// it reaches the loopback interface: 44 µs instead of 9.
pub const SEND_BYTES_MAX: usize = 65_400;

/// Bytes that any receive fits into, coalesced or not.
pub const RECEIVE_BYTES_MAX: usize = 1 << 16;

/// Words of a `sockaddr_storage`.
const NAME_WORDS: usize = size_of::<libc::sockaddr_storage>() / size_of::<u64>();

/// Words for the control messages that are asked for here, with room to spare.
const CONTROL_WORDS: usize = 16;

const CONTROL_HEADER_BYTES: usize = size_of::<libc::cmsghdr>();

/// Asks for receives that carry several datagrams of one sender, all of one length but the last, in one buffer.
///
/// # Errors
/// When the system does not have it.
pub fn set_coalescing(socket: impl AsFd, on: bool) -> io::Result<()> {
    set_number(socket.as_fd(), libc::SOL_UDP, UDP_GRO, on.into())
}

/// Asks the system whether it cuts a send into segments: whether [`send_segments`] is worth trying.
///
/// # Errors
/// When it does not.
pub fn probe_segmentation(socket: impl AsFd) -> io::Result<()> {
    set_number(socket.as_fd(), libc::SOL_UDP, UDP_SEGMENT, 0)
}

/// Asks for the time at which the kernel took a buffer in, with each receive.
///
/// # Errors
/// When the system does not have it.
pub fn set_timestamps(socket: impl AsFd, on: bool) -> io::Result<()> {
    let name = libc::SO_TIMESTAMPNS;
    set_number(socket.as_fd(), libc::SOL_SOCKET, name, on.into())
}

/// Asks for the number of buffers that were dropped for want of room, with each receive.
///
/// # Errors
/// When the system does not have it.
pub fn set_drop_counts(socket: impl AsFd, on: bool) -> io::Result<()> {
    set_number(
        socket.as_fd(),
        libc::SOL_SOCKET,
        libc::SO_RXQ_OVFL,
        on.into(),
    )
}

/// Lets a receive that finds nothing ask the network card itself for so many microseconds. More than the system's own
/// setting needs a privilege.
///
/// # Errors
/// When the system does not have it, or does not allow it.
pub fn set_busy_poll(socket: impl AsFd, microseconds: u32) -> io::Result<()> {
    let microseconds = c_int::try_from(microseconds).unwrap_or(c_int::MAX);
    set_number(
        socket.as_fd(),
        libc::SOL_SOCKET,
        libc::SO_BUSY_POLL,
        microseconds,
    )
}

/// Joins a multicast group for what one sender sends to it, on the interface with this index.
///
/// # Errors
/// When the system refuses, or the two addresses are not of one kind.
pub fn join_source(
    socket: impl AsFd,
    interface: u32,
    group: IpAddr,
    sender: IpAddr,
) -> io::Result<()> {
    let level = match (group, sender) {
        (IpAddr::V4(_), IpAddr::V4(_)) => libc::IPPROTO_IP,
        (IpAddr::V6(_), IpAddr::V6(_)) => libc::IPPROTO_IPV6,
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let request = GroupSourceReq {
        interface,
        group: Name::new(group),
        sender: Name::new(sender),
    };
    set(
        socket.as_fd(),
        level,
        libc::MCAST_JOIN_SOURCE_GROUP,
        &request,
    )
}

/// How many buffers the kernel dropped since the socket was opened, for want of room.
///
/// # Errors
/// When the system does not tell.
pub fn dropped(socket: impl AsFd) -> io::Result<u32> {
    const WORDS: usize = 16;
    const AT: usize = libc::SK_MEMINFO_DROPS as usize;
    let mut words = [0u32; WORDS];
    let mut length = libc::socklen_t::try_from(size_of_val(&words)).unwrap_or(0);
    // SAFETY: `words` has `length` bytes that may hold any numbers, and the kernel writes no more than that.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            words.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    match result {
        0 if length as usize > AT * size_of::<u32>() => Ok(words[AT]),
        0 => Err(io::ErrorKind::Unsupported.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Waits until something can be received on one of `sockets`, for `timeout` at most, and for less when a signal comes.
///
/// # Errors
/// When waiting is not possible.
pub fn wait_for_any<'a>(
    sockets: impl IntoIterator<Item = BorrowedFd<'a>>,
    timeout: Duration,
) -> io::Result<()> {
    let watched = |socket: BorrowedFd<'_>| libc::pollfd {
        fd: socket.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut watched: Vec<_> = sockets.into_iter().map(watched).collect();
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: `watched` has as many elements as are said, which the kernel may write to, `timeout` outlives the call, and no
    // signals are masked.
    let found = unsafe {
        libc::ppoll(
            watched.as_mut_ptr(),
            watched.len() as libc::nfds_t,
            &raw const timeout,
            ptr::null(),
        )
    };
    if found >= 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        error => Err(error),
    }
}

/// Sends datagrams of `segment_bytes` each, of which the last may be shorter, in one call to where the socket is
/// connected to: at most [`SEGMENTS_MAX`], and [`SEND_BYTES_MAX`] bytes. All of them are sent, or none.
///
/// # Errors
/// What the system says. `EIO` and `EINVAL` can mean that the way out does not cut segments, or not of this length.
pub fn send_segments(socket: impl AsFd, packets: &[u8], segment_bytes: u16) -> io::Result<()> {
    const LENGTH: usize = CONTROL_HEADER_BYTES + size_of::<u16>();
    let mut control = [0u64; LENGTH.div_ceil(size_of::<u64>())];
    control[0] = LENGTH as u64;
    control[1] = level_and_kind(libc::SOL_UDP, UDP_SEGMENT);
    control[2] = u64::from_ne_bytes(pad(segment_bytes.to_ne_bytes()));
    let mut place = libc::iovec {
        iov_base: packets.as_ptr().cast_mut().cast(),
        iov_len: packets.len(),
    };
    let message = libc::msghdr {
        msg_name: ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: &raw mut place,
        msg_iovlen: 1,
        msg_control: control.as_mut_ptr().cast(),
        msg_controllen: size_of_val(&control),
        msg_flags: 0,
    };
    // SAFETY: `message` points to `place` and `control`, and `place` to `packets`, which all outlive the call, have the
    // lengths given, and are only read.
    let sent = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, 0) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Memory for one receive at a time.
pub struct Inbox {
    buffer: Box<[u8]>,
    name: [u64; NAME_WORDS],
    control: [u64; CONTROL_WORDS],
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").finish_non_exhaustive()
    }
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            buffer: vec![0; RECEIVE_BYTES_MAX].into_boxed_slice(),
            name: [0; NAME_WORDS],
            control: [0; CONTROL_WORDS],
        }
    }
}

/// One receive: a datagram, or several that the kernel coalesced.
#[derive(Debug, Clone, Copy)]
pub struct Received<'a> {
    /// The datagrams, one behind the other.
    pub bytes: &'a [u8],
    /// How long each of them is, but for the last one, which may be shorter; `None` if there is one.
    pub segment_bytes: Option<usize>,
    /// Who sent them.
    pub from: Option<SocketAddr>,
    /// When the kernel took the buffer in, in nanoseconds of the wall clock, if that was asked for. One time for all of
    /// its datagrams.
    pub kernel_ns: Option<u64>,
    /// How many buffers the kernel has dropped by then since the socket was opened, modulo 2³², if that was asked for
    /// and there were any. Of coalesced ones, too, each counts once.
    pub dropped: Option<u32>,
}

impl<'a> Received<'a> {
    /// Each datagram.
    pub fn datagrams(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let (bytes, segment_bytes) = (self.bytes, self.segment_bytes.unwrap_or(usize::MAX));
        // An empty datagram is one, too.
        let empty = bytes.is_empty().then_some(bytes);
        bytes.chunks(segment_bytes.max(1)).chain(empty)
    }
}

impl Inbox {
    /// Takes what has arrived first on a socket. Waits as the socket does.
    ///
    /// # Errors
    /// What the system says: `WouldBlock` when nothing is there and the socket does not wait.
    pub fn receive(&mut self, socket: impl AsFd) -> io::Result<Received<'_>> {
        let mut place = libc::iovec {
            iov_base: self.buffer.as_mut_ptr().cast(),
            iov_len: self.buffer.len(),
        };
        let mut message = libc::msghdr {
            msg_name: self.name.as_mut_ptr().cast(),
            msg_namelen: libc::socklen_t::try_from(size_of_val(&self.name)).unwrap_or(0),
            msg_iov: &raw mut place,
            msg_iovlen: 1,
            msg_control: self.control.as_mut_ptr().cast(),
            msg_controllen: size_of_val(&self.control),
            msg_flags: 0,
        };
        // SAFETY: `message` points to memory of this inbox and of this call with the lengths given, all of it may hold any
        // bytes, and the kernel writes no more than that.
        let length = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, 0) };
        let Ok(length) = usize::try_from(length) else {
            return Err(io::Error::last_os_error());
        };
        let mut received = Received {
            bytes: &self.buffer[..length.min(self.buffer.len())],
            segment_bytes: None,
            from: None,
            kernel_ns: None,
            dropped: None,
        };
        received.from = read_name(&self.name, message.msg_namelen as usize);
        let words = message.msg_controllen.div_ceil(size_of::<u64>());
        read_control(&self.control[..words.min(CONTROL_WORDS)], &mut received);
        Ok(received)
    }
}

/// Reads the control messages, each of which begins on a word: its length, level and kind, and data.
fn read_control(mut words: &[u64], received: &mut Received<'_>) {
    const HEADER_WORDS: usize = CONTROL_HEADER_BYTES / size_of::<u64>();
    while let [length, head, data @ ..] = words {
        let length = usize::try_from(*length).unwrap_or(usize::MAX);
        let length = length.div_ceil(size_of::<u64>());
        let low = |word: u64| u32::from_ne_bytes(first_half(word));
        if let Some(first) = data.first().filter(|_| length > HEADER_WORDS) {
            if *head == level_and_kind(libc::SOL_UDP, UDP_GRO) {
                received.segment_bytes = usize::try_from(low(*first)).ok().filter(|at| *at > 0);
            } else if *head == level_and_kind(libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) {
                let nanoseconds = data.get(1).copied().unwrap_or(0);
                received.kernel_ns = Some(first * 1_000_000_000 + nanoseconds);
            } else if *head == level_and_kind(libc::SOL_SOCKET, libc::SO_RXQ_OVFL) {
                received.dropped = Some(low(*first));
            }
        }
        words = words.get(length.max(HEADER_WORDS)..).unwrap_or(&[]);
    }
}

/// The second word of a control message's header.
fn level_and_kind(level: c_int, kind: c_int) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (level.to_ne_bytes(), kind.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

const _: () = assert!(
    CONTROL_HEADER_BYTES == 16
        && offset_of!(libc::cmsghdr, cmsg_len) == 0
        && offset_of!(libc::cmsghdr, cmsg_level) == 8
        && offset_of!(libc::cmsghdr, cmsg_type) == 12,
    "control messages are read and written as words"
);

fn first_half(word: u64) -> [u8; 4] {
    let [a, b, c, d, ..] = word.to_ne_bytes();
    [a, b, c, d]
}

fn pad<const N: usize>(bytes: [u8; N]) -> [u8; 8] {
    let mut padded = [0; 8];
    padded[..N].copy_from_slice(&bytes);
    padded
}

/// Reads an address as the kernel writes it.
fn read_name(words: &[u64; NAME_WORDS], length: usize) -> Option<SocketAddr> {
    let mut bytes = [0; 4 * size_of::<u64>()];
    for (chunk, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    let [f0, f1, p0, p1, rest @ ..] = bytes;
    let port = u16::from_be_bytes([p0, p1]);
    match c_int::from(u16::from_ne_bytes([f0, f1])) {
        libc::AF_INET if length >= size_of::<libc::sockaddr_in>() => {
            let address: [u8; 4] = *rest.first_chunk()?;
            Some(SocketAddr::new(Ipv4Addr::from(address).into(), port))
        }
        libc::AF_INET6 if length >= size_of::<libc::sockaddr_in6>() => {
            let (flow, rest) = rest.split_first_chunk()?;
            let (address, rest) = rest.split_first_chunk::<16>()?;
            let (flow, scope) = (
                u32::from_be_bytes(*flow),
                u32::from_ne_bytes(*rest.first_chunk()?),
            );
            let address = Ipv6Addr::from(*address);
            Some(SocketAddrV6::new(address, port, flow, scope).into())
        }
        _ => None,
    }
}

/// An address as the kernel reads it, without a port.
#[repr(C, align(8))]
struct Name([u8; size_of::<libc::sockaddr_storage>()]);

impl Name {
    fn new(address: IpAddr) -> Self {
        let mut bytes = [0; size_of::<libc::sockaddr_storage>()];
        let family = match address {
            IpAddr::V4(address) => {
                let at = offset_of!(libc::sockaddr_in, sin_addr);
                bytes[at..at + 4].copy_from_slice(&address.octets());
                libc::AF_INET
            }
            IpAddr::V6(address) => {
                let at = offset_of!(libc::sockaddr_in6, sin6_addr);
                bytes[at..at + 16].copy_from_slice(&address.octets());
                libc::AF_INET6
            }
        };
        let family = libc::sa_family_t::try_from(family).unwrap_or(0);
        bytes[..size_of::<libc::sa_family_t>()].copy_from_slice(&family.to_ne_bytes());
        Self(bytes)
    }
}

/// What the kernel wants for [`join_source`]. Not in `libc` for this system.
#[repr(C)]
struct GroupSourceReq {
    interface: u32,
    group: Name,
    sender: Name,
}

const _: () = assert!(size_of::<GroupSourceReq>() == 264 && offset_of!(GroupSourceReq, group) == 8);

fn set_number(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    set(socket, level, name, &value)
}

fn set<T>(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> io::Result<()> {
    let pointer: *const c_void = ptr::from_ref(value).cast();
    let length = libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0);
    // SAFETY: `pointer` leads to `length` bytes, which the kernel only reads.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, pointer, length) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    fn pair() -> (UdpSocket, UdpSocket) {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.connect(receiver.local_addr().unwrap()).unwrap();
        (sender, receiver)
    }

    #[test]
    fn segments_arrive_as_datagrams_coalesced_or_not() {
        let (sender, receiver) = pair();
        if let Err(error) = probe_segmentation(&sender) {
            eprintln!("skipped: no segmentation offload ({error})");
            return;
        }
        let packets: Vec<u8> = (0..250).collect();
        let expected: Vec<&[u8]> = packets.chunks(100).collect();
        let mut inbox = Inbox::default();
        send_segments(&sender, &packets, 100).unwrap();
        for datagram in &expected {
            let received = inbox.receive(&receiver).unwrap();
            assert_eq!((received.bytes, received.segment_bytes), (*datagram, None));
            assert_eq!(received.from, Some(sender.local_addr().unwrap()));
        }
        if let Err(error) = set_coalescing(&receiver, true) {
            eprintln!("skipped: no receive coalescing ({error})");
            return;
        }
        send_segments(&sender, &packets, 100).unwrap();
        let received = inbox.receive(&receiver).unwrap();
        assert_eq!(received.segment_bytes, Some(100));
        assert_eq!(received.datagrams().collect::<Vec<_>>(), expected);
        sender.send(b"").unwrap();
        let received = inbox.receive(&receiver).unwrap();
        assert_eq!(received.datagrams().collect::<Vec<_>>(), [b""]);
    }

    #[test]
    fn times_and_drops_are_told_with_what_arrives() {
        let (sender, receiver) = pair();
        set_timestamps(&receiver, true).unwrap();
        set_drop_counts(&receiver, true).unwrap();
        let mut inbox = Inbox::default();
        sender.send(b"first").unwrap();
        let received = inbox.receive(&receiver).unwrap();
        let (first_ns, dropped) = (received.kernel_ns.unwrap(), received.dropped);
        assert_eq!(dropped.unwrap_or(0), 0);
        // More than any usual buffer takes.
        let sent = 20_000;
        for _ in 0..sent {
            sender.send(&[0; 1_000]).unwrap();
        }
        receiver.set_nonblocking(true).unwrap();
        let mut found = 0;
        while let Ok(received) = inbox.receive(&receiver) {
            assert!(received.kernel_ns.unwrap() >= first_ns);
            found += 1;
        }
        let lost = dropped_after(&receiver);
        assert_eq!(found + lost, sent);
        assert!(lost > 0);
        // The next that arrives tells, too.
        sender.send(b"last").unwrap();
        assert_eq!(
            inbox.receive(&receiver).unwrap().dropped.map(u64::from),
            Some(lost)
        );
    }

    fn dropped_after(socket: &UdpSocket) -> u64 {
        dropped(socket).unwrap().into()
    }

    #[test]
    fn one_of_several_sockets_ends_the_wait_and_so_does_time() {
        let (sender, receiver) = pair();
        let (_, other) = pair();
        let both = [other.as_fd(), receiver.as_fd()];
        wait_for_any(both, Duration::from_millis(1)).unwrap();
        receiver.set_nonblocking(true).unwrap();
        assert!(Inbox::default().receive(&receiver).is_err());
        sender.send(b"x").unwrap();
        // Ends, or the test does not.
        wait_for_any(both, Duration::MAX).unwrap();
        assert_eq!(Inbox::default().receive(&receiver).unwrap().bytes, b"x");
    }

    #[test]
    fn what_is_no_socket_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(set_coalescing(&file, true).is_err());
        assert!(dropped(&file).is_err());
        assert!(Inbox::default().receive(&file).is_err());
        assert!(send_segments(&file, b"x", 1).is_err());
        let (_, socket) = pair();
        let (group, sender) = (
            Ipv4Addr::new(239, 1, 1, 1).into(),
            Ipv6Addr::LOCALHOST.into(),
        );
        let error = join_source(&socket, 1, group, sender).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn addresses_are_read_as_the_kernel_writes_them() {
        let receiver = UdpSocket::bind("[::1]:0").unwrap();
        let sender = UdpSocket::bind("[::1]:0").unwrap();
        sender
            .send_to(b"x", receiver.local_addr().unwrap())
            .unwrap();
        let mut inbox = Inbox::default();
        let received = inbox.receive(&receiver).unwrap();
        assert_eq!(received.from, Some(sender.local_addr().unwrap()));
    }
}
