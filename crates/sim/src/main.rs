//! `sim log FIRST..END [ACTIONS]`: runs the histories of these seeds, and says what they were.
#![forbid(unsafe_code)]

use std::{ops::Range, process::ExitCode};

use teeline_sim::log::{Outcome, run};

/// Actions of a history, unless the command says otherwise.
const ACTIONS: u64 = 40;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (seeds, actions) = match args[..] {
        ["log", seeds] => (range(seeds), Some(ACTIONS)),
        ["log", seeds, actions] => (range(seeds), actions.parse().ok()),
        _ => (None, None),
    };
    let (Some(seeds), Some(actions)) = (seeds, actions) else {
        eprintln!("usage: sim log FIRST..END [ACTIONS]");
        return ExitCode::from(2);
    };
    let mut sum = Outcome::default();
    let mut failed = Vec::new();
    for seed in seeds.clone() {
        match std::panic::catch_unwind(|| run(seed, actions)) {
            Ok(outcome) => sum = sum.plus(&outcome),
            Err(_) => {
                eprintln!(
                    "seed {seed} failed; again: sim log {seed}..{} {actions}",
                    seed + 1
                );
                failed.push(seed);
            }
        }
    }
    println!(
        "seeds {}..{}, {} histories of {actions} actions, {} failed {failed:?}: {sum}",
        seeds.start,
        seeds.end,
        seeds.end - seeds.start,
        failed.len(),
    );
    ExitCode::from(u8::from(!failed.is_empty()))
}

fn range(text: &str) -> Option<Range<u64>> {
    let (first, end) = text.split_once("..")?;
    Some(first.parse().ok()?..end.parse().ok()?)
}
