//! What members know of one another: who lives, who is dead or frozen, and what becomes of it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};

use teeline_core::Name;
use teeline_os::hold;

use super::{MemberError, Shared, partitions};
use crate::{
    groups::{
        Groups,
        page::{self, PeerPage},
        strategy::Number,
        tables::{self, GroupRow},
    },
    sqlite::{Abort, DatabaseError},
};

/// What is known of the others.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// When it was looked last.
    looked_ns: Option<u64>,
    /// The group's generation then.
    generation: u64,
    peers: BTreeMap<Number, Peer>,
}

#[derive(Debug)]
struct Peer {
    page: PeerPage,
    /// What it said at the last look; nothing before the first one, which so takes nobody for silent.
    beats: Option<u64>,
    /// How long that has not moved, while this process ran.
    still: Duration,
}

impl Shared {
    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes out of the group who is dead or frozen, and takes in what partitions were added.
    pub(super) fn look_at_others(&self) -> Result<(), MemberError> {
        let now_ns = self.options.clock.monotonic_ns();
        if self.is_stalled(now_ns) {
            return Ok(());
        }
        let Some(row) = self.row()? else {
            // SYNC member-look: pairs with the acquire swap in `Member::poll`.
            self.is_to_look.store(true, Ordering::Release);
            return Ok(());
        };
        let mut watch = self.watch();
        if row.generation != watch.generation || !row.members.contains_key(&self.number) {
            // SYNC member-look: pairs with the acquire swap in `Member::poll`.
            self.is_to_look.store(true, Ordering::Release);
        }
        watch.generation = row.generation;
        if !row.members.contains_key(&self.number) {
            return Ok(());
        }
        let ran = watch
            .looked_ns
            .map_or(Duration::ZERO, |looked_ns| {
                Duration::from_nanos(now_ns.saturating_sub(looked_ns))
            })
            .min(self.options.heartbeat);
        watch.looked_ns = Some(now_ns);
        let gone = watch.gone(&row, self, ran)?;
        drop(watch);
        let counted = partitions(&self.log, &self.topics);
        // A topic that cannot be opened keeps nobody from taking over what the dead had.
        let grown = counted.as_ref().ok().cloned().unwrap_or_default();
        // One that is written down, and that nobody is to read, is new all the same.
        let has_grown = grown
            .iter()
            .any(|(topic, count)| row.shared_out(topic) < *count as usize);
        if !gone.is_empty() || has_grown {
            hold::point("member.rebalance");
            let changed = self.groups.lock().write("share out partitions in", |tx| {
                tables::add_partitions(tx, &self.group, self.number, &grown)?;
                let changed = tables::rebalance(tx, &self.group, self.number, &gone)?;
                Ok::<_, Abort<DatabaseError>>(changed)
            })?;
            self.tell(changed);
            sweep(&self.members_dir(), &self.group, &gone);
        } else if self.groups.is_behind() {
            self.groups.follow_all()?;
        }
        counted?;
        Ok(())
    }
}

impl Watch {
    /// The others who are dead, or have been silent for too long.
    fn gone(
        &mut self,
        row: &GroupRow,
        shared: &Shared,
        ran: Duration,
    ) -> Result<Vec<Number>, MemberError> {
        let dir = shared.members_dir();
        self.peers
            .retain(|number, _| row.members.contains_key(number));
        let mut gone = Vec::new();
        for (number, member) in &row.members {
            if *number == shared.number {
                continue;
            }
            if !self.peers.contains_key(number) {
                let Some(page) = PeerPage::open(&page_path(&dir, &shared.group, *number))? else {
                    gone.push(*number);
                    continue;
                };
                let (beats, still) = (None, Duration::ZERO);
                self.peers.insert(*number, Peer { page, beats, still });
            }
            let peer = self.peers.get_mut(number).expect("it was put there");
            let beats = Some(peer.page.beats());
            peer.still = match beats == peer.beats {
                // One look may come after a stop of both: it takes two, however rarely this process looks.
                true => peer.still + ran.min(member.frozen_after / 2),
                false => Duration::ZERO,
            };
            peer.beats = beats;
            if !peer.page.is_held() || peer.still >= member.frozen_after {
                gone.push(*number);
            }
        }
        Ok(gone)
    }
}

pub(in crate::groups) fn page_path(dir: &Path, group: &Name, number: Number) -> PathBuf {
    dir.join(format!("{group}.{number}"))
}

/// The members of a group whose lock is free: whoever joins does not wait for others to notice.
pub(super) fn dead_members(
    groups: &Groups,
    dir: &Path,
    group: &Name,
) -> Result<Vec<Number>, MemberError> {
    let row = groups
        .lock()
        .read("read the group in", |tx| tables::group(tx, group))?;
    let mut dead = Vec::new();
    for number in row.iter().flat_map(|row| row.members.keys()) {
        let page = PeerPage::open(&page_path(dir, group, *number))?;
        if !page.is_some_and(|page| page.is_held()) {
            dead.push(*number);
        }
    }
    Ok(dead)
}

/// The numbers that have files in `dir`: also those of who was killed before it was a member, which no row tells of.
pub(super) fn numbers_of_files(dir: &Path, group: &Name) -> Vec<Number> {
    let number = |file: fs::DirEntry| {
        let name = file.file_name();
        let (of, number) = name.to_str()?.rsplit_once('.')?;
        number.parse().ok().filter(|_| of == group.as_str())
    };
    // Whoever joins next looks again.
    let files = fs::read_dir(dir).into_iter().flatten();
    files.flatten().filter_map(number).collect()
}

/// Removes those of their files that nobody living has.
pub(super) fn sweep(dir: &Path, group: &Name, numbers: &[Number]) {
    for number in numbers {
        page::sweep(&page_path(dir, group, *number));
    }
}
