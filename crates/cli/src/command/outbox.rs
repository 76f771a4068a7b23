//! `teeline outbox`: the relay from an application's outbox to the log.

use std::{path::PathBuf, sync::Arc, time::Duration};

use clap::{Args, Subcommand};
use serde::Serialize;
use teeline_core::{Name, SourceName};
use teeline_delivery::{
    outbox::{self, Relay, RelayOptions, Status},
    store::Database,
};
use teeline_log::{Log, LogOptions, Succession, sqlite};
use teeline_os::SystemClock;
use teeline_sync::atomic::Ordering;

use crate::{
    command::signals::{STOP, stop_on_signals},
    output::{Answer, Failure, Output},
};

/// How long an idle relay sleeps between two looks: from the first to the longest, doubling.
const NAP_FIRST: Duration = Duration::from_millis(2);
const NAP_LONGEST: Duration = Duration::from_millis(100);

/// Where the outbox is.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Where {
    /// SQLite database of the application.
    #[arg(long, value_name = "FILE")]
    db: Option<PathBuf>,
    /// PostgreSQL database of the application, as a connection string; `sslmode` and `sslrootcert` encrypt it.
    #[arg(long, value_name = "CONNECTION")]
    postgres: Option<String>,
}

/// What a relay is told.
#[derive(Debug, Args)]
pub(crate) struct RelayArgs {
    /// The log's directory.
    #[arg(long, value_name = "DIR")]
    log: PathBuf,
    /// The topic; its durability has to be sync-each-batch.
    #[arg(long)]
    topic: Name,
    /// The source under which the events are published.
    #[arg(long)]
    source: SourceName,
    /// End when nothing is left.
    #[arg(long)]
    once: bool,
    /// Most events that are numbered, appended and marked together.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    batch: u32,
    /// How long this relay keeps others out after it was killed.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    lease: u64,
    /// The outbox was made anew, and what the one before had not sent is lost: go on all the same.
    #[arg(long)]
    abandon: bool,
}

/// The verbs of `teeline outbox`.
#[derive(Debug, Subcommand)]
pub(crate) enum OutboxVerb {
    /// Take what an application has committed to its outbox to the log, until SIGTERM.
    Relay {
        #[command(flatten)]
        place: Where,
        #[command(flatten)]
        relay: RelayArgs,
    },
    /// Say how far an outbox is: exit status 1 if something is waiting.
    Status {
        #[command(flatten)]
        place: Where,
    },
}

#[derive(Serialize)]
struct StatusLine {
    incarnation: u64,
    /// Committed events without a number.
    waiting: u64,
    numbered: u64,
    /// The last number that is known to be in the log.
    marked: u64,
    holder: String,
    lease_until_ns: u64,
}

/// What a relay has done by its end.
#[derive(Serialize)]
struct RelayedLine {
    relayed: u64,
    marked: u64,
    sqlite: &'static str,
}

impl OutboxVerb {
    /// Does what the verb says.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let answer = match self {
            Self::Relay { place, relay } => place.with(Relaying { relay, out }),
            Self::Status { place } => place.with(Asking { out }),
        }?;
        out.flush()?;
        Ok(answer)
    }
}

/// Something to do with a database, whichever it is.
trait Errand {
    fn run<D: Database>(self, database: D) -> Result<Answer, Failure>;
}

impl Where {
    fn with(self, errand: impl Errand) -> Result<Answer, Failure> {
        match (self.db, self.postgres) {
            (Some(path), _) => {
                let database = sqlite::Database::attach(&path, "database of an application");
                errand.run(database.map_err(Failure::new)?)
            }
            #[cfg(feature = "postgres")]
            (None, Some(connection)) => {
                let database = teeline_delivery::store::postgres::Postgres::connect(&connection);
                errand.run(database.map_err(Failure::new)?)
            }
            _ => Err(Failure::new(
                "this teeline was built without PostgreSQL: build it with `--features postgres`",
            )),
        }
    }
}

impl RelayArgs {
    fn options(&self) -> RelayOptions {
        RelayOptions {
            holder: format!("process {} on {}", std::process::id(), host()),
            lease: Duration::from_secs(self.lease),
            succession: match self.abandon {
                true => Succession::Abandon,
                false => Succession::AfterDrain,
            },
        }
    }
}

struct Relaying<'a> {
    relay: RelayArgs,
    out: &'a mut Output,
}

impl Errand for Relaying<'_> {
    fn run<D: Database>(self, database: D) -> Result<Answer, Failure> {
        let Self { relay: args, out } = self;
        let stop = stop_on_signals(&STOP)?;
        let log = Log::open(&args.log, &LogOptions::default()).map_err(Failure::new)?;
        let name = database.name();
        let clock = Arc::new(SystemClock);
        let mut relay = Relay::open(
            database,
            &log,
            &args.topic,
            &args.source,
            args.options(),
            clock,
        )
        .map_err(Failure::new)?;
        if !out.is_json() {
            out.line(format_args!(
                "relaying {name} to topic {} as {}, SQLite {}",
                args.topic,
                args.source,
                rusqlite::version()
            ))?;
            out.flush()?;
        }
        let mut relayed = 0;
        let mut nap = NAP_FIRST;
        while !stop.load(Ordering::Relaxed) {
            match relay.run_once(args.batch as usize).map_err(Failure::new)? {
                0 if args.once => break,
                0 => {
                    teeline_os::sleep(nap);
                    nap = NAP_LONGEST.min(nap * 2);
                }
                some => {
                    relayed += some as u64;
                    nap = NAP_FIRST;
                }
            }
        }
        let marked = relay.status().map_err(Failure::new)?.marked;
        relay.close().map_err(Failure::new)?;
        if out.is_json() {
            out.object(&RelayedLine {
                relayed,
                marked,
                sqlite: rusqlite::version(),
            })?;
        } else {
            out.line(format_args!(
                "{relayed} events relayed, the last one is number {marked}"
            ))?;
        }
        Ok(Answer::Fine)
    }
}

struct Asking<'a> {
    out: &'a mut Output,
}

impl Errand for Asking<'_> {
    fn run<D: Database>(self, mut database: D) -> Result<Answer, Failure> {
        let status = database
            .read("read the outbox in", |tx| outbox::status(tx))
            .map_err(Failure::new)?
            .ok_or_else(|| Failure::new(format!("{} has no outbox", database.name())))?;
        let Status {
            incarnation,
            waiting,
            numbered,
            marked,
            holder,
            until_ns,
        } = status;
        if self.out.is_json() {
            self.out.object(&StatusLine {
                incarnation: incarnation.0,
                waiting,
                numbered,
                marked,
                holder,
                lease_until_ns: until_ns,
            })?;
        } else {
            let holder = match until_ns {
                0 => "none".to_owned(),
                _ => holder,
            };
            for (name, fact) in [
                ("incarnation", incarnation.to_string()),
                ("waiting", waiting.to_string()),
                ("numbered", numbered.to_string()),
                ("in the log", marked.to_string()),
                ("relay", holder),
            ] {
                self.out.line(format_args!("{name:<12} {fact}"))?;
            }
        }
        Ok(match waiting == 0 && numbered == marked {
            true => Answer::Fine,
            false => Answer::No,
        })
    }
}

/// This host's name, for people.
fn host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}
