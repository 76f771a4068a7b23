//! What several tests of the feed share.
#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod world;

/// Bytes of a golden file: two hex digits each, `#` begins a comment, an empty line ends a packet.
pub(crate) fn golden(text: &str) -> Vec<Vec<u8>> {
    let packet = |text: &str| -> Vec<u8> {
        text.lines()
            .flat_map(|line| line.split('#').next().unwrap().split_whitespace())
            .map(|byte| u8::from_str_radix(byte, 16).unwrap())
            .collect()
    };
    text.split("\n\n").map(packet).collect()
}

/// The seed of a random test: `TEELINE_SEED`, or one that a failure prints.
pub(crate) fn seed() -> u64 {
    std::env::var("TEELINE_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap())
}
