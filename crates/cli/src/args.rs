//! The command line: which verbs there are, and the way from an argument list to an exit status.

use std::{ffi::OsString, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::{
    command::{
        bench::{BenchVerb, WorkerArgs},
        bridge::BridgeVerb,
        crash_lab::{ConsumerArgs, CrashLabArgs},
        demo::{DemoArgs, RoleArgs},
        dlq::DlqVerb,
        feed::FeedVerb,
        log::LogVerb,
        outbox::OutboxVerb,
        reconcile::ReconcileArgs,
        ring::RingVerb,
        signals::survive_file_size_limit,
    },
    output::{Answer, Output},
};

const EXIT_STATUS: &str = "Exit status: 0 is fine, 1 means that the check a verb makes says no (a lost message, a damaged log), \
     2 wrong use or environment, or that something failed; standard error says what, a line each.";

/// A trading firm's order, fill and market-data path: shared-memory rings, a durable log, exactly-once effects.
#[derive(Debug, Parser)]
#[command(name = "teeline", version, after_help = EXIT_STATUS)]
struct Cli {
    /// Print one JSON object a line instead of text for people.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// See it work: carry fills, kill everything on the way, and prove that each counts once.
    Demo(DemoArgs),
    /// Let consumers crash, and count what that loses and repeats in each delivery mode.
    CrashLab(CrashLabArgs),
    /// Make rings, look at them, evict consumers and remove them.
    #[command(subcommand)]
    Ring(RingVerb),
    /// Make, fill, look at and look after a log: topics, records, offsets of groups, health.
    #[command(subcommand)]
    Log(LogVerb),
    /// Look at dead letters of a group, redrive and drop them.
    #[command(subcommand)]
    Dlq(DlqVerb),
    /// Take an application's outbox to the log.
    #[command(subcommand)]
    Outbox(OutboxVerb),
    Reconcile(ReconcileArgs),
    /// Tee rings into the log.
    #[command(subcommand)]
    Bridge(BridgeVerb),
    /// Market data over multicast (MoldUDP64), and captures of it.
    #[command(subcommand)]
    Feed(FeedVerb),
    /// Measure this host: teeline beside the limit of the machine.
    #[command(subcommand)]
    Bench(BenchVerb),
    /// Be one process of the demo, which starts it.
    #[command(hide = true)]
    DemoRole(RoleArgs),
    /// Be a consumer of the crash lab, which starts it.
    #[command(hide = true)]
    CrashLabConsumer(ConsumerArgs),
    /// Be one process of a bench, which starts it.
    #[command(hide = true)]
    BenchWorker(WorkerArgs),
}

/// Runs the command line `args`, the program's name first, and returns the exit status.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(usage) => {
            // Help and version are errors to clap, too: it knows where each belongs and with which status.
            return match usage.print() {
                Ok(()) => u8::try_from(usage.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from),
                Err(_) => ExitCode::from(2),
            };
        }
    };
    survive_file_size_limit();
    let mut out = Output::stdout(cli.json);
    let answer = match cli.verb {
        Verb::Demo(demo) => demo.run(&mut out),
        Verb::CrashLab(lab) => lab.run(&mut out),
        Verb::Ring(verb) => verb.run(&mut out),
        Verb::Log(verb) => verb.run(&mut out),
        Verb::Dlq(verb) => verb.run(&mut out),
        Verb::Outbox(verb) => verb.run(&mut out),
        Verb::Reconcile(reconcile) => reconcile.run(&mut out),
        Verb::Bridge(verb) => verb.run(&mut out),
        Verb::Feed(verb) => verb.run(&mut out),
        Verb::Bench(verb) => verb.run(&mut out),
        Verb::DemoRole(role) => role.run(),
        Verb::CrashLabConsumer(consumer) => consumer.run(),
        Verb::BenchWorker(worker) => worker.run(),
    };
    Answer::exit(answer)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Cli;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
