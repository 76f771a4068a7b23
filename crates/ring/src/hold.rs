//! Hold points of this crate; they compile to nothing without the feature `test-switches`, and under loom.

#[cfg(not(loom))]
pub(crate) use teeline_os::hold::point;

#[cfg(loom)]
pub(crate) fn point(_name: &str) {}
