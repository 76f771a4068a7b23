//! A descriptor that is readable from when it is raised until it is lowered, for whoever waits with epoll.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::{
    event::{EventfdFlags, eventfd},
    io::{Errno, read, retry_on_intr, write},
};

use crate::{Context, Result};

/// An `eventfd` of this process. Closed when dropped, and on `exec`.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A lowered one.
    ///
    /// # Errors
    /// When the process has too many descriptors.
    pub fn new() -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fd = eventfd(0, flags).context("make an eventfd for", "epoll")?;
        Ok(Self(fd))
    }

    /// Makes the descriptor readable. Whoever waits for an edge gets one.
    ///
    /// # Panics
    /// Never: a counter that is at its end is readable anyway.
    pub fn raise(&self) {
        let written = retry_on_intr(|| write(&self.0, &1_u64.to_ne_bytes()));
        assert!(
            matches!(written, Ok(8) | Err(Errno::AGAIN)),
            "an eventfd takes 8 bytes: {written:?}"
        );
    }

    /// Makes it readable no longer.
    ///
    /// # Panics
    /// Never: that it is not readable is no error.
    pub fn lower(&self) {
        let found = retry_on_intr(|| read(&self.0, &mut [0_u8; 8]));
        assert!(
            matches!(found, Ok(8) | Err(Errno::AGAIN)),
            "an eventfd gives 8 bytes: {found:?}"
        );
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(event: &EventFd) -> bool {
        let mut fds = [PollFd::new(event, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    }

    #[test]
    fn it_is_readable_from_raise_to_lower_however_often_each_is_called() {
        let event = EventFd::new().unwrap();
        event.lower();
        assert!(!is_readable(&event));
        event.raise();
        event.raise();
        assert!(is_readable(&event));
        event.lower();
        assert!(!is_readable(&event));
    }
}
