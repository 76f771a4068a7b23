//! Opening a partition: where its log ends, whom it knows, and whether what lies behind the end is a torn tail or
//! damage.

use std::path::{Path, PathBuf};

use teeline_core::Offset;

use crate::{
    Damage, TornTail,
    durability::SCAN_BYTES_MAX,
    format::{
        Flaw,
        snapshot::{self, Cursor},
        state::{self, State},
    },
    producers::Producers,
    segment::{self, SegmentReader, Walk},
    storage::{Result, Storage, or_nothing, read_slots},
};

/// What was found when a partition was opened for appending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Log end afterwards: the offset that the next record gets.
    pub end: Offset,
    /// Whether there was anything to recover from: a crash, a reboot without close, a failed sync.
    pub recovered: bool,
    /// A torn last batch that was removed.
    pub torn: Option<TornTail>,
    /// Offsets that may have been answered and are gone, first and last; a `Lost` record says so in the log.
    pub lost: Option<(Offset, Offset)>,
    /// Durable records that are damaged: appends are refused.
    pub damage: Option<Damage>,
}

/// Files of a partition.
pub(crate) fn state_path(dir: &Path) -> PathBuf {
    dir.join("state")
}

pub(crate) fn watermark_path(dir: &Path) -> PathBuf {
    dir.join("watermark")
}

pub(crate) fn lock_path(dir: &Path) -> PathBuf {
    dir.join("lock")
}

/// Held by whoever syncs the partition, or takes a snapshot of it.
pub(crate) fn sync_lock_path(dir: &Path) -> PathBuf {
    dir.join("sync.lock")
}

/// Held by whoever prepares the next segment.
pub(crate) fn next_lock_path(dir: &Path) -> PathBuf {
    dir.join("next.lock")
}

/// The next segment, written ahead; it gets its name when it is its turn.
pub(crate) fn next_segment_path(dir: &Path) -> PathBuf {
    dir.join("next.segment")
}

/// The two snapshot files.
pub(crate) fn snapshot_paths(dir: &Path) -> [PathBuf; 2] {
    ["a", "b"].map(|slot| dir.join(format!("producers.snapshot.{slot}")))
}

/// Reads the newest slot of the state file.
pub(crate) fn read_state(storage: &dyn Storage, dir: &Path) -> Result<Result<State, Flaw>> {
    let bytes = match read_slots(storage, &state_path(dir)) {
        Ok(bytes) => bytes,
        Err(error) if error.is_not_found() => {
            return Ok(Err(Flaw::Short {
                need: state::SLOT_BYTES,
                have: 0,
            }));
        }
        Err(error) => return Err(error),
    };
    Ok(State::newest(&bytes))
}

/// A snapshot file: where it was taken and what it holds, or what is wrong with it. `None` if it does not exist.
pub(crate) type SnapshotFile = Option<Result<(Cursor, Producers), Flaw>>;

/// Reads both snapshots.
pub(crate) fn read_snapshots(storage: &dyn Storage, dir: &Path) -> Result<[SnapshotFile; 2]> {
    let read = |path: &Path| match or_nothing(storage.read(path)) {
        Ok(bytes) => {
            Ok(Some(snapshot::decode(&bytes).map(|(cursor, entries)| {
                (cursor, Producers::from_entries(entries))
            })))
        }
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    };
    let [a, b] = snapshot_paths(dir);
    Ok([read(&a)?, read(&b)?])
}

/// Reads both snapshots. One whose segment is not there is ahead of the log, and not usable.
pub(crate) fn usable_snapshots(storage: &dyn Storage, dir: &Path) -> Result<[SnapshotFile; 2]> {
    // First: retention takes new ones before it removes a segment.
    let mut segments = segment::list(storage, dir)?;
    let snapshots = read_snapshots(storage, dir)?;
    let mut taken_in = snapshots.iter().flatten().flatten();
    if taken_in.any(|(cursor, _)| !segments.contains(&cursor.segment)) {
        // It may have been made since.
        segments.append(&mut segment::list(storage, dir)?);
    }
    Ok(snapshots.map(|snapshot| match snapshot? {
        Ok((cursor, _)) if !segments.contains(&cursor.segment) => Some(Err(Flaw::Field {
            field: "segment",
            value: cursor.segment.0,
        })),
        other => Some(other),
    }))
}

/// Where both snapshots were taken, as far as they are usable.
pub(crate) fn snapshots_taken(storage: &dyn Storage, dir: &Path) -> Result<[Option<Cursor>; 2]> {
    let snapshots = usable_snapshots(storage, dir)?;
    Ok(snapshots.map(|snapshot| Some(snapshot?.ok()?.0)))
}

/// Where a scan begins: the older of the usable snapshots, so that what lies between the two is verified once more. Fails
/// with the flaw of one of them if neither is.
pub(crate) fn scan_start(
    storage: &dyn Storage,
    dir: &Path,
) -> Result<Result<(Cursor, Producers), Flaw>> {
    let missing = Flaw::Short {
        need: snapshot::HEADER_BYTES,
        have: 0,
    };
    Ok(match usable_snapshots(storage, dir)? {
        [Some(Ok(a)), Some(Ok(b))] => Ok(if a.0.offset <= b.0.offset { a } else { b }),
        [Some(Ok(one)), _] | [_, Some(Ok(one))] => Ok(one),
        [Some(Err(flaw)), _] | [_, Some(Err(flaw))] => Err(flaw),
        [None, None] => Err(missing),
    })
}

/// What a scan found.
#[derive(Debug)]
pub(crate) struct Found {
    /// Behind the last batch before any flaw.
    pub(crate) end: Cursor,
    /// Behind the last batch of all, beyond damage.
    pub(crate) readable_end: Offset,
    /// Whom the log knows at `end`.
    pub(crate) producers: Producers,
    /// Greatest offset that is known to have been durable.
    pub(crate) durable: Offset,
    /// A torn tail at `end`.
    pub(crate) torn: Option<TornTail>,
    /// Damage at `end`.
    pub(crate) damage: Option<Damage>,
}

/// Scans from `start` to the end, or to `limit` if everything from there on is to be forgotten. `durable` is the end of
/// what is known to have been durable from outside the segments. `undisturbed` is where the log
/// ends if nobody died while writing: then there is nothing behind it to look for.
pub(crate) fn scan(
    storage: &dyn Storage,
    dir: &Path,
    start: Cursor,
    mut producers: Producers,
    mut durable: Offset,
    limit: Option<Offset>,
    undisturbed: Option<Offset>,
) -> Result<Found> {
    let mut walk = Walk::from(storage, dir, start)?;
    let (end, flaw) = loop {
        match walk.step()? {
            Ok((header, _)) if limit.is_some_and(|limit| header.end() > limit) => {
                break (walk.before(), Flaw::Unsynced);
            }
            Ok((header, bytes)) => {
                durable = durable.max(header.durable);
                producers.apply(&header, bytes);
            }
            Err(flaw) => break (walk.cursor(), flaw),
        }
    };
    let mut found = Found {
        end,
        readable_end: end.offset,
        producers,
        durable,
        torn: None,
        damage: None,
    };
    let pos = u64::from(end.file_pos);
    let is_last = walk.following().is_none();
    let reader = walk.reader();
    let written = if undisturbed == Some(end.offset) {
        None
    } else {
        reader.written(pos, pos + SCAN_BYTES_MAX)?
    };
    if written.is_some() && is_last {
        found.durable = durable_behind(reader, &end)?.max(durable);
    }
    if found.durable > end.offset || !is_last {
        let (damage, more) = walk.skip(flaw, found.durable)?;
        found.damage = Some(damage);
        found.readable_end = if more {
            last_readable(&mut walk)?
        } else {
            end.offset
        };
        found.readable_end = found.readable_end.max(found.durable);
    } else if let Some(written) = written {
        found.torn = Some(TornTail {
            path: segment::log_path(dir, end.segment),
            bytes: pos..written.end,
            flaw,
        });
    }
    Ok(found)
}

/// What whole batches behind `end` in its segment say about how much was durable: if it is more than `end`, then what
/// should stand there was lost after it was synced.
pub(crate) fn durable_behind(reader: &mut SegmentReader, end: &Cursor) -> Result<Offset> {
    let mut durable = Offset(0);
    let mut pos = u64::from(end.file_pos);
    while let Some((at, header)) = reader.resync(pos, end.offset)? {
        durable = durable.max(header.durable);
        pos = at + u64::from(header.length);
    }
    Ok(durable)
}

/// Walks to the last batch of all, over any damage.
fn last_readable(walk: &mut Walk<'_>) -> Result<Offset> {
    loop {
        let flaw = match walk.step()? {
            Ok(_) => continue,
            Err(flaw) => flaw,
        };
        let end = walk.cursor().offset;
        let (_, more) = walk.skip(flaw, end)?;
        if !more {
            return Ok(end);
        }
    }
}
