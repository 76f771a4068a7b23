//! Lines on the loopback interface, and what both sides of a round share.

use std::{
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    path::PathBuf,
    sync::atomic::Ordering,
};

use serde::{Deserialize, Serialize};
use teeline_core::{Epoch, Sequence};
use teeline_feed::{
    Publication, Publisher, PublisherOptions, Receiver, ReceiverOptions, RequestOptions,
    RetransmitOptions, RetransmitServer, Session, Start, Subscription,
    driver::{Interface, LineOptions, UdpTransport},
};
use teeline_latency::raw::{Field, Patience, Side};
use teeline_os::{Mapping, file};

use super::PACKET_BYTES;
use crate::{command::bench::Place, output::Failure};

/// Socket buffer that is asked for.
const BUFFER_BYTES: usize = 4 << 20;

/// Most bytes under way.
const WINDOW_BYTES_MAX: u64 = 1 << 20;

/// A publisher's memory for the latest messages, as a rule: what the nearer caches hold.
pub(super) const PUBLISHER_BYTES: usize = 1 << 20;

/// The groups that `tools/lossy-wire` loses packets of, and one of which it loses none.
const LOSSY_GROUPS: [Ipv4Addr; 2] = [Ipv4Addr::new(239, 77, 70, 1), Ipv4Addr::new(239, 77, 70, 2)];
const WHOLE_GROUP: Ipv4Addr = Ipv4Addr::new(239, 77, 70, 3);

/// Multicast lines on the loopback interface that nobody else uses.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Lines {
    groups: Vec<SocketAddrV4>,
    /// Where requests are answered.
    pub(super) server: SocketAddr,
    /// Whether large sends are cut, and packets joined, by the system.
    pub(super) offload: bool,
}

impl Lines {
    /// `count` new ones.
    pub(super) fn new(count: usize, offload: bool) -> Result<Self, Failure> {
        let free = || UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr());
        let free = || free().map_err(|error| Failure::new(format_args!("no free port: {error}")));
        let mut groups = Vec::new();
        for _ in 0..count {
            groups.push(SocketAddrV4::new(WHOLE_GROUP, free()?.port()));
        }
        Ok(Self {
            groups,
            server: free()?,
            offload,
        })
    }

    /// The first `count` of them are of groups that `tools/lossy-wire` loses packets of.
    pub(super) fn lossy(mut self, count: usize) -> Self {
        for (line, group) in self.groups.iter_mut().zip(LOSSY_GROUPS).take(count) {
            line.set_ip(group);
        }
        self
    }

    /// Why the loopback interface carries no multicast here, if that is so.
    pub(super) fn carry_multicast() -> Result<(), String> {
        let lines = Self::new(1, true).map_err(|failure| failure.to_string())?;
        let receiver = UdpTransport::receiver(&lines.options(0..1), None);
        let sender = UdpTransport::sender(&lines.options(0..1), None);
        receiver
            .and(sender)
            .map(drop)
            .map_err(|error| format!("no multicast on the loopback interface: {error}"))
    }

    /// Some of them, as the sockets take them.
    pub(super) fn options(&self, which: std::ops::Range<usize>) -> Vec<LineOptions> {
        let line = |group: &SocketAddrV4| LineOptions {
            buffer_bytes: Some(BUFFER_BYTES),
            offload: self.offload,
            ..LineOptions::new(
                SocketAddr::V4(*group),
                Interface::Address(Ipv4Addr::LOCALHOST.into()),
            )
        };
        self.groups[which].iter().map(line).collect()
    }

    /// How many bytes may be under way on one of them: what a receiver's buffer surely takes.
    pub(super) fn window_bytes(&self) -> Result<u64, Failure> {
        let receiver = UdpTransport::receiver(&self.options(0..1), None).map_err(Failure::new)?;
        let granted = receiver
            .lines()
            .next()
            .map_or(0, |line| line.buffer.granted);
        Ok(WINDOW_BYTES_MAX.min(granted as u64 / 4 * 3))
    }

    /// A publication on some of them, which answers requests on `requests` from a memory of `bytes`.
    pub(super) fn publication(
        &self,
        which: std::ops::Range<usize>,
        requests: SocketAddr,
        bytes: usize,
    ) -> Result<Publication<UdpTransport>, Failure> {
        let lines = which.len();
        let transport = UdpTransport::sender(&self.options(which), Some(requests));
        let server = RetransmitServer::new(RetransmitOptions {
            allowed: vec!["127.0.0.0/8".parse().map_err(Failure::new)?],
            address_rate: None,
            total_rate: None,
            ..RetransmitOptions::default()
        });
        Ok(Publication::new(
            publisher(bytes),
            server,
            None,
            transport.map_err(Failure::new)?,
            lines,
        ))
    }

    /// A subscription to some of them, through what `wrap` makes of the sockets.
    pub(super) fn subscription<T: teeline_feed::Transport>(
        &self,
        which: std::ops::Range<usize>,
        requests: RequestOptions,
        wrap: impl FnOnce(UdpTransport) -> T,
    ) -> Result<Subscription<T>, Failure> {
        let receiver = Receiver::new(ReceiverOptions {
            lines: which.len(),
            servers: 1,
            start: Start::Beginning,
            requests,
            ..ReceiverOptions::default()
        });
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let transport = UdpTransport::receiver(&self.options(which), Some(any_port));
        let transport = wrap(transport.map_err(Failure::new)?);
        Ok(Subscription::new(receiver, vec![self.server], transport))
    }
}

/// A publisher with a memory of `bytes`, whose messages are numbered from 1 on.
pub(super) fn publisher(bytes: usize) -> Publisher {
    let session = Session::from_epoch(Epoch(1)).expect("long before 2085");
    let options = PublisherOptions {
        packet_bytes_max: PACKET_BYTES,
        window_bytes: bytes,
        heartbeat_interval_ns: 20_000_000,
        ..PublisherOptions::default()
    };
    Publisher::new(session, Sequence(1), options)
}

/// How both sides begin together, and how far the receiver is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Pace {
    field: PathBuf,
    arrived: PathBuf,
}

/// It, in a process.
pub(super) struct Arrived {
    field: Field,
    word: Mapping,
}

impl Pace {
    const WORD_BYTES: u64 = 4_096;

    pub(super) fn create(place: &Place) -> Result<Self, Failure> {
        let pace = Self {
            field: place.join("field"),
            arrived: place.join("arrived"),
        };
        let create = || {
            Field::create(&pace.field, 1)?;
            let word = file::create_new(&pace.arrived, 0o600, None)?;
            file::reserve(&word, &pace.arrived, Self::WORD_BYTES)
        };
        create().map_err(Failure::new)?;
        Ok(pace)
    }

    pub(super) fn open(&self) -> Result<Arrived, Failure> {
        let open = || {
            let word = file::open_read_write(&self.arrived)?;
            let bytes = usize::try_from(Self::WORD_BYTES).unwrap_or(0);
            Ok(Arrived {
                field: Field::open(&self.field)?,
                word: Mapping::read_write(&word, &self.arrived, bytes)?,
            })
        };
        open().map_err(|error: teeline_os::Error| Failure::new(error))
    }
}

impl Arrived {
    /// Waits for the other side.
    pub(super) fn meet(&self, left: bool) -> Result<(), Failure> {
        let side = if left { Side::Left } else { Side::Right };
        Ok(self.field.meet(side, 1)?)
    }

    /// Says how much has arrived.
    #[inline]
    pub(super) fn say(&self, arrived: u64) {
        // SYNC bench-arrived: pairs with the acquire load in `get`.
        self.word.store_u64(0, arrived, Ordering::Release);
    }

    /// How much has.
    #[inline]
    pub(super) fn get(&self) -> u64 {
        // SYNC bench-arrived
        self.word.load_u64(0, Ordering::Acquire)
    }

    /// Waits until `more` on top of `sent` leaves no more than `window` under way.
    #[inline]
    pub(super) fn wait(&self, sent: u64, more: u64, window: u64) -> Result<(), Failure> {
        let mut patience = Patience::default();
        while (sent + more).saturating_sub(self.get()) > window.max(more) {
            patience.pause()?;
        }
        Ok(())
    }
}
