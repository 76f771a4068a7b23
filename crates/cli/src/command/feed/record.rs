//! `teeline feed record`: lines into a capture.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use serde::Serialize;
use teeline_core::time::Clock;
use teeline_feed::{
    Transport,
    capture::{PcapWriter, Resolution},
    driver::UdpTransport,
};
use teeline_os::SystemClock;
use teeline_sync::atomic::Ordering;

use super::{
    file,
    sockets::{ListenArgs, complain_of_sockets, nap, told},
};
use crate::{
    command::signals::{STOP, stop_on_signals},
    output::{Answer, Failure, Output},
};

/// Datagrams taken in one turn.
const DATAGRAMS_PER_TURN: usize = 256;

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    /// The capture to write, a pcap file with nanoseconds.
    capture: PathBuf,
    #[command(flatten)]
    lines: ListenArgs,
    /// Stop after so many packets.
    #[arg(long, value_name = "COUNT")]
    packets: Option<u64>,
}

#[derive(Serialize)]
struct RecordedLine {
    packets: u64,
    /// `null` where the system does not tell.
    kernel_drops: Option<u64>,
}

impl RecordArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stop = stop_on_signals(&STOP)?;
        let mut lines = self.lines.options();
        for line in &mut lines {
            // A capture is of packets with their own times, not of buffers.
            (line.timestamps, line.offload) = (true, false);
        }
        let mut transport = UdpTransport::receiver(&lines, None).map_err(Failure::new)?;
        complain_of_sockets(&transport, &lines);
        let unwritable = |error| file::unwritable(&self.capture, &error);
        let mut capture = PcapWriter::new(file::create(&self.capture)?, Resolution::Nanoseconds)
            .map_err(unwritable)?;
        // Where a socket does not tell who sent what.
        let unknown = |group: SocketAddr| SocketAddr::new(unspecified(group), group.port());
        let wanted = self.packets.unwrap_or(u64::MAX);
        let mut packets = 0;
        while packets < wanted && !stop.load(Ordering::Relaxed) {
            let limit = usize::try_from(wanted - packets).unwrap_or(usize::MAX);
            let mut written = Ok(());
            let limit = limit.min(DATAGRAMS_PER_TURN);
            let received = transport.receive_lines(limit, &mut |line, arrival| {
                let group = lines[line].group;
                let from = arrival.from.unwrap_or_else(|| unknown(group));
                let at_ns = arrival.kernel_ns.unwrap_or_else(|| SystemClock.wall_ns());
                let result = capture.write(at_ns, from, group, arrival.bytes);
                written = std::mem::replace(&mut written, Ok(())).and(result);
            });
            let received =
                received.map_err(|error| Failure::new(format_args!("cannot receive: {error}")))?;
            written.map_err(unwritable)?;
            packets += received as u64;
            if received == 0 {
                capture.flush().map_err(unwritable)?;
                nap(&mut transport, None)?;
            }
        }
        capture.flush().map_err(unwritable)?;
        let line = RecordedLine {
            packets,
            kernel_drops: transport.lines().map(|line| line.kernel_drops).sum(),
        };
        if out.is_json() {
            out.object(&line)?;
        } else {
            out.line(format_args!(
                "{} packets recorded, {} dropped by the kernel",
                line.packets,
                told(line.kernel_drops)
            ))?;
        }
        Ok(if line.kernel_drops.unwrap_or(0) == 0 {
            Answer::Fine
        } else {
            Answer::No
        })
    }
}

const fn unspecified(group: SocketAddr) -> std::net::IpAddr {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
    match group {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}
