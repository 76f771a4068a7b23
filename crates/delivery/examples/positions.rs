//! Positions, *atomic*: state and next offset in one transaction. The service is killed in the middle of a batch and
//! started again; each fill counts once.
//!
//! ```sh
//! cargo run --release -p teeline-delivery --example positions
//! ```

mod day;

use std::{
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::Path,
};

use day::{Day, Outcome, name};
use teeline_delivery::{
    hook::CrashPoint,
    positions::{Positions, Snapshot},
};

/// The example, with its files in `dir`.
pub(crate) fn run(dir: &Path, out: &mut dyn Write) -> Outcome {
    let mut day = Day::begin(dir)?;
    day.publish(600)?;
    let database = dir.join("positions.db");
    let open = || Positions::open(&database, &day.log, &name("positions"), &name("fills"));

    let mut service = open()?;
    service.run_once(50)?;
    // It dies with half of its next batch applied, as `kill -9` would have it.
    let mut fills = 0;
    let died = catch_unwind(AssertUnwindSafe(|| {
        service.run_once_with(50, &mut |point| {
            fills += u32::from(matches!(point, CrashPoint::BeforeMessage(_)));
            if fills == 25 {
                resume_unwind(Box::new("killed"));
            }
        })
    }));
    drop(service);
    let counted = Snapshot::read(&database)?.fills();
    writeln!(
        out,
        "killed in the middle of a batch ({}): {counted} of 600 fills are in the positions",
        if died.is_err() {
            "as planned"
        } else {
            "not at all"
        }
    )?;

    let mut service = open()?;
    while service.run_once(50)? > 0 {}
    let snapshot = Snapshot::read(&database)?;
    writeln!(
        out,
        "started again: {} of 600 fills, each once",
        snapshot.fills()
    )?;
    writeln!(out, "\naccount  symbol  quantity       notional  fills")?;
    for position in snapshot.positions.iter().take(5) {
        writeln!(
            out,
            "{:<8} {:<7} {:>8} {:>14} {:>6}",
            position.account, position.symbol, position.quantity, position.notional, position.fills
        )?;
    }
    writeln!(out, "… {} positions", snapshot.positions.len())?;
    Ok(())
}

#[allow(dead_code, reason = "a test runs the example without it")]
fn main() -> Outcome {
    run(tempfile::tempdir()?.path(), &mut std::io::stdout())
}
