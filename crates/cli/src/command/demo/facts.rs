//! The facts in a file, as the strategy takes them up: each an encoded fill behind its length (u32, little-endian).

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
};

use teeline_delivery::positions::Fill;
use teeline_os::{Context, Result};

/// Writes the facts. Their encodings were checked when they were taken in.
pub(crate) fn write(path: &Path, fills: &[Fill]) -> Result<()> {
    let write = || -> io::Result<()> {
        let mut file = BufWriter::new(File::create_new(path)?);
        let mut encoded = Vec::new();
        for fill in fills {
            encoded.clear();
            fill.encode(&mut encoded).map_err(io::Error::other)?;
            let length = u32::try_from(encoded.len()).map_err(io::Error::other)?;
            file.write_all(&length.to_le_bytes())?;
            file.write_all(&encoded)?;
        }
        file.flush()
    };
    write().context("write the facts to", path)
}

/// Reads the encoded facts, in order.
pub(crate) fn read(path: &Path) -> Result<Vec<Vec<u8>>> {
    let bytes = std::fs::read(path).context("read the facts in", path)?;
    let mut rest = bytes.as_slice();
    let mut facts = Vec::new();
    while let Some((length, behind)) = rest.split_first_chunk() {
        let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let cut = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let (fact, behind) = behind
            .split_at_checked(length)
            .ok_or_else(cut)
            .context("read the facts in", path)?;
        facts.push(fact.to_vec());
        rest = behind;
    }
    Ok(facts)
}
