//! `teeline feed`: market data over multicast, and captures of it.

mod check;
mod event;
pub(crate) mod file;
mod live;
mod pace;
mod publish;
mod receive;
mod record;
mod relay;
mod serve;
mod sockets;

use std::path::PathBuf;

use clap::Subcommand;

use crate::output::{Answer, Failure, Output};

/// The verbs of `teeline feed`.
#[derive(Debug, Subcommand)]
pub(crate) enum FeedVerb {
    /// Tell which sessions a capture holds, their numbers, gaps and counts. Exit status 1 if something is missing or is
    /// not MoldUDP64.
    Check {
        /// The capture, a pcap file; may be gzipped.
        capture: PathBuf,
    },
    /// Publish the messages of an ITCH file and end the session.
    Publish(publish::PublishArgs),
    /// Send the packets of a capture as they are, sessions and numbers included.
    Replay(publish::ReplayArgs),
    /// Receive a feed in order, ask for what is missing, and report what is lost. Ends with the session.
    Receive(receive::ReceiveArgs),
    /// Record what comes in on lines into a capture, until SIGTERM or SIGINT.
    Record(record::RecordArgs),
    /// Receive a feed once and publish it into a ring, for all processes of this host.
    Relay(relay::RelayArgs),
    /// Record a feed of teeline's publishers into a topic of a log, in order, until SIGTERM or SIGINT.
    Store(serve::StoreArgs),
    /// Answer re-requests of any age from a topic that `store` recorded.
    Serve(serve::ServeArgs),
}

impl FeedVerb {
    /// Does what the verb says.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let answer = match self {
            Self::Check { capture } => check::run(&capture, out),
            Self::Publish(publish) => publish.run(out),
            Self::Replay(replay) => replay.run(out),
            Self::Receive(receive) => receive.run(out),
            Self::Record(record) => record.run(out),
            Self::Relay(relay) => relay.run(out),
            Self::Store(store) => store.run(out),
            Self::Serve(serve) => serve.run(out),
        }?;
        // A last line that did not arrive, as on a full disk, is a failure.
        out.flush()?;
        Ok(answer)
    }
}
