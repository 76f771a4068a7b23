//! teeline-bridge
