//! The text files of a log: `teeline-log.toml`, `topic.toml`, and what those who use the log keep beside the progress of a
//! source. They state their `format`, and end with a line `# crc32c = 01234567`: the CRC-32C of everything in front of it.
//! To TOML it is a comment.

/// What the last line begins with.
const LABEL: &str = "# crc32c = ";

/// Adds the last line.
#[must_use]
pub fn seal(mut text: String) -> String {
    let checksum = teeline_core::crc32c(text.as_bytes());
    text.push_str(&format!("{LABEL}{checksum:08x}\n"));
    text
}

/// The text in front of the last line, which must fit it. A text that states another version is refused for that: what
/// else it says, only its own version knows.
///
/// # Errors
/// When it is damaged, or of another version: what is wrong, to be said behind the name of the file.
pub fn open(bytes: &[u8], version: u32) -> Result<&str, String> {
    let text = str::from_utf8(bytes).map_err(|_| damaged("is not text"))?;
    let (front, stated) = text.rsplit_once(LABEL).unwrap_or((text, ""));
    let found: FormatOnly = toml::from_str(front).map_err(|error| damaged(error.message()))?;
    if found.format != version {
        return Err(other_version(found.format, version));
    }
    let digits = stated
        .strip_suffix('\n')
        .filter(|digits| is_checksum(digits));
    let stated = digits.ok_or_else(|| damaged(&format!("does not end with a line `{LABEL}…`")))?;
    let computed = format!("{:08x}", teeline_core::crc32c(front.as_bytes()));
    if stated != computed {
        let what = format!("states checksum {stated}, but its text gives {computed}");
        return Err(damaged(&what));
    }
    Ok(front)
}

fn is_checksum(digits: &str) -> bool {
    digits.len() == 8 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
}

fn damaged(what: &str) -> String {
    format!("{what}: it is damaged, or was changed by hand")
}

/// The version that a text states, if it states one.
pub(crate) fn version(bytes: &[u8]) -> Option<u32> {
    let text = str::from_utf8(bytes).ok()?;
    let found: FormatOnly = toml::from_str(text).ok()?;
    Some(found.format)
}

fn other_version(found: u32, version: u32) -> String {
    format!("is of format version {found}; this build reads version {version}")
}

/// The version alone, so that a file of another version is told from a malformed one.
#[derive(Debug, serde::Deserialize)]
struct FormatOnly {
    format: u32,
}
