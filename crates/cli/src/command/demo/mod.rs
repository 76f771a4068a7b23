//! `teeline demo`.
pub(crate) mod inputs;
