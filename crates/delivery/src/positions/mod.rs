//! Positions by account and symbol, computed from the fills of a topic.

mod fill;
mod position;
mod reconcile;
mod service;
mod tables;

pub use crate::consumer::Place;
pub use fill::{FILL, FILL_BYTES_MAX, FILL_KEY_AT, Fill, FillError, LABEL_BYTES_MAX, Side};
pub use position::{AccountPosition, Inexact};
pub use reconcile::{Cause, Difference, Explanation, reconcile};
pub use service::{Positions, PositionsError, Refused};
pub use tables::{Hole, Missing, POSITIONS_TABLE, Snapshot, add_fill, all_positions};
