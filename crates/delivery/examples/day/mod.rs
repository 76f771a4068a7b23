//! A small trading day for the examples: a log with fills in it, in four partitions.
#![allow(dead_code, reason = "each example uses a part of it")]

use std::{error::Error, path::Path};

use rust_decimal::Decimal;
use teeline_core::{Epoch, Name, Sequence};
use teeline_delivery::positions::{FILL, Fill, Side};
use teeline_log::{Log, LogOptions, NewRecord, Succession, Topic, TopicConfig, Writer};

/// What an example ends with when it cannot go on.
pub(crate) type Outcome = Result<(), Box<dyn Error>>;

/// A log, and a gateway that publishes fills to it.
pub(crate) struct Day {
    pub(crate) log: Log,
    pub(crate) topic: Topic,
    writer: Writer,
    published: u64,
}

/// A name that is known to be one.
pub(crate) fn name(text: &str) -> Name {
    text.parse().expect("the names of the examples are names")
}

impl Day {
    /// Makes the log in `dir`.
    pub(crate) fn begin(dir: &Path) -> Result<Self, Box<dyn Error>> {
        // For trying things out, wherever that is; a real log wants a local disk, and says so.
        let options = LogOptions {
            any_filesystem: true,
            ..LogOptions::default()
        };
        let log = Log::create(dir.join("log"), &options)?;
        let config = TopicConfig {
            partitions: 4,
            segment_bytes: 1 << 20,
            ..TopicConfig::default()
        };
        let topic = log.create_topic(&name("fills"), &config)?;
        let writer = log.writer(&"gw1.fills".parse()?, Epoch(1), Succession::AfterDrain)?;
        Ok(Self {
            log,
            topic,
            writer,
            published: 0,
        })
    }

    /// Publishes the next `count` fills, each to the partition of its account.
    pub(crate) fn publish(&mut self, count: u64) -> Outcome {
        for _ in 0..count {
            self.published += 1;
            let fill = fill(self.published);
            let mut value = Vec::new();
            fill.encode(&mut value)?;
            let key = Some(fill.account.as_bytes());
            let record = NewRecord::data(Sequence(self.published), FILL, key, &value);
            let partition = teeline_log::partition_for_key(
                fill.account.as_bytes(),
                self.topic.config().partitions,
            );
            self.writer.append(&self.topic, partition, &[record])?;
        }
        Ok(())
    }
}

/// The fill with that number, the same every day.
pub(crate) fn fill(number: u64) -> Fill {
    let symbols = ["AAPL", "MSFT", "NVDA", "TSLA", "SPACE"];
    let index = usize::try_from(number * 7 % 5).expect("below five");
    Fill {
        exec_id: number,
        account: format!("acct-{}", number * 11 % 6),
        symbol: symbols[index].to_owned(),
        side: if number.is_multiple_of(3) {
            Side::Sell
        } else {
            Side::Buy
        },
        price: Decimal::new(10_000 + i64::try_from(number * 37 % 9_000).unwrap_or(0), 2),
        quantity: Decimal::from(100 + number * 13 % 900),
        event_time_ns: 1_764_000_000_000_000_000 + number,
    }
}
