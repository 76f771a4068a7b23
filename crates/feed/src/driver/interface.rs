//! Which interface of the host is meant.

use std::{
    fmt, fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    str::FromStr,
};

use super::DriverError;
use crate::Prefix;

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

/// How an interface is told to the kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub(super) index: u32,
    /// Its address, for groups of IPv4.
    pub(super) address: Ipv4Addr,
}

/// Finds the interface that is meant.
pub(super) fn resolve(wanted: &Interface, group: SocketAddr) -> Result<Found, DriverError> {
    let all =
        if_addrs::get_if_addrs().map_err(DriverError::system("list the interfaces", group))?;
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
        let address = Ipv4Addr::UNSPECIFIED;
        return Ok(Found { index, address });
    }
    // The address that was named, or the interface's first.
    let same = all.iter().filter(|interface| interface.name == name);
    std::iter::once(found)
        .chain(same)
        .find_map(|interface| match interface.ip() {
            IpAddr::V4(address) => Some(Found { index, address }),
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
