//! Damage below the durable end, and its repair with a crash in front of each operation: a byte that flips, or some
//! sectors that are lost, of records that somebody vouches for. The oracle knows which batches that takes, and nothing else.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use teeline_core::{Offset, Partition};
use teeline_log::{
    Log,
    fake::FakeDisk,
    format::{
        batch::{self, Header},
        state::State,
    },
};

use super::{
    history::{ROOT, Shared, begin_again, lock, options, restart, trace, watch},
    oracle::Crash,
    record::topic_name,
};

/// Bytes that a disk loses together.
const SECTOR_BYTES: usize = 512;

/// Where a batch lies.
struct Placed {
    segment: PathBuf,
    bytes: Range<usize>,
    header: Header,
    /// Where the batch before it ends: it may say what is lost in between.
    from: Offset,
}

/// Everybody dies, something is damaged, and a new process repairs it.
pub(super) fn damage(world: &Shared) {
    restart(world);
    let (disk, number, cut) = {
        let mut world = lock(world);
        let count = world.oracle.partitions.len();
        let number = world.random.usize(0..count);
        (world.disk.clone(), number, world.random.bool())
    };
    let partition = Partition(u32::try_from(number).unwrap());
    disk.before_each(None);
    {
        let mut world = lock(world);
        let topic = world.processes[0].log.topic(&topic_name()).unwrap();
        let durable = topic.sync(partition).unwrap();
        let facts = &mut world.oracle.partitions[number];
        facts.durable = facts.durable.max(durable.0);
        world.processes.clear();
    }
    if cut {
        disk.cut_power();
    } else {
        disk.kill_all();
    }
    let Some(may_go) = plant(world, &disk, partition) else {
        return begin_again(world, Crash::Kill);
    };
    trace(|| format!("  damaged: {partition} may lose {may_go:?}"));
    lock(world).oracle.partitions[number].damaged = Some(may_go.clone());
    watch(world, Crash::Kill);
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let topic = log.topic(&topic_name()).unwrap();
    let looked = topic.repair(partition, false).unwrap();
    let done = topic.repair(partition, true).unwrap();
    assert_eq!(done.damages, looked.damages);
    for damage in &done.damages {
        let Range { start, end } = damage.offsets;
        assert!(
            start == end || may_go.start <= start.0 && end.0 <= may_go.end,
            "{damage}, but only {may_go:?} was damaged"
        );
    }
    disk.before_each(None);
    drop((topic, log));
    let mut locked = lock(world);
    locked.outcome.damaged += 1;
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    locked.oracle.check(&log, Crash::Kill);
    locked.oracle.partitions[number].damaged = None;
    drop(locked);
    drop(log);
    disk.kill_all();
    begin_again(world, Crash::Kill);
}

/// Damages something of which the disk itself says that it was durable, and says which offsets that may take; `None` if
/// there is nothing of that kind.
fn plant(world: &Shared, disk: &FakeDisk, partition: Partition) -> Option<Range<u64>> {
    let dir = Path::new(ROOT).join(format!("{}/{partition}", topic_name()));
    let state = State::newest(&disk.bytes(&dir.join("state"))).unwrap();
    let placed = batches(disk, &dir, state.log_start);
    let vouched = placed.iter().map(|placed| placed.header.durable).max();
    let vouched = vouched.unwrap_or(Offset(0)).max(state.durable);
    let targets: Vec<_> = placed
        .iter()
        // The last one says something of those in front of it, but nobody says anything of it.
        .take(placed.len().saturating_sub(1))
        .filter(|placed| placed.header.end() <= vouched)
        .collect();
    let mut world = lock(world);
    let target = world.random.choice(targets)?;
    let at = world.random.usize(target.bytes.clone());
    let mut bytes = disk.bytes(&target.segment);
    let hit = if world.random.bool() {
        bytes[at] ^= 1 << world.random.u32(0..8);
        at..at + 1
    } else {
        let sectors = world.random.usize(1..4);
        let start = at / SECTOR_BYTES * SECTOR_BYTES;
        let end = (start + sectors * SECTOR_BYTES).min(target.bytes.end);
        bytes[start..end].fill(0);
        start..end
    };
    disk.set_bytes(&target.segment, &bytes);
    let touched = placed.iter().filter(|placed| {
        placed.segment == target.segment
            && placed.bytes.start < hit.end
            && hit.start < placed.bytes.end
    });
    let (first, last) = touched.fold((u64::MAX, 0), |(first, last), placed| {
        (first.min(placed.from.0), last.max(placed.header.end().0))
    });
    Some(first..last)
}

/// Every batch of a partition, from `start` on.
fn batches(disk: &FakeDisk, dir: &Path, start: Offset) -> Vec<Placed> {
    let mut placed = Vec::new();
    let files = disk.files(dir).into_iter();
    for segment in files.filter(|path| path.extension().is_some_and(|ending| ending == "log")) {
        let base = segment.file_stem().and_then(|stem| stem.to_str());
        if base.and_then(|base| base.parse().ok()) < Some(start.0) {
            continue;
        }
        let bytes = disk.bytes(&segment);
        let mut at = 0;
        while let Ok(header) = batch::verify(&bytes[at..]) {
            let end = at + header.length as usize;
            let from = placed
                .last()
                .map_or(start.min(header.base), |before: &Placed| {
                    before.header.end()
                });
            placed.push(Placed {
                segment: segment.clone(),
                bytes: at..end,
                header,
                from,
            });
            at = end;
        }
    }
    placed
}
