//! Which epoch stands for which session of a foreign feed.
#![doc = include_str!("../../../../docs/formats/sessions.md")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use teeline_core::{Epoch, SourceName, time::Clock};
use teeline_feed::Session;
use teeline_log::Log;
use teeline_os::{
    lock::{LockError, OfdLock},
    state::{StateDir, StateError},
};
use toml::{Table, Value};

use crate::{
    config::{self, Fields, parsed, whole},
    record,
};

/// Version of the file.
const FORMAT: u32 = 1;

/// How long the lock is waited for: it is held only while one session gets its epoch.
const PATIENCE: Duration = Duration::from_secs(5);

/// The sessions of a foreign feed that a log, or the relays of a host, know, oldest first.
#[derive(Debug)]
pub(super) struct RecordedSessions {
    path: PathBuf,
    known: Vec<(Epoch, Session)>,
}

/// Why it is not known, or cannot be put on record, which epoch stands for which session of a foreign feed.
#[derive(Debug, thiserror::Error)]
pub enum SessionsError {
    /// The system refused.
    #[error(transparent)]
    Os(#[from] teeline_os::Error),
    /// Another recorder or relay of the source holds the record for longer than any use of it takes.
    #[error(transparent)]
    Locked(#[from] LockError),
    /// The host's state directory gives no epoch.
    #[error(transparent)]
    State(#[from] StateError),
    /// The record is not what it should be.
    #[error(
        "{} is damaged: {what}; restore it: without it nobody can tell which session its source's records are of",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

impl RecordedSessions {
    /// What `log` has on record of `source`: nothing, if its sessions are teeline's or it was never recorded.
    pub(super) fn read(log: &Log, source: &SourceName) -> Result<Self, SessionsError> {
        Self::read_at(record::path(log, source, "sessions"))
    }

    /// What the relays of a host have on record of `source`: kept apart from their rings, which a reboot takes.
    pub(super) fn relayed(state: &StateDir, source: &SourceName) -> Result<Self, SessionsError> {
        Self::read_at(state.path().join(format!("{source}.sessions")))
    }

    fn read_at(path: PathBuf) -> Result<Self, SessionsError> {
        let mut sessions = Self {
            path,
            known: Vec::new(),
        };
        sessions.refresh()?;
        Ok(sessions)
    }

    /// Reads what was put on record since.
    pub(super) fn refresh(&mut self) -> Result<(), SessionsError> {
        let Some(bytes) = record::read(&self.path)? else {
            return Ok(());
        };
        self.known = parse(&bytes).map_err(|what| SessionsError::Damaged {
            path: self.path.clone(),
            what,
        })?;
        Ok(())
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    pub(super) fn epoch_of(&self, session: Session) -> Option<Epoch> {
        let mut known = self.known.iter();
        known
            .find(|(_, known)| *known == session)
            .map(|(epoch, _)| *epoch)
    }

    pub(super) fn session_of(&self, epoch: Epoch) -> Option<Session> {
        let found = self.known.binary_search_by_key(&epoch, |(epoch, _)| *epoch);
        found.ok().map(|index| self.known[index].1)
    }

    /// The session whose records are stored under `epoch`: without anything on record, it is one of teeline's.
    pub(super) fn stored(&self, epoch: Epoch) -> Option<Session> {
        if self.is_empty() {
            Session::from_epoch(epoch)
        } else {
            self.session_of(epoch)
        }
    }

    /// The sessions in front of the one that `epoch` stands for.
    pub(super) fn before(&self, epoch: Epoch) -> Vec<Session> {
        let older = self.known.iter().take_while(|(known, _)| *known < epoch);
        older.map(|(_, session)| *session).collect()
    }

    /// The latest session's epoch.
    pub(super) fn last(&self) -> Option<Epoch> {
        self.known.last().map(|(epoch, _)| *epoch)
    }

    /// The epoch of `session`: at first sight the next one of `source`, which is on record here before it is used.
    pub(super) fn name(
        &mut self,
        session: Session,
        source: &SourceName,
        state: &StateDir,
        clock: &dyn Clock,
    ) -> Result<Epoch, SessionsError> {
        if let Some(epoch) = self.epoch_of(session) {
            return Ok(epoch);
        }
        let lock = self.lock()?;
        // Another recorder may have seen it first.
        self.refresh()?;
        let epoch = match self.epoch_of(session) {
            Some(epoch) => epoch,
            None => {
                // The log may be older than this host's state directory.
                if let Some(last) = self.last() {
                    state.observe_epoch(source, last)?;
                }
                let epoch = state.next_epoch(source, clock)?;
                let mut known = self.known.clone();
                known.push((epoch, session));
                record::write(&self.path, to_toml(&known))?;
                self.known = known;
                epoch
            }
        };
        lock.unlock();
        Ok(epoch)
    }

    fn lock(&self) -> Result<OfdLock, SessionsError> {
        // Not `.lock` behind another dot: that is the writer's lock of a source whose name ends in `.sessions`.
        let path: &Path = &self.path.with_extension("sessions-lock");
        let opened = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let opened = opened.map_err(|error| teeline_os::Error::new("open", path, error))?;
        Ok(OfdLock::lock_within(opened, path, PATIENCE)?)
    }
}

fn parse(bytes: &[u8]) -> Result<Vec<(Epoch, Session)>, String> {
    let known = record::parse(bytes, FORMAT, take)?;
    if known.is_empty() {
        return Err("it names no session".to_owned());
    }
    if !known.is_sorted_by(|(a, _), (b, _)| a < b) {
        return Err("its epochs do not grow".to_owned());
    }
    let mut names: Vec<Session> = known.iter().map(|(_, session)| *session).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("it names session {} twice", pair[0])),
        None => Ok(known),
    }
}

fn take(mut fields: Fields<'_>) -> Vec<(Epoch, Session)> {
    let _known: Option<u64> = fields.need("format", whole(FORMAT.into(), FORMAT.into()));
    let sessions = fields.tables("session", |mut entry| {
        let epoch = entry.need("epoch", whole(1, u64::MAX));
        let name = entry.need("name", parsed::<Session>);
        entry.done();
        Some((Epoch(epoch?), name?))
    });
    fields.done();
    sessions.into_iter().flatten().collect()
}

fn to_toml(known: &[(Epoch, Session)]) -> String {
    let sessions = known.iter().map(|(epoch, session)| {
        // ASCII all of it.
        let name = String::from_utf8_lossy(session.as_bytes()).into_owned();
        Value::Table(Table::from_iter([
            ("epoch".to_owned(), config::number(epoch.0)),
            ("name".to_owned(), name.into()),
        ]))
    });
    Table::from_iter([
        ("format".to_owned(), config::number(FORMAT.into())),
        ("session".to_owned(), Value::Array(sessions.collect())),
    ])
    .to_string()
}

#[cfg(test)]
mod tests {
    use teeline_log::format::text;

    use super::*;

    fn golden() -> Vec<(Epoch, Session)> {
        [
            (1_764_000_000_000_000, "000010059B"),
            (1_764_086_400_000_000, "1567326030"),
            (1_764_086_400_000_001, "ab \"c\\'  !"),
            (1_764_172_800_000_000, "\0\0\0\0\0\0\0\0\0\0"),
        ]
        .map(|(epoch, name)| (Epoch(epoch), name.parse().unwrap()))
        .into()
    }

    /// Written by every version 1, and read by all later ones.
    #[test]
    fn the_golden_file_is_read_and_written_to_the_byte() {
        let file = include_str!("../../tests/golden/sessions.v1.toml");
        assert_eq!(parse(file.as_bytes()).unwrap(), golden());
        assert_eq!(text::seal(to_toml(&golden())), file);
    }

    #[test]
    fn any_flipped_bit_of_the_golden_file_is_noticed() {
        let golden = include_bytes!("../../tests/golden/sessions.v1.toml");
        record::assert_any_flip_is_refused(golden, parse);
    }

    #[test]
    fn the_documented_example_is_understood() {
        let document = include_str!("../../../../docs/formats/sessions.md");
        let example = document.split("```").nth(1).unwrap();
        let known = parse(example.strip_prefix("toml\n").unwrap().as_bytes()).unwrap();
        assert_eq!(known, golden()[..2]);
    }

    #[test]
    fn what_cannot_be_is_damage() {
        let entry =
            |epoch: u64, name: &str| format!("[[session]]\nepoch = {epoch}\nname = '{name}'\n");
        let (a, b) = (entry(5, "session  a"), entry(6, "session  b"));
        let parse = |text: String| parse(text::seal(text).as_bytes());
        assert_eq!(parse(format!("format = 1\n{a}{b}")).unwrap().len(), 2);
        for (text, complaint) in [
            ("format = 1".to_owned(), "names no session"),
            (format!("format = 2\n{a}"), "is of format version 2"),
            (format!("format = 1\n{b}{a}"), "do not grow"),
            (
                format!("format = 1\n{a}{}", entry(6, "session  a")),
                "session  a twice",
            ),
            (
                format!("format = 1\n{}", entry(5, "short")),
                "not a session",
            ),
            ("no toml".to_owned(), "expected"),
        ] {
            let error = parse(text.clone()).unwrap_err();
            assert!(error.contains(complaint), "{text}: {error}");
        }
    }
}
