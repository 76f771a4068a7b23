//! Benchmarks of teeline, each beside the bare limit or the peers, in regimes that have a name.
//!
//! ```sh
//! cargo bench -p teeline-benches              # figures
//! cargo bench -p teeline-benches -- --test    # each once, with what it asserts; this is what `.ci/run` does
//! ```
//!
//! Every benchmark first asserts that what arrived is what was sent. Figures hold for the machine and the moment; ratios
//! in one run travel better. None of them says anything about tails: criterion measures means of loops. Latencies
//! between processes are measured by `teeline demo`.
#![forbid(unsafe_code)]

pub mod channel;

/// Payload of a small message: with the ring's header it fills one cache line.
pub const PAYLOAD_BYTES: usize = 48;

/// A small message.
pub type Message = [u8; PAYLOAD_BYTES];

/// The message numbered `number`: its number in every word.
#[must_use]
pub fn message(number: u64) -> Message {
    let mut message = [0; PAYLOAD_BYTES];
    for word in message.chunks_exact_mut(size_of::<u64>()) {
        word.copy_from_slice(&number.to_le_bytes());
    }
    message
}
