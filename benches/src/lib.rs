//! Benchmarks of teeline, each beside the bare limit or the peers, in regimes that have a name.
//!
//! ```sh
//! cargo bench -p teeline-benches              # figures
//! cargo bench -p teeline-benches -- --test    # each once, with what it asserts; this is what `.ci/run` does
//! ```
//!
//! Every benchmark first asserts that what arrived is what was sent. Figures hold for the machine and the moment; ratios
//! in one run travel better. None of them says anything about tails: criterion measures means of loops. Latencies
//! between processes are measured by `teeline bench`.
#![forbid(unsafe_code)]
