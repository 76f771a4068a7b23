//! Positions by account and symbol, computed from the fills of a topic.

mod fill;

pub use fill::{FILL, FILL_BYTES_MAX, FILL_KEY_AT, Fill, FillError, LABEL_BYTES_MAX, Side};
