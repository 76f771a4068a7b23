//! Keeps CPUs from sleeping while the device works. On the way back a sleeping CPU costs 20 to 40 µs, of about 150 in all; a log
//! that hands each batch to a thread of its own, or leaves one at work, is spared that, whatever it does else. Hosts on which
//! such figures matter do not let their CPUs sleep.

use std::{
    fs::File,
    io::{self, Write},
};

/// The kernel's file for how long a CPU may take to wake up, in microseconds: a word, which holds as long as the file is open.
const LATENCY: &str = "/dev/cpu_dma_latency";

/// No CPU sleeps while this is kept; `None` where the kernel does not offer that, or not to everybody.
pub(crate) fn keep() -> Option<File> {
    let kept = || -> io::Result<File> {
        let mut file = File::options().write(true).open(LATENCY)?;
        file.write_all(&0_i32.to_ne_bytes())?;
        Ok(file)
    };
    match kept() {
        Ok(file) => Some(file),
        Err(error) => {
            println!("skipped: keeping the CPUs awake ({LATENCY}: {error})");
            None
        }
    }
}
