//! UDP datagrams in captured frames.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86DD;
/// Tags of virtual networks: customer, provider, and what switches used before there was a standard.
const ETHERTYPES_VLAN: [u16; 3] = [0x8100, 0x88A8, 0x9100];

const PROTOCOL_UDP: u8 = 17;
/// Headers of IPv6 that say how long they are and what comes next: hop-by-hop, routing, destination.
const IPV6_EXTENSIONS: [u8; 3] = [0, 43, 60];
const IPV6_FRAGMENT: u8 = 44;

const UDP_HEADER_BYTES: u16 = 8;
const IPV4_HEADER_BYTES: u16 = 20;

/// What kind of frames a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkType {
    /// Ethernet.
    Ethernet,
    /// IPv4 or IPv6 without anything in front.
    RawIp,
    /// What `tcpdump -i any` writes, or wrote.
    LinuxCooked,
    /// What `tcpdump -i any` writes today.
    LinuxCooked2,
}

impl LinkType {
    pub(super) const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Ethernet),
            101 => Some(Self::RawIp),
            113 => Some(Self::LinuxCooked),
            276 => Some(Self::LinuxCooked2),
            _ => None,
        }
    }

    pub(super) const fn number(self) -> u32 {
        match self {
            Self::Ethernet => 1,
            Self::RawIp => 101,
            Self::LinuxCooked => 113,
            Self::LinuxCooked2 => 276,
        }
    }
}

/// A UDP datagram in a captured frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Who sent it.
    pub source: SocketAddr,
    /// To whom: the group, for a feed.
    pub destination: SocketAddr,
    /// What it carries. Padding and what a capture card appended are no part of it.
    pub payload: &'a [u8],
    /// How many tags of virtual networks stood in front.
    pub vlan_tags: u8,
}

/// Why a frame holds no UDP datagram that could be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum FrameError {
    /// Something else than IP and UDP: it is not ours.
    #[error("not UDP over IP")]
    Other,
    /// The capture kept only the front of it.
    #[error("the frame was cut off by the capture, or its lengths are wrong")]
    Cut,
    /// A part of a datagram. Parts are not put together.
    #[error("a fragment of a datagram")]
    Fragment,
}

impl<'a> Datagram<'a> {
    /// Reads the datagram in a frame.
    ///
    /// # Errors
    /// [`FrameError`] when there is none, or it is not whole.
    pub fn parse(link: LinkType, frame: &'a [u8]) -> Result<Self, FrameError> {
        let mut bytes = Bytes(frame);
        let mut vlan_tags = 0;
        let network = match link {
            LinkType::Ethernet => {
                bytes.skip(12)?;
                let mut kind = bytes.u16()?;
                while ETHERTYPES_VLAN.contains(&kind) {
                    bytes.skip(2)?;
                    kind = bytes.u16()?;
                    vlan_tags += 1;
                }
                kind
            }
            LinkType::LinuxCooked => {
                bytes.skip(14)?;
                bytes.u16()?
            }
            LinkType::LinuxCooked2 => {
                let kind = bytes.u16()?;
                bytes.skip(18)?;
                kind
            }
            LinkType::RawIp => match frame.first().ok_or(FrameError::Cut)? >> 4 {
                4 => ETHERTYPE_IPV4,
                6 => ETHERTYPE_IPV6,
                _ => return Err(FrameError::Other),
            },
        };
        let (source, destination, mut bytes) = match network {
            ETHERTYPE_IPV4 => ipv4(bytes)?,
            ETHERTYPE_IPV6 => ipv6(bytes)?,
            _ => return Err(FrameError::Other),
        };
        let source = SocketAddr::new(source, bytes.u16()?);
        let destination = SocketAddr::new(destination, bytes.u16()?);
        let length = bytes.u16()?;
        bytes.skip(2)?;
        let payload = length
            .checked_sub(UDP_HEADER_BYTES)
            .ok_or(FrameError::Cut)?;
        Ok(Self {
            source,
            destination,
            payload: bytes.take(payload.into())?,
            vlan_tags,
        })
    }
}

/// What is left to read of a frame.
#[derive(Debug, Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], FrameError> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(FrameError::Cut)?;
        self.0 = rest;
        Ok(taken)
    }

    fn skip(&mut self, bytes: usize) -> Result<(), FrameError> {
        self.take(bytes).map(drop)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(FrameError::Cut)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, FrameError> {
        self.array().map(u8::from_be_bytes)
    }

    fn u16(&mut self) -> Result<u16, FrameError> {
        self.array().map(u16::from_be_bytes)
    }
}

/// The addresses of an IPv4 packet, and the UDP datagram that it carries.
fn ipv4(mut bytes: Bytes<'_>) -> Result<(IpAddr, IpAddr, Bytes<'_>), FrameError> {
    let version = bytes.u8()?;
    bytes.skip(1)?;
    let length = usize::from(bytes.u16()?);
    bytes.skip(2)?;
    let fragment = bytes.u16()?;
    bytes.skip(1)?;
    let protocol = bytes.u8()?;
    bytes.skip(2)?;
    let source = Ipv4Addr::from(bytes.array()?);
    let destination = Ipv4Addr::from(bytes.array()?);
    let header = usize::from(version & 0x0F) * 4;
    if version >> 4 != 4 || protocol != PROTOCOL_UDP {
        return Err(FrameError::Other);
    }
    // Whether more fragments follow, and where this one begins.
    if fragment & 0x3FFF != 0 {
        return Err(FrameError::Fragment);
    }
    let options = header
        .checked_sub(IPV4_HEADER_BYTES.into())
        .ok_or(FrameError::Cut)?;
    bytes.skip(options)?;
    let carried = length.checked_sub(header).ok_or(FrameError::Cut)?;
    let carried = Bytes(bytes.take(carried)?);
    Ok((source.into(), destination.into(), carried))
}

/// The addresses of an IPv6 packet, and the UDP datagram that it carries.
fn ipv6(mut bytes: Bytes<'_>) -> Result<(IpAddr, IpAddr, Bytes<'_>), FrameError> {
    let version = bytes.u8()?;
    bytes.skip(3)?;
    let length = usize::from(bytes.u16()?);
    let mut next = bytes.u8()?;
    bytes.skip(1)?;
    let source = Ipv6Addr::from(bytes.array::<16>()?);
    let destination = Ipv6Addr::from(bytes.array::<16>()?);
    if version >> 4 != 6 {
        return Err(FrameError::Other);
    }
    let mut carried = Bytes(bytes.take(length)?);
    while IPV6_EXTENSIONS.contains(&next) {
        next = carried.u8()?;
        let eights = usize::from(carried.u8()?);
        carried.skip(6 + eights * 8)?;
    }
    match next {
        PROTOCOL_UDP => Ok((source.into(), destination.into(), carried)),
        IPV6_FRAGMENT => Err(FrameError::Fragment),
        _ => Err(FrameError::Other),
    }
}

/// Appends an Ethernet frame with a datagram; `None` if there is none that could carry it.
pub(super) fn append_frame(
    frame: &mut Vec<u8>,
    source: SocketAddr,
    destination: SocketAddr,
    payload: &[u8],
) -> Option<()> {
    let udp_bytes = u16::try_from(payload.len())
        .ok()?
        .checked_add(UDP_HEADER_BYTES)?;
    frame.extend_from_slice(&ethernet_address(destination.ip()));
    // Locally administered: nobody's card.
    frame.extend_from_slice(&[0x02, 0, 0, 0, 0, 0]);
    let mut udp = Checksum::default();
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let total = udp_bytes.checked_add(IPV4_HEADER_BYTES)?;
            let addresses = [source.octets(), destination.octets()].concat();
            let header = [
                &[0x45, 0][..],
                &total.to_be_bytes(),
                // No identification, not to be fragmented, as many hops as there are.
                &[0, 0, 0x40, 0, 0xFF, PROTOCOL_UDP],
            ]
            .concat();
            let mut sum = Checksum::default();
            sum.add(&header);
            sum.add(&addresses);
            frame.extend_from_slice(&ETHERTYPE_IPV4.to_be_bytes());
            frame.extend_from_slice(&header);
            frame.extend_from_slice(&sum.finish().to_be_bytes());
            frame.extend_from_slice(&addresses);
            udp.add(&addresses);
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let addresses = [source.octets(), destination.octets()].concat();
            frame.extend_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
            frame.extend_from_slice(&[0x60, 0, 0, 0]);
            frame.extend_from_slice(&udp_bytes.to_be_bytes());
            frame.extend_from_slice(&[PROTOCOL_UDP, 0xFF]);
            frame.extend_from_slice(&addresses);
            udp.add(&addresses);
        }
        _ => return None,
    }
    let header = [
        source.port().to_be_bytes(),
        destination.port().to_be_bytes(),
        udp_bytes.to_be_bytes(),
    ]
    .concat();
    udp.add(&[0, PROTOCOL_UDP]);
    udp.add(&udp_bytes.to_be_bytes());
    udp.add(&header);
    udp.add(payload);
    // 0 would say that there is no checksum.
    let checksum = match udp.finish() {
        0 => 0xFFFF,
        checksum => checksum,
    };
    frame.extend_from_slice(&header);
    frame.extend_from_slice(&checksum.to_be_bytes());
    frame.extend_from_slice(payload);
    Some(())
}

/// The Ethernet address of a multicast group; of a single host, one that is nobody's.
fn ethernet_address(ip: IpAddr) -> [u8; 6] {
    match ip {
        IpAddr::V4(ip) if ip.is_multicast() => {
            let [_, b, c, d] = ip.octets();
            [0x01, 0x00, 0x5E, b & 0x7F, c, d]
        }
        IpAddr::V6(ip) if ip.is_multicast() => {
            let [.., a, b, c, d] = ip.octets();
            [0x33, 0x33, a, b, c, d]
        }
        _ => [0x02, 0, 0, 0, 0, 1],
    }
}

/// The Internet's checksum: ones' complement of the sum of 16-bit words.
#[derive(Debug, Default)]
struct Checksum {
    sum: u64,
}

impl Checksum {
    /// Adds bytes; only the last call may give an odd number of them.
    fn add(&mut self, bytes: &[u8]) {
        let (words, odd) = bytes.as_chunks::<2>();
        self.sum += words
            .iter()
            .map(|word| u64::from(u16::from_be_bytes(*word)))
            .sum::<u64>();
        if let [last] = odd {
            self.sum += u64::from(u16::from_be_bytes([*last, 0]));
        }
    }

    fn finish(self) -> u16 {
        let mut sum = self.sum;
        while sum > 0xFFFF {
            sum = (sum >> 16) + (sum & 0xFFFF);
        }
        !u16::try_from(sum).expect("the loop ends below 2^16")
    }
}
