//! A record outside of the log, and what travels in the headers of a dead letter.

use teeline_core::{Epoch, Identity, Name, Offset, Partition, Sequence, SourceId};
use teeline_log::{Header, Headers, NewRecord, Record};

use super::LetterId;
use crate::consumer::Place;

/// Names of the headers that teeline gives a dead letter, and a message that is redriven.
pub(crate) mod header {
    /// What all of them begin with.
    pub(crate) const PREFIX: &str = "teeline.";
    pub(crate) const TOPIC: &str = "teeline.origin.topic";
    pub(crate) const PARTITION: &str = "teeline.origin.partition";
    pub(crate) const OFFSET: &str = "teeline.origin.offset";
    pub(crate) const SOURCE: &str = "teeline.origin.source";
    pub(crate) const EPOCH: &str = "teeline.origin.epoch";
    pub(crate) const SEQUENCE: &str = "teeline.origin.sequence";
    pub(crate) const ATTEMPTS: &str = "teeline.attempts";
    pub(crate) const ERROR: &str = "teeline.error";
    pub(crate) const FAILED_NS: &str = "teeline.failed-ns";
    /// Number of the dead letter that a record of the retry topic is about.
    pub(crate) const DEAD_LETTER: &str = "teeline.dead-letter";
    /// Which of the group's databases gave that number.
    pub(crate) const LETTER_EPOCH: &str = "teeline.dead-letter-epoch";
    /// What is to become of it: [`REDRIVE`] or [`DROP`].
    pub(crate) const ORDER: &str = "teeline.order";
    pub(crate) const REDRIVE: &[u8] = b"redrive";
    pub(crate) const DROP: &[u8] = b"drop";
}

/// Where a message stood first, whatever round it has been sent since, and who published it there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// Topic, partition and offset.
    pub place: Place,
    /// Its identity; `None` for a record without one.
    pub identity: Option<Identity>,
}

/// What somebody decided about a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Redrive,
    Drop,
}

/// The parts of a record that its handler sees, without the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copied {
    pub(crate) append_time_ns: u64,
    pub(crate) identity: Option<Identity>,
    pub(crate) kind: u16,
    pub(crate) schema_id: u32,
    pub(crate) schema_version: u16,
    pub(crate) headers: Vec<u8>,
    pub(crate) key: Option<Vec<u8>>,
    /// `None` for a tombstone.
    pub(crate) value: Option<Vec<u8>>,
}

impl Copied {
    pub(crate) fn of(record: &Record<'_>) -> Self {
        Self {
            append_time_ns: record.append_time_ns,
            identity: record.identity,
            kind: record.kind,
            schema_id: record.schema_id,
            schema_version: record.schema_version,
            headers: record.headers.as_bytes().to_vec(),
            key: record.key.map(<[u8]>::to_vec),
            value: (!record.tombstone).then(|| record.value.to_vec()),
        }
    }

    /// The headers; none where the bytes are no headers, which only a database that was edited holds.
    pub(crate) fn headers(&self) -> Headers<'_> {
        Headers::from_bytes(&self.headers).unwrap_or_default()
    }

    /// The record as its handler sees it, at the offset where it is read. A message that was redriven has the identity
    /// that it was first published under.
    pub(crate) fn record(&self, offset: Offset) -> Record<'_> {
        let identity = match number(self.headers(), header::DEAD_LETTER) {
            Some(_) => origin_identity(self.headers()),
            None => self.identity,
        };
        Record {
            offset,
            append_time_ns: self.append_time_ns,
            identity,
            kind: self.kind,
            schema_id: self.schema_id,
            schema_version: self.schema_version,
            control: None,
            headers: self.headers(),
            key: self.key.as_deref(),
            value: self.value.as_deref().unwrap_or_default(),
            tombstone: self.value.is_none(),
        }
    }

    /// Where it stood first. `place` is where it stands now.
    pub(crate) fn origin(&self, place: &Place) -> Origin {
        origin(self.headers()).unwrap_or_else(|| Origin {
            place: place.clone(),
            identity: self.identity,
        })
    }

    /// The record that stores it again, under `headers` and those that the application gave it.
    pub(crate) fn new_record<'a>(
        &'a self,
        sequence: Sequence,
        headers: &'a [Header<'a>],
    ) -> NewRecord<'a> {
        let value = self.value.as_deref().unwrap_or_default();
        NewRecord {
            schema_id: self.schema_id,
            schema_version: self.schema_version,
            headers,
            tombstone: self.value.is_none(),
            ..NewRecord::data(sequence, self.kind, self.key.as_deref(), value)
        }
    }

    /// The headers that the application gave it.
    pub(crate) fn own_headers(&self) -> impl Iterator<Item = Header<'_>> {
        own(self.headers())
    }
}

/// The headers that are not teeline's.
fn own(headers: Headers<'_>) -> impl Iterator<Item = Header<'_>> {
    headers.filter(|header| !header.name.starts_with(header::PREFIX))
}

/// The last header of that name.
pub(crate) fn value<'a>(headers: Headers<'a>, name: &str) -> Option<&'a [u8]> {
    headers
        .filter(|header| header.name == name)
        .last()
        .map(|header| header.value)
}

pub(crate) fn text(headers: Headers<'_>, name: &str) -> Option<String> {
    Some(String::from_utf8_lossy(value(headers, name)?).into_owned())
}

pub(crate) fn number(headers: Headers<'_>, name: &str) -> Option<u64> {
    str::from_utf8(value(headers, name)?).ok()?.parse().ok()
}

/// What a record of the retry topic orders, and about which dead letter.
pub(crate) fn order_of(headers: Headers<'_>) -> Option<(LetterId, Order)> {
    let order = match value(headers, header::ORDER)? {
        header::REDRIVE => Order::Redrive,
        header::DROP => Order::Drop,
        _ => return None,
    };
    let letter = LetterId {
        epoch: Epoch(number(headers, header::LETTER_EPOCH)?),
        number: number(headers, header::DEAD_LETTER)?,
    };
    Some((letter, order))
}

pub(crate) fn origin(headers: Headers<'_>) -> Option<Origin> {
    let topic: Name = text(headers, header::TOPIC)?.parse().ok()?;
    let partition = u32::try_from(number(headers, header::PARTITION)?).ok()?;
    Some(Origin {
        place: Place {
            topic,
            partition: Partition(partition),
            offset: Offset(number(headers, header::OFFSET)?),
        },
        identity: origin_identity(headers),
    })
}

fn origin_identity(headers: Headers<'_>) -> Option<Identity> {
    let source = u64::from_str_radix(&text(headers, header::SOURCE)?, 16).ok()?;
    Some(Identity {
        source: SourceId(source),
        epoch: Epoch(number(headers, header::EPOCH)?),
        sequence: Sequence(number(headers, header::SEQUENCE)?),
    })
}

/// The headers that say where a message stood first, as names and texts.
pub(crate) fn origin_headers(origin: &Origin) -> Vec<(&'static str, String)> {
    let place = &origin.place;
    let mut headers = vec![
        (header::TOPIC, place.topic.to_string()),
        (header::PARTITION, place.partition.to_string()),
        (header::OFFSET, place.offset.to_string()),
    ];
    if let Some(identity) = origin.identity {
        headers.extend([
            (header::SOURCE, identity.source.to_string()),
            (header::EPOCH, identity.epoch.to_string()),
            (header::SEQUENCE, identity.sequence.to_string()),
        ]);
    }
    headers
}
