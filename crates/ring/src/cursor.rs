//! Pure index arithmetic: where a position lies in memory, how long a frame is, what fits before the wrap.
#![deny(clippy::arithmetic_side_effects)]
#![allow(
    unreachable_pub,
    clippy::missing_errors_doc,
    reason = "public to tests alone, through `testing`"
)]

use std::num::NonZeroU64;

/// Bytes of a frame's first two words, which every frame has.
pub const HEADER_BYTES: u64 = 16;
/// Bytes of the timestamp that follows them on stamped rings, in every frame but padding.
pub const TIMESTAMP_BYTES: u64 = 8;
/// Smallest capacity in units of the alignment: three of the smallest frames, and the zero slot behind them.
const CAPACITY_SLOTS_MIN: u64 = 4;
/// Smallest capacity in bytes: gap and epoch frames fit into every ring.
const CAPACITY_BYTES_MIN: u64 = 256;
/// Largest capacity in bytes: a frame's length has 32 bits, and a frame is at most half a ring.
pub const CAPACITY_BYTES_MAX: u64 = 1 << 32;
/// No position of an honest ring comes near: 2^62 bytes are four years at 30 GB/s. Checked wherever a position is read
/// from shared memory, so that sums with a capacity cannot overflow.
pub const POSITION_MAX: u64 = 1 << 62;

/// Where frames start: on multiples of this many bytes. With 64 a message of up to 48 bytes is one cache line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Alignment {
    /// 16 bytes: the densest.
    A16,
    /// 32 bytes.
    A32,
    /// 64 bytes: a cache line.
    #[default]
    A64,
    /// 128 bytes: the pair of lines that some CPUs fetch together.
    A128,
}

impl Alignment {
    /// All of them, smallest first.
    pub const ALL: [Self; 4] = [Self::A16, Self::A32, Self::A64, Self::A128];

    /// In bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::A16 => 16,
            Self::A32 => 32,
            Self::A64 => 64,
            Self::A128 => 128,
        }
    }

    /// The smallest capacity, in bytes, of a ring with this alignment.
    #[must_use]
    pub const fn capacity_min(self) -> u64 {
        let slots = CAPACITY_SLOTS_MIN.saturating_mul(self.bytes());
        if slots > CAPACITY_BYTES_MIN {
            slots
        } else {
            CAPACITY_BYTES_MIN
        }
    }

    /// The alignment of so many bytes, if there is one.
    #[must_use]
    pub fn from_bytes(bytes: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|a| a.bytes() == bytes)
    }
}

/// The shape of a ring's data: what turns positions into places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the data, a power of two.
    capacity: NonZeroU64,
    alignment: Alignment,
    stamped: bool,
    // What follows from these, so that the hot path loads it.
    slot: u64,
    header: u64,
    payload_max: u64,
}

/// Why there is no ring of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a capacity of {capacity} bytes is not a power of two between {} and {CAPACITY_BYTES_MAX}",
    alignment.capacity_min()
)]
pub struct ShapeError {
    capacity: u64,
    alignment: Alignment,
}

/// Where a frame would lie, as positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// First byte of the frame: the position asked for, or the start of the next lap if it does not fit before that.
    pub start: u64,
    /// First byte behind it, on the alignment.
    pub end: u64,
}

impl Geometry {
    /// The shape of a ring of `capacity` bytes.
    pub fn new(capacity: u64, alignment: Alignment, stamped: bool) -> Result<Self, ShapeError> {
        match NonZeroU64::new(capacity) {
            Some(bytes)
                if bytes.is_power_of_two()
                    && (alignment.capacity_min()..=CAPACITY_BYTES_MAX).contains(&capacity) =>
            {
                let slot = alignment.bytes();
                let header = if stamped {
                    HEADER_BYTES.saturating_add(TIMESTAMP_BYTES)
                } else {
                    HEADER_BYTES
                };
                let frame_max = (capacity.saturating_sub(slot) >> 1) & slot.wrapping_neg();
                Ok(Self {
                    capacity: bytes,
                    alignment,
                    stamped,
                    slot,
                    header,
                    payload_max: frame_max.saturating_sub(header),
                })
            }
            _ => Err(ShapeError {
                capacity,
                alignment,
            }),
        }
    }

    /// Bytes of the data.
    #[inline]
    pub const fn capacity(&self) -> u64 {
        self.capacity.get()
    }

    /// What frames start on.
    pub const fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Whether frames carry a timestamp.
    #[inline]
    pub const fn stamped(&self) -> bool {
        self.stamped
    }

    /// Bytes of the smallest frame: the alignment.
    #[inline]
    pub const fn slot(&self) -> u64 {
        self.slot
    }

    /// Bytes in front of a payload.
    #[inline]
    pub const fn header(&self) -> u64 {
        self.header
    }

    /// The longest frame, on the alignment, and the longest batch.
    pub const fn frame_bytes_max(&self) -> u64 {
        self.payload_max.saturating_add(self.header)
    }

    /// The longest payload. With it a frame, on the alignment, is half of what a capacity holds beside the zero slot.
    ///
    /// So padding to the wrap, the frame and the zero slot behind it fit together into an empty ring, wherever they start;
    /// and two frames with their zero slot end within a capacity of where the first starts, which is what a mark allows.
    #[inline]
    pub const fn payload_max(&self) -> u64 {
        self.payload_max
    }

    /// Place of a position in memory.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "less than the capacity, which was mapped"
    )]
    pub const fn index(&self, position: u64) -> usize {
        (position & self.capacity().wrapping_sub(1)) as usize
    }

    /// Bytes from a position to the end of its lap; never zero.
    #[inline]
    pub const fn until_wrap(&self, position: u64) -> u64 {
        self.capacity()
            .wrapping_sub(position & self.capacity().wrapping_sub(1))
    }

    /// Whether a frame may start there.
    #[inline]
    pub const fn is_aligned(&self, position: u64) -> bool {
        position & self.slot().wrapping_sub(1) == 0
    }

    /// Whether nothing from `position` on was written over while nothing at or beyond `announced` was written to, which
    /// lies behind it. So exactly a capacity between them is not too much.
    #[inline]
    pub const fn is_whole(&self, position: u64, announced: u64) -> bool {
        announced.wrapping_sub(position) <= self.capacity()
    }

    /// Bytes that a frame with a payload of `len` takes, on the alignment. Of a payload that fits: nothing wraps then.
    #[inline]
    pub const fn frame_bytes(&self, len: u64) -> u64 {
        let slot = self.slot();
        self.header
            .wrapping_add(len)
            .wrapping_add(slot.wrapping_sub(1))
            & slot.wrapping_neg()
    }

    /// Where frames of so many bytes lie when the one before them ends at `position`: contiguous, so at the start of the
    /// next lap if they do not fit before.
    pub const fn place(&self, position: u64, bytes: u64) -> Place {
        let until_wrap = self.until_wrap(position);
        let start = if bytes > until_wrap {
            position.wrapping_add(until_wrap)
        } else {
            position
        };
        Place {
            start,
            end: start.wrapping_add(bytes),
        }
    }

    /// The one or two stretches of memory between two positions at most a capacity apart, as (index, bytes).
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "at most the capacity, which was mapped"
    )]
    pub fn stretches(&self, from: u64, to: u64) -> [(usize, usize); 2] {
        let bytes = to.saturating_sub(from).min(self.capacity());
        let first = bytes.min(self.until_wrap(from));
        [
            (self.index(from), first as usize),
            (0, bytes.saturating_sub(first) as usize),
        ]
    }
}

#[cfg(test)]
mod tests {
    #![expect(
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        reason = "checked in debug builds, where tests run, in rings of a few hundred bytes"
    )]

    use super::*;

    fn shapes() -> impl Iterator<Item = Geometry> {
        Alignment::ALL.into_iter().flat_map(|alignment| {
            [1, 2, 4].into_iter().flat_map(move |times| {
                [false, true].map(|stamped| {
                    Geometry::new(times * alignment.capacity_min(), alignment, stamped).unwrap()
                })
            })
        })
    }

    #[test]
    fn every_frame_from_every_start_fits_into_an_empty_ring_with_its_zero_slot() {
        for g in shapes() {
            assert!(g.payload_max() >= 32, "an epoch frame fits: {g:?}");
            for lap in [0, 7 * g.capacity()] {
                for start in (lap..lap + g.capacity()).step_by(g.slot() as usize) {
                    for len in 0..=g.payload_max() {
                        let place = g.place(start, g.frame_bytes(len));
                        assert!(place.start >= start && g.is_aligned(place.end));
                        assert!(place.end - place.start >= g.header() + len);
                        assert!(place.end - place.start < g.header() + len + g.slot());
                        assert!(
                            place.end + g.slot() <= start + g.capacity(),
                            "{g:?} {start} {len}"
                        );
                        assert!(
                            g.index(place.start) as u64 + place.end - place.start <= g.capacity()
                        );
                        assert!(place.start == start || g.index(place.start) == 0);
                    }
                }
            }
        }
    }

    #[test]
    fn stretches_cover_exactly_the_bytes_between_two_positions() {
        let g = Geometry::new(256, Alignment::A16, false).unwrap();
        for from in 512..768 {
            for to in from..=from + 256 {
                let mut covered = [0_u32; 256];
                for (index, len) in g.stretches(from, to) {
                    covered[index..index + len].iter_mut().for_each(|c| *c += 1);
                }
                for position in from..from + 256 {
                    assert_eq!(covered[g.index(position)], u32::from(position < to));
                }
            }
        }
    }

    #[test]
    fn capacities_too_small_too_large_or_no_power_of_two_are_refused() {
        for alignment in Alignment::ALL {
            let min = alignment.capacity_min();
            for bad in [
                0,
                1,
                min / 2,
                min + alignment.bytes(),
                3 * min,
                CAPACITY_BYTES_MAX * 2,
            ] {
                assert!(Geometry::new(bad, alignment, true).is_err(), "{bad}");
            }
            for good in [min, CAPACITY_BYTES_MAX] {
                assert!(Geometry::new(good, alignment, true).is_ok(), "{good}");
            }
        }
    }
}
