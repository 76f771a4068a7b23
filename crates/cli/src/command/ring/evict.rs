//! `teeline ring evict`: no longer waits for a consumer that does not come back.

use std::path::Path;

use serde::Serialize;
use teeline_core::Name;
use teeline_ring::{AttachOptions, evict};

use crate::output::{Answer, Failure, Output};

#[derive(Serialize)]
struct EvictedLine<'a> {
    evicted: &'a str,
    ring: String,
    last_released: u64,
    /// What was published and not released: the producer writes over it from now on.
    first_unreleased: Option<u64>,
    last_unreleased: Option<u64>,
    lag_bytes: u64,
    already: bool,
    freed: bool,
}

pub(super) fn run(
    ring: &Path,
    name: &Name,
    free: bool,
    out: &mut Output,
) -> Result<Answer, Failure> {
    let found = evict(ring, name, free, &AttachOptions::default()).map_err(Failure::new)?;
    let line = EvictedLine {
        evicted: name.as_str(),
        ring: ring.display().to_string(),
        last_released: found.last_released.0,
        first_unreleased: found.unreleased.map(|lost| lost.first.0),
        last_unreleased: found.unreleased.map(|lost| lost.last.0),
        lag_bytes: found.lag,
        already: found.already,
        freed: free,
    };
    if out.is_json() {
        out.object(&line)?;
        return Ok(Answer::Fine);
    }
    let what = match (free, found.already) {
        (true, _) => "evicted, and its slot freed",
        (false, true) => "was evicted already",
        (false, false) => "evicted",
    };
    let unreleased = match found.unreleased {
        Some(lost) => format!(
            "{} to {} are not kept for it any more, {} bytes",
            lost.first, lost.last, found.lag
        ),
        None => "it had released everything".to_owned(),
    };
    out.line(format_args!(
        "{name} {what}: released through {}, {unreleased}",
        found.last_released
    ))?;
    Ok(Answer::Fine)
}
