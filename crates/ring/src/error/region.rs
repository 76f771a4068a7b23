//! What can go wrong with the files of a ring: creating, attaching, removing.

use std::path::PathBuf;

use teeline_os::{lock::OwnerNote, state::StateError};

use super::{Damage, Role};
use crate::cursor::ShapeError;

/// Why a ring was not attached to.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is no ring of that name, or it is still being made. Create it, or wait for whoever does.
    #[error("there is no ring at {}: create it, or wait until its creator has", dir.display())]
    NotFound {
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// A directory is there, but not all of a ring's files. Remove it and create the ring anew.
    #[error("{} is missing: remove the rest of the ring, {}, and create it anew", path.display(), dir.display())]
    Incomplete {
        /// The ring's directory.
        dir: PathBuf,
        /// The file that is missing.
        path: PathBuf,
    },
    /// The file `ring` there is none of teeline's.
    #[error("{} is not a teeline ring", path.display())]
    NotARing {
        /// The file.
        path: PathBuf,
    },
    /// The ring was created by another version of teeline.
    #[error(
        "{} has ring format version {found}, this build reads version {expected}: drain it with the teeline that made it, then recreate it",
        path.display()
    )]
    WrongVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The version that is read.
        expected: u32,
    },
    /// The ring holds what no honest peer leaves there.
    #[error("{}: {damage}; read what is left with `teeline ring dump`, then remove it with force and create it anew", dir.display())]
    Damaged {
        /// The ring's directory.
        dir: PathBuf,
        /// Where and what.
        damage: Box<Damage>,
    },
    /// Somebody alive has the role. Wait, or stop him.
    #[error("{} has a live {role} already: {}", dir.display(), describe(owner.as_ref()))]
    OwnerAlive {
        /// The ring's directory.
        dir: PathBuf,
        /// Which role.
        role: Role,
        /// Who says to have it, and since when: for people only.
        owner: Option<OwnerNote>,
    },
    /// The ring has no consumer of that name.
    #[error("{} has no consumer `{name}`; it has {}{}", dir.display(), list(known), spare_slots(*spare))]
    NoSuchConsumer {
        /// The ring's directory.
        dir: PathBuf,
        /// The name asked for.
        name: String,
        /// The names it has.
        known: Vec<String>,
        /// How many slots are free for consumers that join.
        spare: usize,
    },
    /// The consumer was evicted: what it has not released is not kept for it any more. Rejoin, which tells what was lost.
    #[error("consumer {name} of {} was evicted: rejoin, which tells what it has lost", dir.display())]
    Evicted {
        /// The ring's directory.
        dir: PathBuf,
        /// The consumer.
        name: String,
    },
    /// The consumer was named when the ring was created, and keeps its slot for good. Evict it without freeing the slot.
    #[error("consumer {name} of {} was named at its creation: its slot cannot be freed", dir.display())]
    NamedAtCreation {
        /// The ring's directory.
        dir: PathBuf,
        /// The consumer.
        name: String,
    },
    /// No slot is left for another consumer. Evict one and free its slot, or create the ring anew with more.
    #[error(
        "{} has no spare slot for consumer `{name}`; it has {}: evict one of those that joined and free its slot, or create the ring with more",
        dir.display(), list(known)
    )]
    NoSpareSlot {
        /// The ring's directory.
        dir: PathBuf,
        /// Who wanted to join.
        name: String,
        /// The names it has.
        known: Vec<String>,
    },
    /// The producer wrote over every place from which to begin before it could be held. Try again, or use a larger ring.
    #[error(
        "the producer of {} went round faster than a place in it could be held: try again, or create it larger",
        dir.display()
    )]
    TooFast {
        /// The ring's directory.
        dir: PathBuf,
    },
    /// Another process is joining, evicting or removing just now, or was stopped while it did. Let it finish, or end it.
    #[error("the slots of {} are being changed by {}: let it finish, or end it", dir.display(), describe(owner.as_ref()))]
    Changing {
        /// The ring's directory.
        dir: PathBuf,
        /// Who says to be doing it, and since when: for people only.
        owner: Option<OwnerNote>,
    },
    /// The ring's removal was begun and not finished. Remove it again.
    #[error("{} is retired, but still there: its removal was begun and not finished; remove it again", dir.display())]
    Retired {
        /// The ring's directory.
        dir: PathBuf,
    },
    /// The system did not grant what the ring asks of its memory, and the ring was created so that this is an error. Grant
    /// it, or create the ring so that it goes on.
    #[error("{}: {wish} was refused: {why}", dir.display())]
    Memory {
        /// The ring's directory.
        dir: PathBuf,
        /// What was asked.
        wish: &'static str,
        /// Why it was not granted.
        why: String,
    },
    /// The system refused.
    #[error(transparent)]
    Os(#[from] teeline_os::Error),
}

/// Why a ring was not created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// There is something of that name already. Attach to it, or remove it first.
    #[error("{} exists already: attach to it, or remove it first", dir.display())]
    AlreadyExists {
        /// Where.
        dir: PathBuf,
    },
    /// There is a ring of that name, and it is another one than was asked for. Remove it first, or ask for the same.
    #[error("{} is there as {found}; wanted is {wanted}: remove it first, or ask for the same", dir.display())]
    Different {
        /// Where.
        dir: PathBuf,
        /// What it is.
        found: String,
        /// What was asked for.
        wanted: String,
    },
    /// There is no ring of that shape.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// There is no ring with those options.
    #[error("a ring cannot be created so: {0}")]
    Options(&'static str),
    /// The huge pages that were asked for cannot hold the ring. Mount a hugetlbfs there, or choose a capacity that is a
    /// multiple of its pages.
    #[error(
        "{capacity} bytes cannot lie on huge pages in {}, {}",
        dir.display(),
        page_bytes.map_or_else(
            || "which is not on a hugetlbfs".to_owned(),
            |bytes| format!("whose pages have {bytes} bytes each")
        )
    )]
    HugePages {
        /// Where they were looked for.
        dir: PathBuf,
        /// The ring's capacity.
        capacity: u64,
        /// Bytes of a page there, if it is a hugetlbfs.
        page_bytes: Option<u64>,
    },
    /// The ring that is there cannot be opened.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// No epoch was begun for the source.
    #[error(transparent)]
    State(#[from] StateError),
    /// The system refused.
    #[error(transparent)]
    Os(#[from] teeline_os::Error),
}

/// Why a ring was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// There is no ring of that name.
    #[error("there is no ring at {}", dir.display())]
    NotFound {
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// Somebody alive has a role in it. Stop him first, or use force.
    #[error("{} has a live {role}, {}: stop it first, or remove the ring with force", dir.display(), describe(owner.as_ref()))]
    OwnerAlive {
        /// The ring's directory.
        dir: PathBuf,
        /// Which role.
        role: Role,
        /// Who says to have it, and since when: for people only.
        owner: Option<OwnerNote>,
    },
    /// Another process is removing it, or was stopped while it did. Let it finish, or end it.
    #[error("{} is being removed by {}: let it finish, or end it", dir.display(), describe(owner.as_ref()))]
    BeingRemoved {
        /// The ring's directory.
        dir: PathBuf,
        /// Who says to be removing it, and since when: for people only.
        owner: Option<OwnerNote>,
    },
    /// A reliable consumer has frames that it did not release. Let it drain, or use force.
    #[error(
        "consumer {consumer} of {} has not released {lag} bytes, from sequence {first} to {last}: let it drain, or remove the ring with force and lose them",
        dir.display()
    )]
    Undrained {
        /// The ring's directory.
        dir: PathBuf,
        /// The consumer.
        consumer: String,
        /// Bytes that it did not release.
        lag: u64,
        /// Sequence of the first.
        first: u64,
        /// Sequence of the last.
        last: u64,
    },
    /// It cannot be told whether the ring may go. Use force.
    #[error("{0}; with force the ring is removed all the same")]
    Unreadable(AttachError),
    /// There is something in the directory that is no ring's. Remove it by hand.
    #[error("{} is no file of a ring: nothing was removed", path.display())]
    Foreign {
        /// What is there.
        path: PathBuf,
    },
    /// The system refused.
    #[error(transparent)]
    Os(#[from] teeline_os::Error),
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}

fn spare_slots(count: usize) -> String {
    match count {
        0 => String::new(),
        1 => ", and a spare slot to join".to_owned(),
        _ => format!(", and {count} spare slots to join"),
    }
}

fn describe(owner: Option<&OwnerNote>) -> String {
    owner.map_or_else(|| "an unknown process".to_owned(), OwnerNote::to_string)
}
