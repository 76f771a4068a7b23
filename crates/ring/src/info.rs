//! What was fixed when a ring was created, for whoever is attached to it.

use std::sync::Arc;

use teeline_core::{Epoch, Name, SourceId, SourceName};

use crate::{cursor::Alignment, layout::Descriptor};

/// What was fixed when a ring was created: the same for its producer, its consumers and its observers, who all lend it.
/// Cheap to clone, and good for as long as somebody keeps it, attached or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingInfo(Arc<Descriptor>);

impl RingInfo {
    pub(crate) fn new(descriptor: &Descriptor) -> Self {
        Self(Arc::new(descriptor.clone()))
    }

    /// The name of the ring's source.
    #[must_use]
    pub fn source(&self) -> &SourceName {
        &self.0.source
    }

    /// The id of the ring's source.
    #[must_use]
    pub fn source_id(&self) -> SourceId {
        self.0.source.id()
    }

    /// Which life of the source this ring is.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.0.epoch
    }

    /// Bytes for frames.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.0.geometry.capacity()
    }

    /// What frames start on.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.0.geometry.alignment()
    }

    /// Whether every message carries the time of its commit.
    #[must_use]
    pub fn stamped(&self) -> bool {
        self.0.geometry.stamped()
    }

    /// The longest payload, in bytes, that fits this ring: a little less than half of its capacity.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        usize::try_from(self.0.geometry.payload_max()).unwrap_or(usize::MAX)
    }

    /// How many messages of `len` bytes fit into one batch; 0 when not even one does.
    #[must_use]
    pub fn max_batch(&self, len: usize) -> usize {
        let geometry = &self.0.geometry;
        if len as u64 > geometry.payload_max() {
            return 0;
        }
        let count = geometry.frame_bytes_max() / geometry.frame_bytes(len as u64);
        usize::try_from(count).unwrap_or(usize::MAX)
    }

    /// The reliable consumers that were declared when it was created.
    #[must_use]
    pub fn consumers(&self) -> &[Name] {
        &self.0.consumers
    }

    /// How many slots it has for reliable consumers that join later, taken or not.
    #[must_use]
    pub fn spares(&self) -> u32 {
        self.0.spares
    }

    /// When it was created, in nanoseconds since the Unix epoch: for people.
    #[must_use]
    pub fn created_wall_ns(&self) -> u64 {
        self.0.created_wall_ns
    }

    pub(crate) fn descriptor(&self) -> &Descriptor {
        &self.0
    }
}
