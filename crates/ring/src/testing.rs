//! The two halves of the protocol, over memory of the caller's choosing: for model checkers and fault injection. Not
//! part of what this crate promises.

pub use crate::{
    cursor::{Geometry, Place},
    frame::{Kind, Located, locate, word0},
    membership::{Joining, Wish, account, evict, member, standing, take_slot},
    memory::Memory,
    ownership::{End, Mark, Marks, walk},
    reader::Reader,
    viewer::Viewer,
    wait::{Bell, Lying, Spot},
    writer::{Batch, ConsumerView, Reservation, Writer},
};

/// Offsets and codecs.
pub mod layout {
    pub use crate::layout::*;
}
