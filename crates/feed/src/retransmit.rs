//! The re-request server: answers who asks for what is missing, and never floods anybody.

use std::{
    collections::HashMap,
    fmt, io,
    net::{IpAddr, SocketAddr},
    ops::Range,
    str::FromStr,
};

use teeline_core::Sequence;

use crate::{
    Session, Window,
    wire::{Encoder, Request},
};

/// Most addresses whose use is remembered at a time. When more ask within the same seconds, the rest waits.
const ADDRESSES_MAX: usize = 4_096;

/// Where messages are kept that left the window, and those of earlier sessions.
pub trait MessageStore {
    /// The numbers of a session that are kept, half-open; `None` if it is unknown.
    ///
    /// # Errors
    /// When the store cannot be read.
    fn range(&mut self, session: Session) -> io::Result<Option<Range<Sequence>>>;

    /// Hands the messages of a session from the number `first` on to `each`, in order, until that says no or there are no
    /// more. Numbers without a message are left out.
    ///
    /// # Errors
    /// When the store cannot be read.
    fn read(
        &mut self,
        session: Session,
        first: Sequence,
        each: &mut dyn FnMut(Sequence, &[u8]) -> bool,
    ) -> io::Result<()>;
}

/// Addresses that begin with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    address: IpAddr,
    bits: u32,
}

/// Why a text is not a [`Prefix`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a prefix: `10.1.0.0/16`, `fd00::/8` and single addresses are")]
pub struct NotAPrefix(String);

impl Prefix {
    /// The addresses that have their first `bits` bits in common with `address`; `None` if it has fewer.
    #[must_use]
    pub fn new(address: IpAddr, bits: u32) -> Option<Self> {
        (bits <= address_bits(address)).then_some(Self { address, bits })
    }

    /// Whether an address is one of them. An IPv4 address in IPv6's clothes counts as what it is.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let shared = match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                (own.to_bits() ^ other.to_bits()).leading_zeros()
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                (own.to_bits() ^ other.to_bits()).leading_zeros()
            }
            _ => return false,
        };
        shared >= self.bits
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

fn address_bits(address: IpAddr) -> u32 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

impl FromStr for Prefix {
    type Err = NotAPrefix;

    fn from_str(text: &str) -> Result<Self, NotAPrefix> {
        let parse = || {
            let (address, bits) = match text.split_once('/') {
                Some((address, bits)) => (address.parse().ok()?, Some(bits.parse().ok()?)),
                None => (text.parse().ok()?, None),
            };
            Self::new(address, bits.unwrap_or(address_bits(address)))
        };
        parse().ok_or_else(|| NotAPrefix(text.to_owned()))
    }
}

/// A rate of answers, with what may come at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Bytes per second in the long run.
    pub bytes_per_s: u64,
    /// Bytes that may be sent at once after a pause.
    pub burst_bytes: u64,
}

impl Rate {
    /// How long `bytes` take at this rate.
    fn duration_ns(self, bytes: u64) -> u64 {
        let ns = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s.max(1));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    /// Whether a packet may be sent to somebody who is `busy_until_ns`.
    fn allows(self, now_ns: u64, busy_until_ns: u64) -> bool {
        busy_until_ns.saturating_sub(now_ns) <= self.duration_ns(self.burst_bytes)
    }

    /// Until when somebody is busy after `bytes` more.
    fn charge(self, now_ns: u64, busy_until_ns: u64, bytes: u64) -> u64 {
        busy_until_ns
            .max(now_ns)
            .saturating_add(self.duration_ns(bytes))
    }
}

/// How a re-request server works.
#[derive(Debug, Clone)]
pub struct RetransmitOptions {
    /// Largest answer, in bytes of UDP payload.
    pub packet_bytes_max: usize,
    /// Who is answered. Nobody, unless somebody is named: the driver names the subnets of the host's own interfaces.
    pub allowed: Vec<Prefix>,
    /// What one address may get; `None` is no limit.
    pub address_rate: Option<Rate>,
    /// What all together may get; `None` is no limit.
    pub total_rate: Option<Rate>,
}

impl Default for RetransmitOptions {
    fn default() -> Self {
        Self {
            packet_bytes_max: 1_400,
            allowed: Vec::new(),
            // A tenth of a gigabit line for one, a half for all; bursts of what a socket buffer takes.
            address_rate: Some(Rate {
                bytes_per_s: 12_500_000,
                burst_bytes: 1 << 20,
            }),
            total_rate: Some(Rate {
                bytes_per_s: 62_500_000,
                burst_bytes: 4 << 20,
            }),
        }
    }
}

/// What to do about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer<'a> {
    /// Send this packet to where the request came from.
    Packet(&'a [u8]),
    /// Nothing, and why.
    Silence(Silence),
}

/// Why a request is not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    /// It comes from nobody who may ask.
    NotAllowed,
    /// It is no request.
    Malformed,
    /// Nothing is known of that session.
    UnknownSession,
    /// Nothing of the range is published yet.
    NotPublished,
    /// Its address, or all together, had their share.
    RateLimited,
    /// The store cannot be read.
    StoreFailed,
}

/// What a re-request server did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RetransmitStats {
    /// Answers with messages.
    pub answers: u64,
    /// Messages in them.
    pub messages: u64,
    /// Bytes in answers of both kinds.
    pub bytes: u64,
    /// Answers that said that nothing of the range is there any more.
    pub too_old: u64,
    /// Requests of nobody who may ask.
    pub not_allowed: u64,
    /// Packets that were no request.
    pub malformed: u64,
    /// Requests for sessions that are not known.
    pub unknown_session: u64,
    /// Requests for what is not published yet.
    pub not_published: u64,
    /// Requests not answered since the address, or all together, had their share.
    pub rate_limited: u64,
    /// Requests not answered since the store could not be read.
    pub store_failed: u64,
}

/// Answers requests from the window, and from a store behind it. One packet per request at most.
#[derive(Debug)]
pub struct RetransmitServer {
    options: RetransmitOptions,
    packet: Encoder,
    /// Until when what each address got would take at its rate.
    busy_until_ns: HashMap<IpAddr, u64>,
    all_busy_until_ns: u64,
    stats: RetransmitStats,
}

impl RetransmitServer {
    /// A server that nobody has asked yet.
    #[must_use]
    pub fn new(options: RetransmitOptions) -> Self {
        Self {
            packet: Encoder::new(Session::ANONYMISED, Sequence(1), options.packet_bytes_max),
            options,
            busy_until_ns: HashMap::new(),
            all_busy_until_ns: 0,
            stats: RetransmitStats::default(),
        }
    }

    /// What to answer `bytes` that came from `from`. `window` holds the latest messages of the session that is on, if one
    /// is.
    pub fn answer(
        &mut self,
        now_ns: u64,
        from: SocketAddr,
        bytes: &[u8],
        window: Option<&Window>,
        store: Option<&mut dyn MessageStore>,
    ) -> Answer<'_> {
        let packed = self
            .admit(now_ns, from.ip(), bytes)
            .and_then(|request| self.pack(request, window, store));
        match packed {
            Ok(()) => {
                self.charge(now_ns, from.ip());
                Answer::Packet(self.packet.bytes())
            }
            Err(silence) => {
                *self.counter(silence) += 1;
                Answer::Silence(silence)
            }
        }
    }

    /// What was done so far.
    #[must_use]
    pub const fn stats(&self) -> RetransmitStats {
        self.stats
    }

    const fn counter(&mut self, silence: Silence) -> &mut u64 {
        match silence {
            Silence::NotAllowed => &mut self.stats.not_allowed,
            Silence::Malformed => &mut self.stats.malformed,
            Silence::UnknownSession => &mut self.stats.unknown_session,
            Silence::NotPublished => &mut self.stats.not_published,
            Silence::RateLimited => &mut self.stats.rate_limited,
            Silence::StoreFailed => &mut self.stats.store_failed,
        }
    }

    /// The request, if its sender may have an answer now.
    fn admit(&mut self, now_ns: u64, from: IpAddr, bytes: &[u8]) -> Result<Request, Silence> {
        if !self
            .options
            .allowed
            .iter()
            .any(|prefix| prefix.contains(from))
        {
            return Err(Silence::NotAllowed);
        }
        let request = Request::parse(bytes).map_err(|_| Silence::Malformed)?;
        if request.count == 0 || request.sequence == Sequence::NONE {
            return Err(Silence::Malformed);
        }
        let busy = self.busy_until_ns.get(&from).copied();
        let address_may =
            (self.options.address_rate).is_none_or(|rate| rate.allows(now_ns, busy.unwrap_or(0)));
        let all_may = (self.options.total_rate)
            .is_none_or(|rate| rate.allows(now_ns, self.all_busy_until_ns));
        if busy.is_none() && self.busy_until_ns.len() >= ADDRESSES_MAX {
            // To forget who is not busy changes nothing.
            self.busy_until_ns
                .retain(|_, busy_until_ns| *busy_until_ns > now_ns);
        }
        let known = busy.is_some() || self.busy_until_ns.len() < ADDRESSES_MAX;
        if address_may && all_may && known {
            Ok(request)
        } else {
            Err(Silence::RateLimited)
        }
    }

    fn charge(&mut self, now_ns: u64, to: IpAddr) {
        let bytes = self.packet.bytes().len() as u64;
        self.stats.bytes += bytes;
        if let Some(rate) = self.options.address_rate {
            let busy = self.busy_until_ns.entry(to).or_insert(0);
            *busy = rate.charge(now_ns, *busy, bytes);
        }
        if let Some(rate) = self.options.total_rate {
            self.all_busy_until_ns = rate.charge(now_ns, self.all_busy_until_ns, bytes);
        }
    }

    /// Packs the front of what is there of the range.
    fn pack(
        &mut self,
        request: Request,
        window: Option<&Window>,
        mut store: Option<&mut dyn MessageStore>,
    ) -> Result<(), Silence> {
        let failed = |_| Silence::StoreFailed;
        let window = window.filter(|window| window.session() == request.session);
        let in_store = match &mut store {
            Some(store) => store.range(request.session).map_err(failed)?,
            None => None,
        };
        if in_store.is_none() && window.is_none() {
            return Err(Silence::UnknownSession);
        }
        let ends = [
            in_store.as_ref().map(|range| range.end),
            window.map(Window::next_sequence),
        ];
        let published = ends.into_iter().flatten().max().unwrap_or(Sequence::NONE);
        if request.sequence >= published {
            return Err(Silence::NotPublished);
        }
        let end = Sequence(request.sequence.0.saturating_add(request.count.into())).min(published);
        let in_window = window.and_then(|window| window.next_held(request.sequence));
        let packet = &mut self.packet;
        packet.restart(request.session, request.sequence);
        let append = |packet: &mut Encoder, sequence, message: &[u8]| {
            if packet.count() == 0 {
                packet.restart(request.session, sequence);
            }
            sequence == packet.next_sequence() && sequence < end && packet.push(message)
        };
        if let Some(store) = store
            && in_store.is_some_and(|range| range.end > request.sequence)
            && in_window != Some(request.sequence)
        {
            store
                .read(
                    request.session,
                    request.sequence,
                    &mut |sequence, message| {
                        // What is in memory is not read.
                        in_window.is_none_or(|first| sequence < first)
                            && append(packet, sequence, message)
                    },
                )
                .map_err(failed)?;
        }
        if let (Some(window), Some(first)) = (window, in_window) {
            let from = match packet.count() {
                0 => first,
                _ => packet.next_sequence(),
            };
            for (sequence, message) in window.messages(from) {
                if !append(packet, sequence, message) {
                    break;
                }
            }
        }
        if packet.count() == 0 {
            // Nothing of it is there: the answer says what is, at or beyond the end of what was asked for.
            let first = in_window.unwrap_or(published).max(end);
            packet.restart(request.session, first);
            self.stats.too_old += 1;
        } else {
            self.stats.answers += 1;
            self.stats.messages += u64::from(packet.count());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
