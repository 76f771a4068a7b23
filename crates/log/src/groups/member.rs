//! A member of a group: it joins, is given partitions and gives them back.

mod watch;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use teeline_core::{Name, Offset, Partition, time::Clock};
use teeline_os::{SystemClock, hold};

pub(super) use self::watch::page_path;
use self::watch::{Watch, dead_members, numbers_of_files, sweep};
use super::{
    CommitError, Groups, MEMBERS_DIR_NAME, Strategy,
    mirror::Bell,
    page::{self, MemberPage},
    strategy::Number,
    tables::{self, GroupRow, MemberRow},
};
use crate::{
    Log, TopicError,
    sqlite::{Abort, DatabaseError},
};

/// How a member takes part.
#[derive(Clone)]
pub struct MemberOptions {
    /// What people call it; need not be unique.
    pub label: String,
    /// How the group shares out its partitions: all members have to agree.
    pub strategy: Strategy,
    /// How often it says that it runs, and looks whether the others do. One that died is noticed within this time.
    pub heartbeat: Duration,
    /// How long it may be silent before the others take it for frozen, and its partitions from it. Counted by each of them
    /// while he runs himself: one that was stopped for an hour does not count the hour.
    pub frozen_after: Duration,
    /// How long its application may take from one [`Member::poll`] to the next. After that it is silent on purpose.
    pub poll_within: Duration,
    /// Whether threads of its own say that it runs, and watch the others. Without, [`Member::beat`] has to be called.
    pub in_background: bool,
    /// Where the time comes from.
    pub clock: Arc<dyn Clock>,
}

impl Default for MemberOptions {
    /// A heartbeat every half second, frozen after 10 s of silence, silent after a minute without a poll; sticky.
    fn default() -> Self {
        Self {
            label: String::new(),
            strategy: Strategy::default(),
            heartbeat: Duration::from_millis(500),
            frozen_after: Duration::from_secs(10),
            poll_within: Duration::from_secs(60),
            in_background: true,
            clock: Arc::new(SystemClock),
        }
    }
}

impl fmt::Debug for MemberOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemberOptions")
            .field("label", &self.label)
            .field("strategy", &self.strategy)
            .field("heartbeat", &self.heartbeat)
            .field("frozen_after", &self.frozen_after)
            .field("poll_within", &self.poll_within)
            .field("in_background", &self.in_background)
            .finish_non_exhaustive()
    }
}

/// A partition that a member has, and the generation since which it does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Held {
    /// The topic.
    pub topic: Name,
    /// The partition.
    pub partition: Partition,
    /// What its commits carry: an older one is fenced.
    pub generation: u64,
}

/// What has changed about a member's partitions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Taken from it, because it was taken for dead or frozen: others may have them already. Nothing can be committed.
    pub lost: Vec<Held>,
    /// Others are to have them: it commits what it has done, and [releases](Member::release) them. Until then they stay its
    /// own.
    pub revoked: Vec<Held>,
    /// New ones.
    pub assigned: Vec<Held>,
}

impl Changes {
    /// Whether nothing has changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lost.is_empty() && self.revoked.is_empty() && self.assigned.is_empty()
    }
}

/// Why a member cannot join, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    /// The others have taken it for dead or frozen, and its partitions from it. It has to stop, or to join anew.
    #[error(
        "member {member} of group {group} was taken out: it was silent for too long, or its file is gone; it must stop, \
         or join anew"
    )]
    Fenced {
        /// The group.
        group: Name,
        /// Its number.
        member: u64,
    },
    /// The members share out partitions in another way.
    #[error(
        "the members of group {group} share out by the strategy {found}, not {offered}: take theirs, or end them first"
    )]
    Strategy {
        /// The group.
        group: Name,
        /// The group's.
        found: Strategy,
        /// The newcomer's.
        offered: Strategy,
    },
    /// The options make no sense.
    #[error("member of group {group}: {what}")]
    Invalid {
        /// The group.
        group: Name,
        /// What is wrong.
        what: &'static str,
    },
    /// A topic cannot be opened.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// The groups database cannot be used.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// A member's file cannot be used.
    #[error(transparent)]
    File(#[from] teeline_os::Error),
}

/// A member of a group.
///
/// It owns each of its partitions alone, until it releases it, or is fenced. When it is dropped, the others notice as if it
/// had died: [`leave`](Self::leave) hands over at once.
#[derive(Debug)]
pub struct Member {
    shared: Arc<Shared>,
    held: BTreeMap<(Name, Partition), u64>,
    /// The bell at the last poll.
    heard: u32,
    background: Vec<JoinHandle<()>>,
}

/// What the threads in the background know, too.
#[derive(Debug)]
struct Shared {
    log: Log,
    groups: Groups,
    group: Name,
    number: Number,
    topics: BTreeSet<Name>,
    options: MemberOptions,
    page: MemberPage,
    bell: Bell,
    watch: Mutex<Watch>,
    /// What the last look in the background failed at, if no poll comes to it.
    failure: Mutex<Option<MemberError>>,
    /// Whether its partitions may have changed since the last poll.
    is_to_look: AtomicBool,
    polled_ns: AtomicU64,
    is_to_stop: AtomicBool,
}

impl Log {
    /// Joins `group`, to read `topics` together with its other members. Partitions come with the first
    /// [polls](Member::poll).
    ///
    /// ```
    /// use teeline_core::Offset;
    /// use teeline_log::{Log, LogOptions, TopicConfig, groups::MemberOptions};
    ///
    /// # let dir = tempfile::tempdir()?;
    /// # let options = LogOptions { any_filesystem: true, ..LogOptions::default() };
    /// let log = Log::open_or_create(dir.path().join("log"), &options)?;
    /// log.create_topic(&"fills".parse()?, &TopicConfig { partitions: 8, ..TopicConfig::default() })?;
    /// let mut member = log.join(&"positions".parse()?, ["fills".parse()?], MemberOptions::default())?;
    ///
    /// let changes = member.poll()?;
    /// assert_eq!(changes.assigned.len(), 8); // alone, for now
    /// for held in &changes.assigned {
    ///     // Read from where the group stands, process, and then:
    ///     member.commit(&held.topic, held.partition, Offset(0))?;
    /// }
    /// member.release(&changes.revoked)?; // when others are to have some
    /// member.leave()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`MemberError`].
    pub fn join(
        &self,
        group: &Name,
        topics: impl IntoIterator<Item = Name>,
        options: MemberOptions,
    ) -> Result<Member, MemberError> {
        Member::join(self, group, topics.into_iter().collect(), options)
    }
}

impl Member {
    fn join(
        log: &Log,
        group: &Name,
        topics: BTreeSet<Name>,
        options: MemberOptions,
    ) -> Result<Self, MemberError> {
        let invalid = |what| MemberError::Invalid {
            group: group.clone(),
            what,
        };
        if topics.is_empty() {
            return Err(invalid("it reads no topic: name at least one"));
        }
        if options.heartbeat.is_zero() || options.frozen_after < 2 * options.heartbeat {
            return Err(invalid(
                "`frozen_after` has to be at least two heartbeats, and a heartbeat longer than nothing",
            ));
        }
        let partitions = partitions(log, &topics)?;
        let groups = log.groups()?;
        let dir = groups.dir.join(MEMBERS_DIR_NAME);
        super::create_dir(&dir, groups.mode).map_err(|source| DatabaseError::Create {
            path: dir.clone(),
            source,
        })?;
        let row = MemberRow {
            label: options.label.clone(),
            heartbeat: options.heartbeat,
            frozen_after: options.frozen_after,
            topics: topics.clone(),
        };
        let gone = dead_members(&groups, &dir, group)?;
        // Last: who is refused before leaves no file.
        let (number, page) = make_page(&groups, &dir, group, &options)?;
        hold::point("member.named");
        let strategy = options.strategy;
        let joined = groups.lock().write("join a group in", |tx| {
            let is_left = |row: &GroupRow| row.members.keys().any(|number| !gone.contains(number));
            match tables::group(tx, group)? {
                Some(row) if row.strategy != strategy && is_left(&row) => {
                    return Err(Abort::Refused(MemberError::Strategy {
                        group: group.clone(),
                        found: row.strategy,
                        offered: strategy,
                    }));
                }
                _ => tables::set_strategy(tx, group, strategy)?,
            }
            tables::insert(tx, group, number, &row)?;
            tables::add_partitions(tx, group, number, &partitions)?;
            tables::rebalance(tx, group, number, &gone)?;
            Ok(())
        });
        if joined.is_err() {
            page.remove();
        }
        joined?;
        hold::point("member.joined");
        sweep(&dir, group, &numbers_of_files(&dir, group));
        let bell = groups.ring()?;
        let now_ns = options.clock.monotonic_ns();
        let shared = Arc::new(Shared {
            log: log.clone(),
            groups,
            group: group.clone(),
            number,
            topics,
            page,
            bell,
            watch: Mutex::default(),
            failure: Mutex::default(),
            is_to_look: AtomicBool::new(true),
            polled_ns: AtomicU64::new(now_ns),
            is_to_stop: AtomicBool::new(false),
            options,
        });
        let mut member = Self {
            heard: shared.bell.heard(),
            shared,
            held: BTreeMap::new(),
            background: Vec::new(),
        };
        if member.shared.options.in_background {
            member.go_into_background()?;
        }
        Ok(member)
    }

    /// Its number in the group, which no other member ever had.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.shared.number
    }

    /// The group.
    #[must_use]
    pub fn group(&self) -> &Name {
        &self.shared.group
    }

    /// What the groups of the log have committed.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        &self.shared.groups
    }

    /// The partitions that it has, as far as it has heard.
    pub fn held(&self) -> impl Iterator<Item = Held> + '_ {
        self.held.iter().map(held)
    }

    /// Says what has changed about its partitions since the last poll. Cheap when nothing has. Its application has to come
    /// here at least every [`MemberOptions::poll_within`].
    ///
    /// # Errors
    /// [`MemberError::Fenced`] at the second poll after it was taken out; the first one tells what was lost. And whatever the last
    /// look in the background failed at.
    pub fn poll(&mut self) -> Result<Changes, MemberError> {
        let shared = &*self.shared;
        let now_ns = shared.options.clock.monotonic_ns();
        shared.polled_ns.store(now_ns, Ordering::Relaxed);
        let before = std::mem::replace(&mut self.heard, shared.bell.heard());
        // SYNC member-look: pairs with the release stores of whoever looks at the others: what made it say so is seen.
        let is_to_look = shared.is_to_look.swap(false, Ordering::Acquire);
        if !is_to_look && before == self.heard {
            return Ok(Changes::default());
        }
        let told = self.look().and_then(|changes| {
            // What has changed is told first.
            let failure = self.shared.failure().take_if(|_| changes.is_empty());
            failure.map_or(Ok(changes), Err)
        });
        if told.is_err() || self.shared.failure().is_some() {
            self.shared.is_to_look.store(true, Ordering::Relaxed);
        }
        told
    }

    fn look(&mut self) -> Result<Changes, MemberError> {
        let shared = Arc::clone(&self.shared);
        let row = shared.row()?;
        let own = row.filter(|row| row.members.contains_key(&shared.number));
        if own.is_none() {
            shared.is_to_look.store(true, Ordering::Relaxed);
            if self.held.is_empty() {
                return Err(shared.fenced());
            }
        }
        let mine = own.iter().flat_map(|row| &row.shares);
        let mine = mine.filter(|share| share.owner == Some(shared.number));
        let (mut before, mut now) = (self.held.clone(), BTreeMap::new());
        let mut changes = Changes::default();
        let mut at_once = Vec::new();
        for share in mine {
            let key = (share.topic.clone(), share.partition);
            let this = held((&key, &share.generation));
            let had = before.get(&key) == Some(&share.generation);
            let stays = share.target == Some(shared.number);
            if had {
                before.remove(&key);
            }
            match (had, stays) {
                // Nobody has heard of it here, so nothing has to be finished.
                (false, false) => {
                    at_once.push(this);
                    continue;
                }
                (false, true) => changes.assigned.push(this),
                (true, false) => changes.revoked.push(this),
                (true, true) => {}
            }
            now.insert(key, share.generation);
        }
        changes.lost = before.iter().map(held).collect();
        if !at_once.is_empty() {
            shared.release(&at_once)?;
        }
        // Last: what is not told because something failed is to be told by the next poll.
        self.held = now;
        Ok(changes)
    }

    /// Gives partitions back, for others to read; what was done with them is to be committed before. Those that it has no
    /// more are passed over.
    ///
    /// # Errors
    /// When the groups database cannot be written; it still has them then.
    pub fn release(&mut self, partitions: &[Held]) -> Result<(), MemberError> {
        if partitions.is_empty() {
            return Ok(());
        }
        hold::point("member.release");
        self.shared.release(partitions)?;
        // One that has come back since then stands there under a newer generation.
        self.held
            .retain(|key, generation| !partitions.contains(&held((key, generation))));
        // One of them may have come back meanwhile.
        self.shared.is_to_look.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Commits the offset that the group reads next in a partition. Durable when this returns.
    ///
    /// # Errors
    /// [`CommitError::Fenced`] if it was taken from this member, [`CommitError::NotHeld`] if by its polls it is not one of its
    /// own: nothing is changed then.
    pub fn commit(
        &self,
        topic: &Name,
        partition: Partition,
        next: Offset,
    ) -> Result<(), CommitError> {
        let Shared { groups, group, .. } = &*self.shared;
        match self.held.get(&(topic.clone(), partition)) {
            Some(generation) => groups.commit(group, topic, partition, next, *generation),
            None => Err(CommitError::NotHeld {
                group: group.clone(),
                member: self.number(),
                topic: topic.clone(),
                partition,
            }),
        }
    }

    /// How many records each of its partitions is behind, by what the group has committed.
    ///
    /// # Errors
    /// When the log or the groups database cannot be read.
    pub fn lag(&self) -> Result<Vec<(Held, u64)>, LagError> {
        let Shared {
            log, groups, group, ..
        } = &*self.shared;
        self.held()
            .map(|held| {
                let committed = groups.committed(group, &held.topic, held.partition)?;
                let next = committed.map(|committed| committed.next);
                let lag = log.topic(&held.topic)?.lag(held.partition, next)?;
                Ok((held, lag))
            })
            .collect()
    }

    /// Says that it runs, looks whether the others do, and takes those out who do not: what threads in the background do
    /// otherwise, every [`MemberOptions::heartbeat`].
    ///
    /// # Errors
    /// When a file or the groups database cannot be used; it is tried again the next time.
    pub fn beat(&self) -> Result<(), MemberError> {
        self.shared.beat();
        self.shared.look_at_others()
    }

    /// Beats in one thread and looks at the others in another, until it is dropped: a database that somebody holds up must
    /// not silence a process that runs. What fails is told by the next poll.
    fn go_into_background(&mut self) -> Result<(), MemberError> {
        let beat = |shared: &Shared| shared.beat();
        let look = |shared: &Shared| {
            let failure = shared.look_at_others().err();
            let has_failed = failure.is_some();
            *shared.failure() = failure;
            if has_failed {
                // SYNC member-look: pairs with the acquire swap in `Member::poll`.
                shared.is_to_look.store(true, Ordering::Release);
            }
        };
        self.spawn("teeline-beat", beat)?;
        self.spawn("teeline-member", look)
    }

    fn spawn(&mut self, name: &str, turn: fn(&Shared)) -> Result<(), MemberError> {
        let shared = Arc::clone(&self.shared);
        let turns = move || {
            while !shared.is_to_stop.load(Ordering::Relaxed) {
                let heard = shared.bell.heard();
                turn(&shared);
                shared.bell.wait(heard, shared.options.heartbeat);
            }
        };
        let spawned = self.shared.log.env().helper.spawn(name, turns);
        let failed = |source| {
            teeline_os::Error::new("start a thread for", self.shared.members_dir(), source)
        };
        self.background.push(spawned.map_err(failed)?);
        Ok(())
    }

    /// Waits for a change of the group since the last poll, at most for `timeout`; then [`poll`](Self::poll) says whether it
    /// is one of its own.
    pub fn wait(&self, timeout: Duration) {
        if !self.shared.is_to_look.load(Ordering::Relaxed) {
            self.shared.bell.wait(self.heard, timeout);
        }
    }

    /// Gives everything back and goes.
    ///
    /// # Errors
    /// When the groups database cannot be written; the others notice as if it had died.
    pub fn leave(self) -> Result<(), MemberError> {
        self.shared.take_out(&[self.shared.number])?;
        self.shared.page.remove();
        Ok(())
    }
}

/// Why it cannot be said how far behind a member is.
#[derive(Debug, thiserror::Error)]
pub enum LagError {
    /// A topic cannot be opened.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// A partition cannot be read.
    #[error(transparent)]
    Read(#[from] crate::ReadError),
    /// The groups database cannot be read.
    #[error(transparent)]
    Database(#[from] DatabaseError),
}

impl Drop for Member {
    fn drop(&mut self) {
        self.shared.is_to_stop.store(true, Ordering::Relaxed);
        self.shared.bell.ring();
        for thread in self.background.drain(..) {
            // A panic was reported when it happened.
            drop(thread.join());
        }
    }
}

impl Shared {
    fn row(&self) -> Result<Option<GroupRow>, DatabaseError> {
        let database = self.groups.lock();
        database.read("read the group in", |tx| tables::group(tx, &self.group))
    }

    fn failure(&self) -> MutexGuard<'_, Option<MemberError>> {
        let failure = self.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner)
    }

    fn fenced(&self) -> MemberError {
        MemberError::Fenced {
            group: self.group.clone(),
            member: self.number,
        }
    }

    fn release(&self, partitions: &[Held]) -> Result<(), DatabaseError> {
        let released = self.groups.lock().write("release partitions in", |tx| {
            let released = tables::release(tx, &self.group, self.number, partitions);
            released.map_err(Abort::<DatabaseError>::Database)
        })?;
        self.tell(released);
        Ok(())
    }

    fn take_out(&self, gone: &[Number]) -> Result<(), DatabaseError> {
        let changed = self.groups.lock().write("share out partitions in", |tx| {
            let changed = tables::rebalance(tx, &self.group, self.number, gone);
            changed.map_err(Abort::<DatabaseError>::Database)
        })?;
        self.tell(changed);
        Ok(())
    }

    /// Lets the others look. Whoever dies before has them wait for their next heartbeat.
    fn tell(&self, changed: bool) {
        hold::point("member.changed");
        if changed {
            self.is_to_look.store(true, Ordering::Relaxed);
            self.bell.ring();
            // It is done, whatever becomes of its mirror: the next change or heartbeat brings that up to date.
            drop(self.groups.follow_all());
        }
    }

    fn members_dir(&self) -> PathBuf {
        self.groups.dir.join(MEMBERS_DIR_NAME)
    }

    /// Whether its application has not come to poll for too long.
    fn is_stalled(&self, now_ns: u64) -> bool {
        let polled_ns = self.polled_ns.load(Ordering::Relaxed);
        Duration::from_nanos(now_ns.saturating_sub(polled_ns)) > self.options.poll_within
    }

    fn beat(&self) {
        let now_ns = self.options.clock.monotonic_ns();
        if !self.is_stalled(now_ns) {
            self.page.beat(now_ns);
        }
    }
}

fn held((key, generation): (&(Name, Partition), &u64)) -> Held {
    let (topic, partition) = key.clone();
    Held {
        topic,
        partition,
        generation: *generation,
    }
}

/// How many partitions each topic has now.
fn partitions(log: &Log, topics: &BTreeSet<Name>) -> Result<BTreeMap<Name, u32>, TopicError> {
    topics
        .iter()
        .map(|topic| Ok((topic.clone(), log.topic(topic)?.config().partitions)))
        .collect()
}

/// Takes a number, and makes the page that goes with it.
fn make_page(
    groups: &Groups,
    dir: &Path,
    group: &Name,
    options: &MemberOptions,
) -> Result<(Number, MemberPage), MemberError> {
    loop {
        let number = groups.lock().write("take a number in", |tx| {
            let number = tables::number(tx, group, options.strategy);
            number.map_err(Abort::<DatabaseError>::Database)
        })?;
        hold::point("member.numbered");
        let path = page_path(dir, group, number);
        let now_ns = options.clock.monotonic_ns();
        match MemberPage::create(&path, groups.mode & 0o666, groups.boot, now_ns) {
            Ok(page) => return Ok((number, page)),
            // The database is an older copy, and has forgotten that the number was given.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => page::sweep(&path),
            Err(error) => return Err(error.into()),
        }
    }
}
