//! teeline-latency
