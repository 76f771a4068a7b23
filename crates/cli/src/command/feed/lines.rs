//! Multicast lines on the command line.

use std::{net::SocketAddr, str::FromStr};

use clap::Args;
use teeline_feed::driver::{Interface, LineOptions};

/// A group and port, and the interface to use: `239.1.1.1:4000@eth1`, `[ff15::1]:4000@eth1`, `239.1.1.1:4000@10.1.0.0/16`.
#[derive(Debug, Clone)]
pub(super) struct LineArg {
    group: SocketAddr,
    interface: Interface,
}

impl FromStr for LineArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (group, interface) = text
            .split_once('@')
            .filter(|(_, interface)| !interface.is_empty())
            .ok_or("name the interface behind an @: 239.1.1.1:4000@eth1")?;
        Ok(Self {
            group: group.parse().map_err(|_| {
                format!(
                    "`{group}` is not a group and port such as 239.1.1.1:4000 or [ff15::1]:4000"
                )
            })?,
            interface: interface
                .parse()
                .map_err(|error: teeline_feed::NotAPrefix| error.to_string())?,
        })
    }
}

/// The lines of a feed, and how their sockets are set up.
#[derive(Debug, Args)]
pub(super) struct LinesArgs {
    /// A line: group, port and interface (by name, address or prefix). Give two for lines A and B.
    #[arg(long = "line", value_name = "GROUP:PORT@INTERFACE", required = true)]
    lines: Vec<LineArg>,
    /// Socket buffer to ask for, in bytes.
    #[arg(long, value_name = "BYTES")]
    buffer: Option<usize>,
    /// Refuse to start if the kernel gives a smaller buffer.
    #[arg(long, requires = "buffer")]
    strict: bool,
}

impl LinesArgs {
    /// The lines as the sockets take them.
    pub(super) fn options(&self) -> Vec<LineOptions> {
        let options = |line: &LineArg| LineOptions {
            buffer_bytes: self.buffer,
            strict: self.strict,
            ..LineOptions::new(line.group, line.interface.clone())
        };
        self.lines.iter().map(options).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    pub(super) fn is_ipv6(&self) -> bool {
        self.lines.iter().any(|line| line.group.is_ipv6())
    }
}
