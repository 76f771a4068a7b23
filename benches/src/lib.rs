//! Benchmarks of teeline beside its peers and beside the bare system calls; see `benches/`.
#![forbid(unsafe_code)]
