//! A line on a terminal that tells how a feed is doing.

use std::fmt::Write as _;

use indicatif::{ProgressBar, ProgressStyle};
use teeline_feed::Receiver;

use crate::output::Failure;

/// How often the line changes.
const INTERVAL_NS: u64 = 250_000_000;

/// The line. Nothing of it is seen where standard error is no terminal, or programs read the output.
pub(super) struct LiveLine {
    bar: ProgressBar,
    shown_ns: u64,
    delivered: u64,
}

impl LiveLine {
    pub(super) fn new(json: bool) -> Result<Self, Failure> {
        let bar = if json {
            ProgressBar::hidden()
        } else {
            let style = ProgressStyle::with_template("{msg}").map_err(Failure::new)?;
            ProgressBar::new_spinner().with_style(style)
        };
        Ok(Self {
            bar,
            shown_ns: 0,
            delivered: 0,
        })
    }

    /// Shows how far `receiver` is, if it is time.
    pub(super) fn update(&mut self, now_ns: u64, receiver: &Receiver) {
        let since_ns = now_ns.saturating_sub(self.shown_ns);
        if since_ns < INTERVAL_NS || self.bar.is_hidden() {
            return;
        }
        let stats = receiver.stats();
        let rate = u128::from(stats.delivered - self.delivered) * 1_000_000_000;
        (self.shown_ns, self.delivered) = (now_ns, stats.delivered);
        self.bar
            .set_message(text(rate / u128::from(since_ns), receiver));
    }

    /// Prints something else meanwhile.
    pub(super) fn suspend<R>(&self, print: impl FnOnce() -> R) -> R {
        self.bar.suspend(print)
    }
}

impl Drop for LiveLine {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn text(messages_per_s: u128, receiver: &Receiver) -> String {
    let stats = receiver.stats();
    let mut text = format!(
        "{messages_per_s} messages/s, {} delivered, {} open gaps, {} lost, first on",
        stats.delivered,
        receiver.open_gaps(),
        stats.lost
    );
    let all: u64 = receiver.lines().map(|line| line.first_copies).sum();
    for (at, line) in receiver.lines().enumerate() {
        let share = line.first_copies * 100 / all.max(1);
        // Writing to a String cannot fail.
        let _infallible = write!(text, " line {at}: {share} %");
    }
    text
}

#[cfg(test)]
mod tests {
    use teeline_core::Sequence;
    use teeline_feed::{Publisher, PublisherOptions, Receiver, ReceiverOptions};

    use super::text;

    #[test]
    fn the_line_tells_rate_gaps_and_shares() {
        let session = "000010059B".parse().unwrap();
        let mut publisher = Publisher::new(session, Sequence(1), PublisherOptions::default());
        let mut receiver = Receiver::new(ReceiverOptions::default());
        for number in 0..4 {
            publisher.publish(b"x").unwrap();
            let packet = publisher.transmit(number).unwrap();
            receiver.packet(number, usize::from(number == 3), packet, &mut |_| ());
        }
        assert_eq!(
            text(7, &receiver),
            "7 messages/s, 4 delivered, 0 open gaps, 0 lost, first on line 0: 75 % line 1: 25 %"
        );
    }
}
