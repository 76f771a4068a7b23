//! Bare sockets: what the system charges for the same packets.

use std::{io, net::UdpSocket, ops::Range};

use rustix::net::{MMsgHdr, SendAncillaryBuffer, SendFlags, sendmmsg};
use serde::{Deserialize, Serialize};
use teeline_feed::{Publisher, Run};
use teeline_latency::raw::Patience;
use teeline_os::datagram::{Inbox, send_segments, set_coalescing};

use super::{broken, lines::Arrived};
use crate::output::Failure;

/// How packets are sent, and received.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Bare {
    /// One packet per call.
    SendTo,
    /// Many per call on the sending side.
    SendMmsg,
    /// Many in one send, which the system cuts.
    Segments,
    /// As well, and joined again on the receiving side.
    Coalesced,
}

impl Bare {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::SendTo => "bare send + recv",
            Self::SendMmsg => "bare sendmmsg + recv",
            Self::Segments => "bare segmentation offload + recv",
            Self::Coalesced => "bare segmentation offload + receive coalescing",
        }
    }
}

/// Packets made beforehand, as a publisher sends them.
#[derive(Debug, Default)]
pub(super) struct Packets {
    bytes: Vec<u8>,
    runs: Vec<(Range<usize>, usize)>,
}

impl Packets {
    /// Adds those in which `publisher` sends what it was given.
    pub(super) fn take(&mut self, publisher: &mut Publisher) {
        while publisher.waiting() > 0
            && let Some(run) = publisher.transmit_run(0, Run::PACKETS_MAX)
        {
            let begin = self.bytes.len();
            self.bytes.extend_from_slice(run.bytes());
            self.runs
                .push((begin..self.bytes.len(), run.packet_bytes()));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn count(&self) -> u64 {
        self.runs().map(|run| run.count() as u64).sum()
    }

    fn runs(&self) -> impl Iterator<Item = Run<'_>> + Clone {
        let run =
            |(place, each): &(Range<usize>, usize)| Run::new(&self.bytes[place.clone()], *each);
        self.runs.iter().map(run)
    }

    fn packets(&self) -> impl Iterator<Item = &[u8]> {
        self.runs().flat_map(|run| run.packets())
    }

    /// Sends all of them `times` times, with no more than `window` bytes under way.
    pub(super) fn send(
        &self,
        how: Bare,
        socket: &UdpSocket,
        arrived: &Arrived,
        window: u64,
        times: u64,
    ) -> Result<(), Failure> {
        let mut sent = 0;
        let mut room_for = |bytes: usize| {
            arrived.wait(sent, bytes as u64, window)?;
            sent += bytes as u64;
            Ok::<_, Failure>(())
        };
        let packets: Vec<&[u8]> = self.packets().collect();
        for _ in 0..times {
            match how {
                Bare::SendTo => {
                    for packet in &packets {
                        room_for(packet.len())?;
                        socket.send(packet).map_err(broken)?;
                    }
                }
                Bare::SendMmsg => {
                    for packets in packets.chunks(Run::PACKETS_MAX) {
                        room_for(packets.iter().map(|packet| packet.len()).sum())?;
                        send_many(socket, packets).map_err(broken)?;
                    }
                }
                Bare::Segments | Bare::Coalesced => {
                    for run in self.runs() {
                        room_for(run.bytes().len())?;
                        match u16::try_from(run.packet_bytes()) {
                            Ok(each) if run.count() > 1 => send_segments(socket, run.bytes(), each),
                            _ => socket.send(run.bytes()).map(drop),
                        }
                        .map_err(broken)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Sends packets with one call.
fn send_many(socket: &UdpSocket, packets: &[&[u8]]) -> io::Result<()> {
    let places: Vec<[io::IoSlice<'_>; 1]> = packets
        .iter()
        .map(|packet| [io::IoSlice::new(packet)])
        .collect();
    let mut controls: Vec<SendAncillaryBuffer<'_, '_, '_>> = packets
        .iter()
        .map(|_| SendAncillaryBuffer::default())
        .collect();
    let mut headers: Vec<MMsgHdr<'_>> = places
        .iter()
        .zip(&mut controls)
        .map(|(place, control)| MMsgHdr::new(place, control))
        .collect();
    let mut left = headers.as_mut_slice();
    while !left.is_empty() {
        let sent = sendmmsg(socket, left, SendFlags::empty())?;
        left = &mut left[sent..];
    }
    Ok(())
}

/// Receives, and does nothing with it.
#[derive(Debug)]
pub(super) struct Sink<'a> {
    how: Bare,
    socket: &'a UdpSocket,
    inbox: Inbox,
    buffer: Vec<u8>,
    arrived: u64,
}

impl<'a> Sink<'a> {
    pub(super) fn new(how: Bare, socket: &'a UdpSocket) -> Result<Self, Failure> {
        set_coalescing(socket, how == Bare::Coalesced).map_err(broken)?;
        Ok(Self {
            how,
            socket,
            inbox: Inbox::default(),
            buffer: vec![0; 1 << 16],
            arrived: 0,
        })
    }

    /// Until `bytes` have arrived altogether.
    pub(super) fn receive(&mut self, bytes: u64, arrived: &Arrived) -> Result<(), Failure> {
        let mut patience = Patience::default();
        while self.arrived < bytes {
            let received = match self.how {
                Bare::Coalesced => self
                    .inbox
                    .receive(self.socket)
                    .map(|received| received.bytes.len()),
                _ => self.socket.recv(&mut self.buffer),
            };
            match received {
                Ok(bytes) => {
                    self.arrived += bytes as u64;
                    arrived.say(self.arrived);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    patience.pause()?;
                }
                Err(error) => return Err(broken(error)),
            }
        }
        Ok(())
    }
}
