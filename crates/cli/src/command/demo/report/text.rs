//! The report for people.

use teeline_latency::Summary;

use super::{
    super::{
        audit::{Audit, Count},
        roles::Role,
    },
    Report,
};
use crate::output::{Failure, Output};

impl Report<'_> {
    /// Prints the report for people.
    pub(super) fn text(&self, out: &mut Output) -> Result<(), Failure> {
        self.story(out)?;
        self.figures(out)?;
        out.line(self.verdict())?;
        for example in &self.audit.positions_examples {
            out.line(format_args!("  {example}"))?;
        }
        if let Some(kept) = &self.kept {
            out.line(format_args!(
                "Log, database and what the processes said are kept in {}{}.",
                kept.display(),
                if self.passed() {
                    ""
                } else {
                    ", with a copy of the rings"
                }
            ))?;
        }
        self.end_positions(out)?;
        self.latency(out)
    }

    /// What was done.
    fn story(&self, out: &mut Output) -> Result<(), Failure> {
        let Self {
            input, run, seed, ..
        } = self;
        out.line(format_args!(
            "{} {}, seed {seed}, in {:.1} s:",
            grouped(self.audit.fills),
            input.title,
            run.elapsed.as_secs_f64()
        ))?;
        out.line("")?;
        out.line("  strategy ──orders──▶ gateway ──fills──▶ bridge ──▶ log on disk ──▶ positions")?;
        out.line("           a ring in            a ring in       4 partitions       a database")?;
        out.line("         shared memory        shared memory")?;
        out.line("")?;
        if run.kills.values().all(|kills| *kills == 0) {
            out.line("Each of the four is a process. None was killed.")?;
        } else {
            let kills = run.kills.iter();
            let kills: Vec<_> = kills
                .map(|(role, kills)| format!("{} {}", role.name(), times(*kills)))
                .collect();
            out.line("Each of the four is a process. While they worked they were killed with SIGKILL, at random moments, and")?;
            out.line(format_args!("started again: {}.", kills.join(", ")))?;
        }
        if self.lose_ring {
            out.line("In the middle both rings were lost, as in a reboot: the gateway asked the log where it had been, and")?;
            out.line("went on in a new epoch.")?;
        }
        out.line("")
    }

    /// What the audit counted.
    fn figures(&self, out: &mut Output) -> Result<(), Failure> {
        let Audit {
            fills,
            published,
            in_log,
            lost,
            duplicated,
            positions,
            positions_wrong,
            ..
        } = self.audit;
        let mut figure = |name: &str, value: u64, remark: &str| {
            out.line(
                format_args!("  {name:<24}{:>12}   {remark}", grouped(value))
                    .to_string()
                    .trim_end(),
            )
        };
        let again = published.saturating_sub(*fills);
        let again = if again > 0 {
            format!(
                "{} of them again, since they went with the ring",
                grouped(again)
            )
        } else {
            String::new()
        };
        figure("fills in the input", *fills, "")?;
        figure("published in the ring", *published, &again)?;
        figure("stored in the log", *in_log, "")?;
        figure("lost", lost.count, &examples(lost))?;
        figure("duplicated", duplicated.count, &examples(duplicated))?;
        let equal = format!(
            "{} differ from what the input makes",
            grouped(*positions_wrong)
        );
        figure(
            "positions",
            *positions,
            if *positions_wrong == 0 {
                "all equal to what the input makes"
            } else {
                &equal
            },
        )?;
        if self.input.skipped > 0 {
            figure(
                "skipped in the input",
                self.input.skipped,
                "executions of orders entered before the file begins",
            )?;
        }
        out.line("")
    }

    fn verdict(&self) -> String {
        if let Some(why) = &self.run.given_up {
            return format!("FAILED: the run was given up: {why}");
        }
        if self.passed() {
            return "PASSED: every fill is in the log exactly once, and counts in the positions exactly once.".to_owned();
        }
        let audit = self.audit;
        let wrong = [
            (&audit.lost, "lost"),
            (&audit.duplicated, "duplicated"),
            (&audit.altered, "altered"),
            (&audit.misplaced, "misplaced"),
            (&audit.not_stored, "in the ring but not in the log"),
        ];
        let mut wrong: Vec<_> = wrong
            .into_iter()
            .filter(|(wrong, _)| wrong.count > 0)
            .map(|(wrong, what)| format!("{} {what}", grouped(wrong.count)))
            .collect();
        if !audit.positions_match() {
            wrong.push(format!(
                "{} positions wrong",
                grouped(audit.positions_wrong)
            ));
        }
        wrong.extend(audit.unreadable.iter().cloned());
        format!("FAILED: {}.", wrong.join(", "))
    }

    /// Where the input states positions before its first fill: those after its last.
    fn end_positions(&self, out: &mut Output) -> Result<(), Failure> {
        let ends = self.ends();
        if ends.is_empty() {
            return Ok(());
        }
        let flat = ends.values().filter(|end| end.is_zero()).count();
        let open: Vec<_> = ends
            .iter()
            .filter(|(_, end)| !end.is_zero())
            .map(|(symbol, end)| format!("{symbol} {end}"))
            .collect();
        let open = if open.is_empty() {
            String::new()
        } else {
            format!("; open: {}", open.join(", "))
        };
        out.line("")?;
        out.line(format_args!(
            "With what the account held before, {flat} of {} positions end at exactly 0{open}.",
            ends.len()
        ))
    }

    fn latency(&self, out: &mut Output) -> Result<(), Failure> {
        let latency = &self.latency;
        let cpu = |role| match self.cpus.get(&role) {
            Some(cpu) => format!("cpu {cpu}"),
            None => "any cpu".to_owned(),
        };
        let [strategy, gateway, bridge] = [Role::Strategy, Role::Gateway, Role::Bridge].map(cpu);
        let row = |hop: &str, place: String, summary: &Summary| {
            let Summary {
                p50,
                p99,
                p999,
                max,
                count,
            } = *summary;
            let mut row = vec![hop.to_owned(), place];
            row.extend([p50, p99, p999, max].map(time));
            row.push(grouped(count));
            row
        };
        let mut rows = vec![
            row("publish a fill", gateway.clone(), &latency.publish),
            row(
                "ring hop of an order",
                format!("{strategy} to {gateway}"),
                &latency.ring_hop,
            ),
            row(
                "ring hop of a fill",
                format!("{gateway} to {bridge}"),
                &latency.bridge_hop,
            ),
            row(
                "fill durable in the log",
                format!("{bridge}, {}", self.filesystem),
                &latency.durable,
            ),
        ];
        if let Some(round_trip) = latency.cache_line_rtt_ns {
            let limit = "limit: a cache line there and back".to_owned();
            rows.push(vec![
                limit,
                format!("{strategy} and {gateway}"),
                time(round_trip),
            ]);
        }
        out.line("")?;
        out.table(
            &["latency", "where", "p50", "p99", "p99.9", "max", "count"],
            &rows,
        )?;
        out.line("A fill waits for the bridge while that makes the fills before it durable.")
    }
}

/// The first execution ids of a count, for people.
fn examples(count: &Count) -> String {
    if count.examples.is_empty() {
        return String::new();
    }
    let ids: Vec<_> = count.examples.iter().map(u64::to_string).collect();
    let more = if count.count > count.examples.len() as u64 {
        ", …"
    } else {
        ""
    };
    format!("execution ids {}{more}", ids.join(", "))
}

/// How often, in words.
fn times(count: u32) -> String {
    match count {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        _ => format!("{count} times"),
    }
}

/// A time in the unit that suits it.
fn time(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns} ns"),
        10_000..1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        _ => format!("{:.1} ms", ns as f64 / 1e6),
    }
}

/// A number with its thousands apart.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::{grouped, time, times};

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            [0, 999, 1_000, 1_234_567].map(grouped),
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(
            [0, 1, 2, 3].map(times),
            ["0 times", "once", "twice", "3 times"]
        );
        assert_eq!(
            [372, 12_345, 5_400_000].map(time),
            ["372 ns", "12.3 µs", "5.4 ms"]
        );
    }
}
