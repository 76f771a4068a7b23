//! The log: what an append, a sync, a read, a wake and an opening cost, beside what the file system charges for the same.
//!
//! The directory decides what is measured: put it on the disk that the log is to lie on. Rates are those of the time
//! spent in calls; what records contain is made before and compared after.

mod keyed;
mod work;

use std::{cell::Cell, fs, path::PathBuf};

use clap::{Args, ValueEnum};
use teeline_latency::raw::Field;

use self::work::{Appends, Done, Policy, Store};
use super::{Case, Crew, Regime, Round, Stage, StageArgs, Target, measure};
use crate::{
    command::shared_dir::SharedDir,
    output::{Answer, Failure, Output},
};

pub(super) use self::work::Work;

pub(super) const NAME: &str = "log";

/// How the name of the directory begins.
const DIR_PREFIX: &str = "teeline-bench-log.";

/// Processes that append to one partition at once, and threads of one.
const SEVERAL: usize = 8;

/// Bytes of values that are appended in a round without syncs: half a segment.
const ROUND_BYTES: u64 = 32 << 20;

/// Most batches of such a round, and of one that syncs each. With 100 records of 256 bytes, the pairs of a full run fill
/// more than ten segments.
const BATCHES_MAX: u64 = 20_000;
const SYNCED_BATCHES: u64 = 700;

/// Records that are read in a round.
const READ_RECORDS: u64 = 1_000_000;

/// Records that are waited for in a round.
const AWAITED: u64 = 1_000;

/// How long several append at once.
const SEVERAL_FOR_MS: u64 = 300;

/// What the log whose opening is measured pretends to hold.
const OPENED_BYTES: u64 = 10 << 30;

/// Appends, durable appends, reads, wakes, group commit and opening of a log, each beside what the file system charges
/// for the same bytes.
#[derive(Debug, Args)]
pub(crate) struct LogArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Where the log lies: a directory on the disk to measure.
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Only these parts [default: all].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART,…")]
    only: Vec<Part>,
    /// Bytes of a record's value, in the parts `append` and `sync` [default: those with a target, and others].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(8..=1 << 20))]
    size: Option<u32>,
    /// Records of a batch, in the parts `append` and `sync`.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Appends that are left to the operating system.
    Append,
    /// Appends that are synced, each batch.
    Sync,
    /// Reading a partition from its start.
    Read,
    /// Reading all records of one key by the index.
    Key,
    /// From append to the reader that waits for it.
    Tail,
    /// Group commit of threads and of processes.
    Group,
    /// Opening a large log after a kill.
    Open,
}

impl LogArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stage = Stage::set(&self.stage)?;
        let dir = SharedDir::create_in(&self.dir, DIR_PREFIX)?;
        let wants = |part| self.only.is_empty() || self.only.contains(&part);
        // Not pinned: a log has threads that work aside, and its user has other cores for them.
        let mut crew = Crew::start(&stage, NAME, &[None; SEVERAL])?;
        let mut scene = Scene {
            stage: &stage,
            crew: &mut crew,
            dir: &dir,
            round: Cell::new(0),
        };
        let mut answer = Answer::Fine;
        if wants(Part::Append) {
            for (size, batch) in self.sizes(&[100, 256, 1024], &[1, 100, 1000]) {
                let mut regime = Appending::unsynced(&mut scene, size, batch);
                answer = answer.and(measure(&stage, &mut regime, out)?);
            }
        }
        if wants(Part::Sync) {
            for (size, batch) in self.sizes(&[256], &[1, 100, 1000]) {
                for growing in [false, true] {
                    let mut regime = Appending::synced(&mut scene, size, batch, growing);
                    answer = answer.and(measure(&stage, &mut regime, out)?);
                }
            }
        }
        if wants(Part::Read) {
            let mut regime = Reading::prepare(&mut scene)?;
            answer = answer.and(measure(&stage, &mut regime, out)?);
        }
        if wants(Part::Key) {
            for batch in [1, 100] {
                let mut regime = keyed::Reading::prepare(&mut scene, batch)?;
                answer = answer.and(measure(&stage, &mut regime, out)?);
            }
        }
        if wants(Part::Tail) {
            let mut regime = Tailing { scene: &mut scene };
            answer = answer.and(measure(&stage, &mut regime, out)?);
        }
        if wants(Part::Group) {
            for processes in [false, true] {
                let mut regime = Grouping {
                    scene: &mut scene,
                    processes,
                };
                answer = answer.and(measure(&stage, &mut regime, out)?);
            }
        }
        if wants(Part::Open) {
            let mut regime = Opening::prepare(&mut scene)?;
            answer = answer.and(measure(&stage, &mut regime, out)?);
        }
        Ok(answer)
    }

    fn sizes(&self, sizes: &[usize], batches: &[u64]) -> Vec<(usize, u64)> {
        if self.size.is_some() || self.batch.is_some() {
            let size = self.size.unwrap_or(256);
            return vec![(size as usize, self.batch.unwrap_or(100).into())];
        }
        let each = |size: &usize| batches.iter().map(|batch| (*size, *batch)).collect();
        sizes.iter().flat_map::<Vec<_>, _>(each).collect()
    }
}

/// What the regimes share.
struct Scene<'a, 'b> {
    stage: &'a Stage,
    crew: &'b mut Crew<'a, Work>,
    dir: &'a SharedDir,
    round: Cell<u32>,
}

impl Scene<'_, '_> {
    /// A name in the directory that nothing has yet.
    fn fresh(&self) -> Fresh {
        let number = self.round.get();
        self.round.set(number + 1);
        Fresh(self.dir.path().join(format!("place-{number}")))
    }

    /// Lets the first processes do a work each, while the others rest.
    fn play(&mut self, works: Vec<Work>) -> Result<Vec<Done>, Failure> {
        let wanted = works.len();
        let rest = (wanted..SEVERAL).map(|_| Work::Rest);
        let mut done = self.crew.play(works.into_iter().chain(rest).collect())?;
        done.truncate(wanted);
        Ok(done)
    }

    /// What a write into pages that are in memory costs just now. The raw round trip says nothing here: these processes
    /// are not pinned.
    fn probe(&mut self) -> Result<f64, Failure> {
        let path = self.dir.path().join("probe");
        let done = self.play(vec![Work::Probe { path }])?;
        Ok(done.iter().map(|done| done.ns).sum())
    }

    fn play_one(&mut self, work: Work) -> Result<Round, Failure> {
        let done = self.play(vec![work])?;
        Ok(done.into_iter().map(|done| done.round).collect())
    }
}

/// A directory for one round, or several. Goes when it is dropped.
struct Fresh(PathBuf);

impl Drop for Fresh {
    fn drop(&mut self) {
        // What cannot be removed goes with the bench.
        drop(fs::remove_dir_all(&self.0));
    }
}

/// Appends of batches to one partition, beside writes of the values' bytes.
struct Appending<'a, 'b, 'c> {
    scene: &'c mut Scene<'a, 'b>,
    size: usize,
    batch: u64,
    batches: u64,
    synced: Option<Synced>,
    target: Option<Target>,
}

/// What goes on from round to round, so that preparing its segments is part of the run.
struct Synced {
    log: Fresh,
    file: Fresh,
    growing: bool,
    /// Batches appended so far, and written.
    appended: u64,
    written: u64,
}

impl<'a, 'b, 'c> Appending<'a, 'b, 'c> {
    fn unsynced(scene: &'c mut Scene<'a, 'b>, size: usize, batch: u64) -> Self {
        let bytes = size as u64 * batch;
        Self {
            batches: (ROUND_BYTES / bytes).clamp(1, BATCHES_MAX),
            size,
            batch,
            synced: None,
            target: ((size, batch) == (256, 100)).then_some(Target::AtLeast(0.6)),
            scene,
        }
    }

    fn synced(scene: &'c mut Scene<'a, 'b>, size: usize, batch: u64, growing: bool) -> Self {
        let synced = Synced {
            log: scene.fresh(),
            file: scene.fresh(),
            growing,
            appended: 0,
            written: 0,
        };
        let most = if growing { 0.75 } else { 1.15 };
        Self {
            scene,
            size,
            batch,
            batches: SYNCED_BATCHES.min((ROUND_BYTES / (size as u64 * batch)).max(1)),
            synced: Some(synced),
            target: ((size, batch) == (256, 100)).then_some(Target::AtMost(most)),
        }
    }

    fn work(&self, path: PathBuf, store: Store, before: u64) -> Work {
        Work::Append(Appends {
            path,
            store,
            size: self.size,
            batch: self.batch,
            batches: self.scene.stage.count(self.batches),
            before,
            seed: self.scene.stage.seed,
        })
    }
}

impl Regime for Appending<'_, '_, '_> {
    fn case(&self) -> Case {
        let (sync, main, limit) = match &self.synced {
            None => (
                "none",
                "msgs_per_s",
                "write of the same values to a new file",
            ),
            Some(synced) if synced.growing => (
                "each batch",
                "p50_ns",
                "write and sync of the same values to a growing file",
            ),
            Some(_) => (
                "each batch",
                "p50_ns",
                "write and sync of the same values to a file written ahead",
            ),
        };
        Case {
            bench: NAME,
            params: vec![
                ("part", "append".into()),
                ("sync", sync.into()),
                ("size", self.size.into()),
                ("batch", self.batch.into()),
            ],
            main,
            limit: limit.to_owned(),
            target: self.target,
        }
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        let Some(synced) = &mut self.synced else {
            let place = self.scene.fresh();
            let work = self.work(place.0.clone(), Store::Log(Policy::LeaveToOs), 0);
            return self.scene.play_one(work);
        };
        let before = synced.appended;
        let path = synced.log.0.clone();
        synced.appended += self.scene.stage.count(self.batches);
        let work = self.work(path, Store::Log(Policy::SyncEachBatch), before);
        self.scene.play_one(work)
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        let Some(synced) = &mut self.synced else {
            let place = self.scene.fresh();
            let store = Store::File {
                written_ahead: false,
                sync: false,
            };
            let work = self.work(place.0.clone(), store, 0);
            return self.scene.play_one(work);
        };
        let before = synced.written;
        let path = synced.file.0.clone();
        let store = Store::File {
            written_ahead: !synced.growing,
            sync: true,
        };
        synced.written += self.scene.stage.count(self.batches);
        let work = self.work(path, store, before);
        self.scene.play_one(work)
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.scene.probe()
    }

    /// Without syncs: the same writes over a file whose pages are all in memory. No log can be had for that: it would
    /// have to write to the same place twice.
    fn peers(&mut self) -> Result<Vec<(&'static str, Round)>, Failure> {
        if self.synced.is_some() {
            return Ok(Vec::new());
        }
        let place = self.scene.fresh();
        let store = Store::File {
            written_ahead: true,
            sync: false,
        };
        let work = self.work(place.0.clone(), store, 0);
        let round = self.scene.play_one(work)?;
        Ok(vec![("writes over pages that are in memory", round)])
    }
}

/// Reading a partition from its start.
struct Reading<'a, 'b, 'c> {
    scene: &'c mut Scene<'a, 'b>,
    log: Fresh,
}

/// The records that are read: 100 bytes, in batches of 100.
const READ_SIZE: usize = 100;

impl<'a, 'b, 'c> Reading<'a, 'b, 'c> {
    fn prepare(scene: &'c mut Scene<'a, 'b>) -> Result<Self, Failure> {
        let log = scene.fresh();
        let fill = Work::Append(Appends {
            path: log.0.clone(),
            store: Store::Log(Policy::LeaveToOs),
            size: READ_SIZE,
            batch: 100,
            batches: scene.stage.count(READ_RECORDS / 100),
            before: 0,
            seed: scene.stage.seed,
        });
        scene.play_one(fill)?;
        Ok(Self { scene, log })
    }

    fn work(&self, raw: bool) -> Work {
        Work::Read {
            path: self.log.0.clone(),
            raw,
            size: READ_SIZE,
            records: self.scene.stage.count(READ_RECORDS / 100) * 100,
            seed: self.scene.stage.seed,
        }
    }
}

impl Regime for Reading<'_, '_, '_> {
    fn case(&self) -> Case {
        Case {
            bench: NAME,
            params: vec![
                ("part", "read".into()),
                ("size", READ_SIZE.into()),
                ("batch", 100.into()),
            ],
            main: "msgs_per_s",
            limit: "read and CRC-32C of the same files".to_owned(),
            target: None,
        }
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        let work = self.work(false);
        self.scene.play_one(work)
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        let work = self.work(true);
        self.scene.play_one(work)
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.scene.probe()
    }
}

/// From the start of an append to the reader of another process that slept until then.
struct Tailing<'a, 'b, 'c> {
    scene: &'c mut Scene<'a, 'b>,
}

impl Tailing<'_, '_, '_> {
    fn round(&mut self, raw: bool) -> Result<Round, Failure> {
        let shared = self.scene.stage.place()?;
        Field::create(&shared.join("field"), 1).map_err(Failure::new)?;
        let place = self.scene.fresh();
        let work = |appends| Work::Tail {
            path: place.0.clone(),
            field: shared.join("field"),
            page: shared.join("page"),
            raw,
            appends,
            records: self.scene.stage.count(AWAITED),
        };
        let works = vec![work(true), work(false)];
        let done = self.scene.play(works)?;
        Ok(done.into_iter().map(|done| done.round).collect())
    }
}

impl Regime for Tailing<'_, '_, '_> {
    fn case(&self) -> Case {
        Case {
            bench: NAME,
            params: vec![
                ("part", "append to visible".into()),
                ("sync", "none".into()),
            ],
            main: "p50_ns",
            limit: "a word stored and a futex woken".to_owned(),
            target: None,
        }
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        self.round(false)
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        self.round(true)
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.scene.probe()
    }
}

/// Single records, synced each, by several at once; the limit is one.
struct Grouping<'a, 'b, 'c> {
    scene: &'c mut Scene<'a, 'b>,
    processes: bool,
}

impl Grouping<'_, '_, '_> {
    fn round(&mut self, at_once: usize) -> Result<Round, Failure> {
        let place = self.scene.fresh();
        self.scene.play_one(Work::Create {
            path: place.0.clone(),
        })?;
        let (processes, threads) = if self.processes {
            (at_once, 1)
        } else {
            (1, at_once)
        };
        let works = (0..processes).map(|process| Work::Several {
            path: place.0.clone(),
            process,
            threads,
            for_ms: self.scene.stage.count(SEVERAL_FOR_MS).max(20),
        });
        let works = works.collect();
        let done = self.scene.play(works)?;
        let stored: u64 = done.iter().map(|done| done.stored).sum();
        let ns = done.iter().map(|done| done.ns).fold(0.0, f64::max);
        let all: Round = done.into_iter().map(|done| done.round).collect();
        let count = self.scene.play_one(Work::Count {
            path: place.0.clone(),
            stored,
        })?;
        Ok(all.and(count).rates(stored, work::SEVERAL_SIZE, ns))
    }
}

impl Regime for Grouping<'_, '_, '_> {
    fn case(&self) -> Case {
        let (by, least) = if self.processes {
            ("processes", 1.5)
        } else {
            ("threads", 4.0)
        };
        Case {
            bench: NAME,
            params: vec![
                ("part", "group commit".into()),
                ("sync", "each batch".into()),
                ("size", work::SEVERAL_SIZE.into()),
                ("batch", 1.into()),
                (by, SEVERAL.into()),
            ],
            main: "msgs_per_s",
            limit: "one alone".to_owned(),
            target: Some(Target::AtLeast(least)),
        }
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        self.round(SEVERAL)
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        self.round(1)
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.scene.probe()
    }
}

/// Opening for appending a log whose writer was killed.
struct Opening<'a, 'b, 'c> {
    scene: &'c mut Scene<'a, 'b>,
    log: Fresh,
}

impl<'a, 'b, 'c> Opening<'a, 'b, 'c> {
    fn prepare(scene: &'c mut Scene<'a, 'b>) -> Result<Self, Failure> {
        let log = scene.fresh();
        // A process of its own: it is killed in the middle of its appends.
        let mut victim = Crew::start(scene.stage, NAME, &[None])?;
        victim.play(vec![Work::FillAndGoOn {
            path: log.0.clone(),
        }])?;
        drop(victim);
        work::stand_in_for_closed_segments(&log.0, OPENED_BYTES)?;
        Ok(Self { scene, log })
    }
}

impl Regime for Opening<'_, '_, '_> {
    fn case(&self) -> Case {
        Case {
            bench: NAME,
            params: vec![("part", "open".into()), ("bytes", OPENED_BYTES.into())],
            main: "p50_ns",
            limit: "scanning 32 MiB of batches".to_owned(),
            target: Some(Target::AtMost(1.0)),
        }
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        let path = self.log.0.clone();
        self.scene.play_one(Work::Open { path, raw: false })
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        let path = self.log.0.clone();
        self.scene.play_one(Work::Open { path, raw: true })
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.scene.probe()
    }
}
