//! `teeline reconcile`: positions compared with a drop copy.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use clap::Args;
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};
use teeline_core::{Name, Offset};
use teeline_delivery::positions::{
    AccountPosition, Cause, Difference, FILL, Fill, Side, Snapshot, reconcile,
};
use teeline_log::{Log, LogOptions, Record};
use teeline_os::Context;

use crate::output::{Answer, Failure, Output};

/// Compare positions with a drop copy: differences by account and symbol, and which fills explain them. Exit status 1 if
/// there are any.
///
/// The drop copy is a file of JSON lines, one fill each: {"exec_id":1,"account":"acct-3","symbol":"AAPL","side":"buy",
/// "price":"293.05","quantity":"100"}. Decimals are texts, so that they are exact.
///
/// From the two alone, a difference is explained by fills that make up exactly its quantity, notional and count. With the
/// log that the positions were computed from, each fill is compared.
#[derive(Debug, Args)]
pub(crate) struct ReconcileArgs {
    /// The positions database.
    #[arg(long, value_name = "DB")]
    positions: PathBuf,
    /// The drop copy.
    #[arg(long, value_name = "FILE")]
    drop_copy: PathBuf,
    /// Directory of the log that the positions were computed from.
    #[arg(long, value_name = "DIR")]
    log: Option<PathBuf>,
}

/// A line of a drop copy.
#[derive(Debug, Deserialize, Serialize)]
struct FillLine {
    exec_id: u64,
    account: String,
    symbol: String,
    side: SideName,
    price: String,
    quantity: String,
    #[serde(default)]
    event_time_ns: u64,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum SideName {
    Buy,
    Sell,
}

#[derive(Serialize)]
struct DifferenceLine<'a> {
    account: &'a str,
    symbol: &'a str,
    ours: Figures,
    theirs: Figures,
    is_explained: bool,
    fills: Vec<CauseLine>,
}

#[derive(Serialize)]
struct Figures {
    quantity: String,
    notional: String,
    fills: u64,
}

#[derive(Serialize)]
struct CauseLine {
    /// `missing`, `repeated`, `different` or `unknown`.
    cause: &'static str,
    /// Whether it follows from sums alone.
    by_sums: bool,
    #[serde(flatten)]
    fill: FillLine,
    /// Ours, where it is different.
    ours: Option<FillLine>,
}

#[derive(Serialize)]
struct SummaryLine {
    compared: usize,
    differences: usize,
    unexplained: usize,
}

impl ReconcileArgs {
    /// Compares.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let snapshot = Snapshot::read(&self.positions).map_err(Failure::new)?;
        let theirs = read_drop_copy(&self.drop_copy)?;
        let logged = self.log.as_deref().map(|root| read_log(root, &snapshot));
        let logged = logged.transpose()?;
        let differences =
            reconcile(&snapshot.positions, &theirs, logged.as_deref()).map_err(|inexact| {
                Failure::new(format!(
                    "the fills of one position cannot be added up: {inexact}"
                ))
            })?;
        for difference in &differences {
            match out.is_json() {
                true => out.object(&line(difference))?,
                false => print(difference, out)?,
            }
        }
        let unexplained = differences.iter().filter(|d| !d.is_explained).count();
        let summary = SummaryLine {
            compared: theirs.len(),
            differences: differences.len(),
            unexplained,
        };
        match out.is_json() {
            true => out.object(&summary)?,
            false => self.sum_up(&summary, out)?,
        }
        out.flush()?;
        Ok(match differences.is_empty() {
            true => Answer::Fine,
            false => Answer::No,
        })
    }

    fn sum_up(&self, summary: &SummaryLine, out: &mut Output) -> Result<(), Failure> {
        let SummaryLine {
            compared,
            differences,
            unexplained,
        } = summary;
        match (differences, unexplained) {
            (0, _) => out.line(format_args!("{compared} fills compared: no difference")),
            (_, 0) => out.line(format_args!(
                "{compared} fills compared: {differences} positions differ, all explained"
            )),
            _ => {
                out.line(format_args!(
                    "{compared} fills compared: {differences} positions differ, {unexplained} of them unexplained"
                ))?;
                match self.log {
                    None => out.line("name the log (--log) to compare fill by fill"),
                    Some(_) => Ok(()),
                }
            }
        }
    }
}

fn read_drop_copy(path: &Path) -> Result<Vec<Fill>, Failure> {
    let file = File::open(path)
        .context("open", path)
        .map_err(Failure::new)?;
    let mut fills = Vec::new();
    for (number, text) in (1..).zip(BufReader::new(file).lines()) {
        let text = text.context("read", path).map_err(Failure::new)?;
        if text.trim().is_empty() {
            continue;
        }
        let wrong = |what: &dyn std::fmt::Display| {
            Failure::new(format!("{}, line {number}: {what}", path.display()))
        };
        let line: FillLine = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
        let decimal = |text: &str| {
            Decimal::from_str_exact(text).map_err(|error| wrong(&format_args!("`{text}`: {error}")))
        };
        fills.push(Fill {
            exec_id: line.exec_id,
            side: match line.side {
                SideName::Buy => Side::Buy,
                SideName::Sell => Side::Sell,
            },
            price: decimal(&line.price)?,
            quantity: decimal(&line.quantity)?,
            account: line.account,
            symbol: line.symbol,
            event_time_ns: line.event_time_ns,
        });
    }
    Ok(fills)
}

/// The fills that the positions cover.
fn read_log(root: &Path, snapshot: &Snapshot) -> Result<Vec<Fill>, Failure> {
    let log = Log::open(root, &LogOptions::read_only()).map_err(Failure::new)?;
    let mut fills = Vec::new();
    for progress in &snapshot.progress {
        if progress.log != log.id().to_string() {
            return Err(Failure::new(format!(
                "the positions are of log {}, and {} is log {}",
                progress.log,
                root.display(),
                log.id()
            )));
        }
        let topic: Name = progress.topic.parse().map_err(Failure::new)?;
        let topic = log.topic(&topic).map_err(Failure::new)?;
        let partition = progress.partition;
        let start = topic.start(partition).map_err(Failure::new)?;
        if start > Offset(0) {
            return Err(Failure::new(format!(
                "the log has dropped fills before offset {start} of partition {partition}: compare without it"
            )));
        }
        let mut reader = topic.reader(partition, start).map_err(Failure::new)?;
        let mut wrong = None;
        let mut read = |record: &Record<'_>| {
            if record.offset >= progress.next || record.control.is_some() || record.kind != FILL {
                return;
            }
            match Fill::decode(record.value) {
                Ok(fill) => fills.push(fill),
                Err(error) => wrong = Some((record.offset, error)),
            }
        };
        while reader.position() < progress.next
            && reader.poll(1_000, &mut read).map_err(Failure::new)? > 0
        {}
        if let Some((offset, error)) = wrong {
            let name = topic.name();
            return Err(Failure::new(format!(
                "{name}/{partition}@{offset} is no fill: {error}"
            )));
        }
    }
    Ok(fills)
}

fn print(difference: &Difference, out: &mut Output) -> Result<(), Failure> {
    let Difference {
        account,
        symbol,
        ours,
        theirs,
        fills,
        is_explained,
    } = difference;
    out.line(format_args!(
        "{account} in {symbol}: {} from {} fills, the drop copy says {} from {}",
        ours.quantity, ours.fills, theirs.quantity, theirs.fills
    ))?;
    for explanation in fills {
        let fill = &explanation.fill;
        let terms = format!("{} {} at {}", fill.side, fill.quantity, fill.price);
        let what = match &explanation.cause {
            Cause::Missing => "is missing".to_owned(),
            Cause::Repeated => "counts once more".to_owned(),
            Cause::Different(ours) => format!(
                "is different: {} {} at {} here",
                ours.side, ours.quantity, ours.price
            ),
            Cause::Unknown => "is not in the drop copy".to_owned(),
        };
        let by_sums = match explanation.by_sums {
            true => ", by sums",
            false => "",
        };
        out.line(format_args!(
            "  execution {:<10} {terms:<28} {what}{by_sums}",
            fill.exec_id
        ))?;
    }
    if !is_explained {
        out.line("  no fills make up the difference")?;
    }
    Ok(())
}

fn line(difference: &Difference) -> DifferenceLine<'_> {
    let figures = |position: &AccountPosition| Figures {
        quantity: position.quantity.to_string(),
        notional: position.notional.to_string(),
        fills: position.fills,
    };
    let causes = difference.fills.iter().map(|explanation| {
        let (cause, ours) = match &explanation.cause {
            Cause::Missing => ("missing", None),
            Cause::Repeated => ("repeated", None),
            Cause::Different(ours) => ("different", Some(fill_line(ours))),
            Cause::Unknown => ("unknown", None),
        };
        CauseLine {
            cause,
            by_sums: explanation.by_sums,
            fill: fill_line(&explanation.fill),
            ours,
        }
    });
    DifferenceLine {
        account: &difference.account,
        symbol: &difference.symbol,
        ours: figures(&difference.ours),
        theirs: figures(&difference.theirs),
        is_explained: difference.is_explained,
        fills: causes.collect(),
    }
}

fn fill_line(fill: &Fill) -> FillLine {
    FillLine {
        exec_id: fill.exec_id,
        account: fill.account.clone(),
        symbol: fill.symbol.clone(),
        side: match fill.side {
            Side::Buy => SideName::Buy,
            Side::Sell => SideName::Sell,
        },
        price: fill.price.to_string(),
        quantity: fill.quantity.to_string(),
        event_time_ns: fill.event_time_ns,
    }
}
