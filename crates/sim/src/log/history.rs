//! One history: actions drawn from a seed, and a crash in front of every operation that they do.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use teeline_core::Partition;
use teeline_log::{
    Answer, AppendError, Compaction, ConfigureError, Durability, GrowError, Log, LogOptions,
    Passed, Retention, Succession, Topic, TopicConfig, TopicError, Writer,
    fake::{FakeDisk, FakeStorage, Fault, Operation, Step},
};

use super::{
    damage::damage,
    oracle::{Crash, Oracle, PartitionFacts},
    record::{EPOCH, Fact, source, topic_name},
};

pub(super) const ROOT: &str = "/log";

/// Most partitions: each is looked at in front of each operation.
const PARTITIONS_MAX: u32 = 6;

/// What a history was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Actions.
    pub actions: u64,
    /// Storage operations, in front of each of which the machine crashed.
    pub crashes: u64,
    /// Records that were acknowledged.
    pub acknowledged: u64,
    /// Segments dropped by retention.
    pub dropped: u64,
    /// Segments rewritten by compaction.
    pub rewritten: u64,
    /// Times that partitions were added.
    pub grown: u64,
    /// Times that the topic was configured anew.
    pub configured: u64,
    /// Times that a source was forgotten.
    pub forgotten: u64,
    /// Times that something durable was damaged, and repaired.
    pub damaged: u64,
    /// Operations that failed as ordered.
    pub failed: u64,
}

pub(super) fn options() -> LogOptions {
    LogOptions {
        patience: Duration::ZERO,
        ..LogOptions::default()
    }
}

/// A process that writes as one source.
pub(super) struct Process {
    storage: Arc<FakeStorage>,
    pub(super) log: Log,
    /// Refreshed only when it is told that it has to.
    topic: Topic,
    writer: Writer,
    source: usize,
}

/// Everything that a history is about.
pub(super) struct World {
    pub(super) disk: FakeDisk,
    pub(super) random: fastrand::Rng,
    config: TopicConfig,
    /// Whether actions are drawn that came later: of the seeds that are kept, since they found something, none does.
    has_later_actions: bool,
    /// Whether sources are forgotten: where nothing is damaged, since damage may take the record that says so.
    forgets: bool,
    pub(super) processes: Vec<Process>,
    /// The next number of each source, and its first that is not forgotten.
    next: Vec<u64>,
    floor: Vec<u64>,
    pub(super) oracle: Oracle,
    pub(super) outcome: Outcome,
    /// Failed operations when the machine crashed last.
    failed: u64,
}

pub(super) type Shared = Arc<Mutex<World>>;

pub(super) fn lock(world: &Shared) -> MutexGuard<'_, World> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells what happens, where somebody wants to know.
pub(super) fn trace(what: impl FnOnce() -> String) {
    if std::env::var_os("TEELINE_TRACE").is_some() {
        eprintln!("{}", what());
    }
}

/// Runs the history of a seed with so many actions. Panics where the oracle objects.
#[must_use]
pub fn run(seed: u64, actions: u64) -> Outcome {
    let world: Shared = Arc::new(Mutex::new(World::new(seed)));
    for _ in 0..actions {
        watch(&world, Crash::Kill);
        act(&world);
        lock(&world).outcome.actions += 1;
    }
    restart(&world);
    let world = lock(&world);
    // The hook holds the world, which holds the disk, which holds the hook.
    world.disk.before_each(None);
    world.outcome
}

/// From now on the machine crashes in front of each operation: on a copy. `before` says what has happened already that
/// nobody has recovered from.
pub(super) fn watch(world: &Shared, before: Crash) {
    let watched = Arc::clone(world);
    let disk = lock(world).disk.clone();
    disk.before_each(Some(Box::new(move |step| {
        lock(&watched).crash_in_front_of(step, before);
    })));
}

/// Does one action. The world is not locked while the log works: the hook looks at it.
fn act(world: &Shared) {
    let (roll, sources, has_later, forgets) = {
        let mut world = lock(world);
        let millis = world.random.u64(0..30);
        world.disk.advance(Duration::from_millis(millis));
        let roll = world.random.u32(0..100);
        let (has_later, forgets) = (world.has_later_actions, world.forgets);
        (roll, world.processes.len(), has_later, forgets)
    };
    let process = lock(world).random.usize(0..sources);
    trace(|| format!("action {roll}, process {process}"));
    match roll {
        0..4 if has_later => damage(world),
        4..8 if has_later => configure(world, process),
        0..8 if forgets => forget(world, process),
        0..60 => append(world, process),
        60..66 => sync(world, process),
        66..72 => retain(world, process),
        72..80 => compact(world, process),
        80..84 => grow(world, process),
        84..88 => reopen(world, process),
        88..92 => restart(world),
        92..95 => order_failure(world),
        95..97 => fill_up(world, process),
        _ => {
            let mut world = lock(world);
            let hours = world.random.i64(-50..50);
            world.disk.set_wall_clock(hours * 3_600_000_000_000);
        }
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let durability = match random.u32(0..4) {
            0 => Durability::LeaveToOs,
            1 => Durability::SyncEvery(Duration::from_millis(30)),
            _ => Durability::SyncEachBatch,
        };
        let compacts = random.bool();
        let config = TopicConfig {
            partitions: random.u32(1..3),
            durability,
            segment_bytes: 4096,
            roll_age: random.bool().then_some(Duration::from_millis(200)),
            compaction: compacts.then(|| Compaction {
                tombstones_until: vec!["cache".parse().unwrap()],
            }),
            // Of the seeds that are kept, since they found something, none is changed by it.
            index_by_key: seed % 7 == 1,
            ..TopicConfig::default()
        };
        let disk = FakeDisk::new(seed);
        let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
        let topic = log.create_topic(&topic_name(), &config).unwrap();
        let sources = random.usize(1..4);
        let mut world = Self {
            disk,
            random,
            processes: Vec::new(),
            next: vec![1; sources],
            floor: vec![1; sources],
            oracle: Oracle {
                partitions: topic.partitions().map(|_| Default::default()).collect(),
                sources,
                partitions_least: config.partitions as usize,
                ..Oracle::default()
            },
            outcome: Outcome::default(),
            failed: 0,
            config,
            has_later_actions: matches!(seed % 11, 1 | 7 | 8 | 10),
            forgets: !matches!(seed % 11, 1 | 7 | 8 | 10) && matches!(seed % 17, 4 | 5 | 8 | 9),
        };
        for source in 0..sources {
            let process = start(&world.disk, source);
            world.processes.push(process);
        }
        world
    }

    /// What a crash in front of `step` would leave: looked at on a copy of the machine.
    fn crash_in_front_of(&mut self, step: &Step<'_>, before: Crash) {
        self.outcome.crashes += 1;
        let written = match step.bytes() {
            0 => 0,
            bytes => self.random.usize(0..=bytes),
        };
        let cut = self.random.bool();
        // Killed, perhaps, between a failed sync and the word that stops the others: nobody alive knows of the failure, and
        // the kernel tells it once. Whoever goes on must not believe the next sync.
        let failed = std::mem::replace(&mut self.failed, self.disk.failed());
        let untold = self.failed > failed && !cut;
        trace(|| {
            let (operation, path) = (step.operation, step.path.display());
            format!("  {operation:?} {path}: written {written}, cut {cut}")
        });
        // After a failed sync nobody believes the page cache.
        let crash = if cut || self.disk.failed() > 0 {
            Crash::Loss
        } else {
            before
        };
        let disk = self.disk.fork_within(step, written);
        disk.take_failed();
        disk.set_capacity(u64::MAX);
        if cut {
            disk.cut_power();
        }
        let mut oracle = self.oracle.clone();
        if self.random.u32(0..8) == 0 {
            // The recovery is killed, too.
            disk.kill_at(self.random.u64(1..60));
            let opened = Log::open_on(disk.process(), ROOT, &options());
            if let Ok(log) = opened {
                drop(
                    log.topic(&topic_name())
                        .map(|topic| topic.recover(Partition(0))),
                );
            }
            disk.spare();
            if cut {
                disk.cut_power();
            } else {
                disk.kill_all();
            }
        }
        if self.outcome.crashes % 8 == 3 {
            let is_damaged = oracle.is_damaged();
            recover_without_space(&disk, cut, is_damaged);
        }
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        oracle.check(&log, crash);
        if self.random.u32(0..8) == 0 || untold {
            self.go_on(&disk, &log, &mut oracle);
        }
    }

    /// After a recovery everybody writes on, and what is acknowledged then survives, too.
    fn go_on(&self, disk: &FakeDisk, log: &Log, oracle: &mut Oracle) {
        let topic = log.topic(&topic_name()).unwrap();
        for one in 0..oracle.sources {
            let mut writer = log
                .writer(&source(one), EPOCH, Succession::AfterDrain)
                .unwrap();
            let fact = Fact {
                source: one,
                sequence: self.next[one],
            };
            let (key, value) = (fact.key(), fact.value());
            let partition = topic.route(&fact.identity(), Some(&key));
            let record = fact.record(&key, &value);
            let answer = writer.append(&topic, partition, &[record]).unwrap();
            topic.sync(partition).unwrap();
            trace(|| format!("    goes on: {answer:?}"));
            let facts = &mut oracle.partitions[partition.0 as usize];
            match answer.answers[0] {
                Answer::Stored { offset, .. } => {
                    oracle.maybe.remove(&fact);
                    assert!(!facts.gone.contains(&offset.0), "{offset} is used again");
                    assert_eq!(facts.known.insert(offset.0, fact), None);
                    facts.durable = offset.0 + 1;
                }
                // It was under way when the machine crashed.
                Answer::Duplicate { .. } => assert!(facts.known.values().any(|one| *one == fact)),
                other => panic!("{fact:?}: {other:?}"),
            }
        }
        disk.cut_power();
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        oracle.check(&log, Crash::Loss);
    }
}

/// Somebody recovers on a full disk, as far as that goes, and dies: it works, or says that there is no space, or meets the
/// damage that there is.
fn recover_without_space(disk: &FakeDisk, cut: bool, is_damaged: bool) {
    disk.set_capacity(0);
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let topic = log.topic(&topic_name()).unwrap();
    for partition in topic.partitions() {
        match topic.recover(partition) {
            Ok(report) => assert!(report.damage.is_none() || is_damaged, "{report:?}"),
            Err(AppendError::NoSpace(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    if cut {
        disk.cut_power();
    } else {
        disk.kill_all();
    }
    disk.set_capacity(u64::MAX);
}

fn start(disk: &FakeDisk, number: usize) -> Process {
    let storage = disk.process();
    let log = Log::open_on(Arc::<FakeStorage>::clone(&storage), ROOT, &options()).unwrap();
    let writer = log
        .writer(&source(number), EPOCH, Succession::AfterDrain)
        .unwrap();
    let topic = log.topic(&topic_name()).unwrap();
    Process {
        storage,
        log,
        topic,
        writer,
        source: number,
    }
}

/// Everybody dies, alone or with the machine, and comes back.
pub(super) fn restart(world: &Shared) {
    let crash = {
        let mut world = lock(world);
        world.outcome.failed += world.disk.take_failed();
        let crash = [Crash::Kill, Crash::Loss][world.random.usize(0..2)];
        match crash {
            Crash::Kill => world.disk.kill_all(),
            Crash::Loss => world.disk.cut_power(),
        }
        crash
    };
    begin_again(world, crash);
}

/// Everybody starts, after `crash`; what is found is compared and taken for the truth.
pub(super) fn begin_again(world: &Shared, crash: Crash) {
    let (disk, sources) = {
        let mut world = lock(world);
        world.processes.clear();
        (world.disk.clone(), world.next.len())
    };
    watch(world, crash);
    let processes: Vec<_> = (0..sources).map(|source| start(&disk, source)).collect();
    let log = processes[0].log.clone();
    let topic = log.topic(&topic_name()).unwrap();
    for partition in topic.partitions() {
        topic.recover(partition).unwrap();
    }
    disk.before_each(None);
    let mut world = lock(world);
    world.processes = processes;
    world.oracle.check(&log, crash);
    world.config = topic.config().as_ref().clone();
}

/// One process closes what it has, or is killed, and starts again, while the others live on.
fn reopen(world: &Shared, process: usize) {
    let (disk, log, storage, source, close) = {
        let mut world = lock(world);
        let close = world.random.bool();
        let process = &world.processes[process];
        let (log, storage) = (process.log.clone(), Arc::clone(&process.storage));
        (world.disk.clone(), log, storage, process.source, close)
    };
    if close && let Err(error) = log.close() {
        return recover_from(world, &error);
    }
    disk.kill(&storage);
    if disk.take_failed() > 0 {
        return recover_from(world, &AppendError::Invalid("something failed aside"));
    }
    let fresh = start(&disk, source);
    lock(world).processes[process] = fresh;
}

/// What to do about an error that an action met: whatever was ordered to fail may have been taken for a device that
/// lost something, so everybody begins again.
fn recover_from(world: &Shared, error: &AppendError) {
    if matches!(error, AppendError::Busy { .. }) {
        return;
    }
    {
        let mut world = lock(world);
        world.outcome.failed += world.disk.take_failed();
        world.disk.set_capacity(u64::MAX);
        world.disk.kill_all();
    }
    begin_again(world, Crash::Loss);
}

/// Appends some numbers of a process's source, new ones and now and then some again.
fn append(world: &Shared, process: usize) {
    let facts = {
        let mut world = lock(world);
        let source = world.processes[process].source;
        let again = if world.random.u32(0..4) == 0 {
            world.random.u64(1..6)
        } else {
            0
        };
        let from = world.next[source].saturating_sub(again);
        // What is forgotten would be stored again.
        let from = from.max(world.floor[source]);
        let count = world.random.u64(1..7);
        let facts: Vec<Fact> = (from..from + count)
            .map(|sequence| Fact { source, sequence })
            .collect();
        world.next[source] = world.next[source].max(from + count);
        facts
    };
    let mut waiting = VecDeque::from([facts]);
    while let Some(facts) = waiting.pop_front() {
        let topic = lock(world).processes[process].topic.clone();
        let mut batches: BTreeMap<Partition, Vec<(Fact, Vec<u8>)>> = BTreeMap::new();
        for fact in facts {
            let key = fact.key();
            let partition = topic.route(&fact.identity(), Some(&key));
            batches.entry(partition).or_default().push((fact, key));
        }
        for (partition, batch) in batches {
            match append_to(world, process, &topic, partition, &batch) {
                Ok(()) => {}
                // Nobody has told this process: what it has not stored yet goes by the new number.
                Err(AppendError::Grown { .. }) => {
                    match refresh(world, process, topic.clone()) {
                        Ok(changed) => assert!(changed, "it was told for nothing"),
                        Err(error) => return recover_from(world, &error),
                    }
                    waiting.push_back(batch.into_iter().map(|(fact, _)| fact).collect());
                }
                Err(error) => {
                    recover_from(world, &error);
                    return;
                }
            }
        }
    }
}

fn append_to(
    world: &Shared,
    process: usize,
    topic: &Topic,
    partition: Partition,
    batch: &[(Fact, Vec<u8>)],
) -> Result<(), AppendError> {
    let number = partition.0 as usize;
    let mut writer = {
        let mut world = lock(world);
        let facts = world.oracle.partitions.get(number);
        let known = facts.into_iter().flat_map(|facts| facts.known.values());
        let known: BTreeSet<_> = known.copied().collect();
        let new = batch.iter().map(|(fact, _)| *fact);
        let new: Vec<_> = new.filter(|fact| !known.contains(fact)).collect();
        world.oracle.maybe.extend(new);
        world.processes.remove(process)
    };
    let values: Vec<_> = batch.iter().map(|(fact, _)| fact.value()).collect();
    let records: Vec<_> = batch
        .iter()
        .zip(&values)
        .map(|((fact, key), value)| fact.record(key, value))
        .collect();
    let answer = writer.writer.append(topic, partition, &records);
    let mut world = lock(world);
    world.processes.insert(process, writer);
    let answer = answer?;
    // The first one in a new partition: from now on that has to be there.
    if world.oracle.partitions.len() <= number {
        let partitions = &mut world.oracle.partitions;
        partitions.resize_with(number + 1, PartitionFacts::default);
    }
    let mut acknowledged = 0;
    for ((fact, _), one) in batch.iter().zip(&answer.answers) {
        match one {
            Answer::Stored { offset, .. } => {
                acknowledged += 1;
                assert!(world.oracle.maybe.remove(fact), "{fact:?} is stored twice");
                let facts = &mut world.oracle.partitions[number];
                assert_eq!(facts.known.insert(offset.0, *fact), None, "{offset} again");
                assert!(!facts.gone.contains(&offset.0), "{offset} is used again");
            }
            Answer::Duplicate { .. } => {
                // Answered before; or stored by an append that was not answered, and seen since.
                let facts = &world.oracle.partitions[number];
                let known = facts.known.values().any(|known| known == fact);
                let maybe = world.oracle.maybe.contains(fact);
                assert!(known || maybe, "{fact:?} is no duplicate");
            }
            other => panic!("{fact:?}: {other:?}"),
        }
    }
    world.outcome.acknowledged += acknowledged;
    let facts = &mut world.oracle.partitions[number];
    facts.durable = facts.durable.max(answer.durable.0);
    if answer.durability == Durability::SyncEachBatch && acknowledged > 0 {
        let end = facts.known.keys().next_back().map_or(0, |last| last + 1);
        assert!(end <= answer.durable.0, "answered before it was durable");
    }
    Ok(())
}

/// The topic of a process as its file is now; an operation of that may be one that was ordered to fail.
fn topic_of(log: &Log) -> Result<Topic, AppendError> {
    log.topic(&topic_name()).map_err(|error| match error {
        TopicError::Storage(error) => error.into(),
        error => panic!("{error}"),
    })
}

/// A topic with what others changed of it taken in, which is what a process goes by from now on; and whether that was
/// anything.
fn refresh(world: &Shared, process: usize, mut topic: Topic) -> Result<bool, AppendError> {
    match topic.refresh() {
        Ok(changed) => {
            lock(world).processes[process].topic = topic;
            Ok(changed)
        }
        Err(TopicError::Storage(error)) => Err(error.into()),
        Err(error) => panic!("{error}"),
    }
}

fn sync(world: &Shared, process: usize) {
    let (log, count) = {
        let world = lock(world);
        (
            world.processes[process].log.clone(),
            world.oracle.partitions.len(),
        )
    };
    let topic = match topic_of(&log) {
        Ok(topic) => topic,
        Err(error) => return recover_from(world, &error),
    };
    for number in 0..count {
        match topic.sync(Partition(u32::try_from(number).unwrap())) {
            Ok(durable) => {
                let facts = &mut lock(world).oracle.partitions[number];
                facts.durable = facts.durable.max(durable.0);
            }
            Err(error) => return recover_from(world, &error),
        }
    }
}

fn retain(world: &Shared, process: usize) {
    let (log, policy, number) = {
        let mut world = lock(world);
        let policy = if world.config.compaction.is_some() {
            // Seals by age, and nothing else.
            Retention::default()
        } else if world.random.bool() {
            Retention {
                bytes: Some(world.random.u64(1..6) * 4096),
                ..Retention::default()
            }
        } else {
            Retention {
                age: Some(Duration::from_millis(world.random.u64(1..400))),
                ..Retention::default()
            }
        };
        let count = world.oracle.partitions.len();
        let number = world.random.usize(0..count);
        if !policy.keeps_all() {
            let facts = &mut world.oracle.partitions[number];
            facts.start_most = u64::MAX;
        }
        (world.processes[process].log.clone(), policy, number)
    };
    let partition = Partition(u32::try_from(number).unwrap());
    let retained = topic_of(&log)
        .and_then(|topic| topic.retain(partition, &policy, &Passed::default(), false));
    match retained {
        Ok(retained) => {
            let mut world = lock(world);
            world.outcome.dropped += retained.segments;
            let facts = &mut world.oracle.partitions[number];
            facts.start = retained.start.0;
            facts.start_most = retained.start.0;
        }
        Err(error) => recover_from(world, &error),
    }
}

/// Compacts a partition, while others append in the middle of it.
fn compact(world: &Shared, process: usize) {
    let (log, passed, number, disk) = {
        let mut world = lock(world);
        if world.config.compaction.is_none() {
            return;
        }
        let count = world.oracle.partitions.len();
        let number = world.random.usize(0..count);
        let known = world.oracle.partitions[number].known.keys().next_back();
        let end = known.map_or(0, |last| last + 1);
        let next = world.random.u64(0..=end);
        let facts = &mut world.oracle.partitions[number];
        facts.compacted = true;
        facts.tombstones_passed = facts.tombstones_passed.max(next);
        let mut passed = Passed::default();
        passed.insert(
            "cache".parse().unwrap(),
            Partition(u32::try_from(number).unwrap()),
            teeline_core::Offset(next),
        );
        (
            world.processes[process].log.clone(),
            passed,
            number,
            world.disk.clone(),
        )
    };
    others_work_meanwhile(world, &disk, process, 12, append);
    let topic = match topic_of(&log) {
        Ok(topic) => topic,
        Err(error) => return recover_from(world, &error),
    };
    let compaction = topic.config().compaction.clone().unwrap_or_default();
    let partition = Partition(u32::try_from(number).unwrap());
    match topic.compact(partition, &compaction, &passed, 0, false) {
        Ok(done) => lock(world).outcome.rewritten += done.segments,
        Err(error) => recover_from(world, &error),
    }
}

/// Adds partitions, while others try to append in the middle of it.
fn grow(world: &Shared, process: usize) {
    let topic = lock(world).processes[process].topic.clone();
    if let Err(error) = refresh(world, process, topic) {
        return recover_from(world, &error);
    }
    let (mut topic, more, disk) = {
        let mut world = lock(world);
        let topic = world.processes[process].topic.clone();
        (topic, world.random.u32(1..3), world.disk.clone())
    };
    let partitions = topic.config().partitions + more;
    if partitions > PARTITIONS_MAX {
        return;
    }
    others_work_meanwhile(world, &disk, process, 6, |world, other| {
        let topic = lock(world).processes[other].topic.clone();
        match refresh(world, other, topic) {
            Ok(_) => append(world, other),
            Err(error) => recover_from(world, &error),
        }
    });
    match topic.grow(partitions, false) {
        Ok(growth) => {
            let mut world = lock(world);
            world.outcome.grown += 1;
            world.oracle.partitions_least = growth.after as usize;
            let partitions = &mut world.oracle.partitions;
            partitions.resize_with(growth.after as usize, PartitionFacts::default);
            // The process that did it knows; the others are not told.
            world.processes[process].topic = topic;
        }
        Err(GrowError::Append(error)) => recover_from(world, &error),
        Err(_) => recover_from(world, &AppendError::Invalid("a growth failed")),
    }
}

/// A process dies, and its source is forgotten by another one; then it starts again, and goes on with new numbers.
fn forget(world: &Shared, process: usize) {
    let (disk, number) = {
        let mut world = lock(world);
        let number = world.processes[process].source;
        let next = world.next[number];
        world.floor[number] = next;
        world.oracle.forgetting = Some((number, next));
        let disk = world.disk.clone();
        disk.kill(&world.processes[process].storage);
        (disk, number)
    };
    let forgotten = Log::open_on(disk.process(), ROOT, &options())
        .map_err(|error| error.to_string())
        .and_then(|log| {
            let forgotten = log.forget_source(&source(number), false);
            forgotten.map_err(|error| error.to_string())
        });
    match forgotten {
        Ok(_) if disk.take_failed() == 0 => {
            let fresh = start(&disk, number);
            let mut world = lock(world);
            let (_, floor) = world
                .oracle
                .forgetting
                .take()
                .expect("it is being forgotten");
            for facts in &mut world.oracle.partitions {
                facts.forgotten.insert(number, floor);
            }
            world.outcome.forgotten += 1;
            world.processes[process] = fresh;
        }
        _ => {
            recover_from(world, &AppendError::Invalid("a source was not forgotten"));
            lock(world).oracle.forgetting = None;
        }
    }
}

/// From now on another process does `work` in front of one in `rarely` operations of this one, and a crash is tried in front
/// of each.
fn others_work_meanwhile(
    world: &Shared,
    disk: &FakeDisk,
    process: usize,
    rarely: u32,
    work: fn(&Shared, usize),
) {
    let watched = Arc::clone(world);
    disk.before_each(Some(Box::new(move |step| {
        let other = {
            let mut world = lock(&watched);
            world.crash_in_front_of(step, Crash::Kill);
            let count = world.processes.len();
            (count > 1 && world.random.u32(0..rarely) == 0).then(|| (process + 1) % count)
        };
        if let Some(other) = other {
            work(&watched, other);
        }
    })));
}

/// Configures the topic anew, while others try to append in the middle of it.
fn configure(world: &Shared, process: usize) {
    let (mut topic, which, disk) = {
        let mut world = lock(world);
        let topic = world.processes[process].topic.clone();
        (topic, world.random.u32(0..2), world.disk.clone())
    };
    others_work_meanwhile(world, &disk, process, 6, append);
    let change = |config: &mut TopicConfig| match which {
        0 => config.index_by_key = !config.index_by_key,
        _ => {
            config.roll_age = match config.roll_age {
                Some(_) => None,
                None => Some(Duration::from_millis(200)),
            }
        }
    };
    match topic.configure(change, false) {
        Ok(configured) => {
            let mut world = lock(world);
            world.outcome.configured += 1;
            world.config = configured.after.as_ref().clone();
        }
        Err(ConfigureError::Append(error)) => recover_from(world, &error),
        Err(_) => recover_from(world, &AppendError::Invalid("it was not configured anew")),
    }
}

/// Orders one of the next operations to fail.
fn order_failure(world: &Shared) {
    let mut world = lock(world);
    let operation = [
        Operation::Create,
        Operation::Write,
        Operation::Reserve,
        Operation::Sync,
        Operation::SyncDir,
        Operation::Rename,
        Operation::Remove,
    ][world.random.usize(0..7)];
    let nth = world.random.u64(1..12);
    world.disk.fail(Fault {
        operation,
        path_contains: "/fills".to_owned(),
        nth,
        // A sync that fails so is no full disk.
        kind: if nth.is_multiple_of(4) {
            std::io::ErrorKind::StorageFull
        } else {
            std::io::ErrorKind::Other
        },
    });
}

/// Appends on a full disk, until there is space again.
fn fill_up(world: &Shared, process: usize) {
    let disk = lock(world).disk.clone();
    disk.set_capacity(0);
    append(world, process);
    append(world, process);
    disk.set_capacity(u64::MAX);
}

impl Outcome {
    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            actions: self.actions + other.actions,
            crashes: self.crashes + other.crashes,
            acknowledged: self.acknowledged + other.acknowledged,
            dropped: self.dropped + other.dropped,
            rewritten: self.rewritten + other.rewritten,
            grown: self.grown + other.grown,
            configured: self.configured + other.configured,
            forgotten: self.forgotten + other.forgotten,
            damaged: self.damaged + other.damaged,
            failed: self.failed + other.failed,
        }
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} actions, {} crashes, {} records acknowledged, {} segments dropped, {} rewritten, {} growths, {} configured anew, {} sources forgotten, {} damaged, {} operations failed",
            self.actions,
            self.crashes,
            self.acknowledged,
            self.dropped,
            self.rewritten,
            self.grown,
            self.configured,
            self.forgotten,
            self.damaged,
            self.failed
        )
    }
}
