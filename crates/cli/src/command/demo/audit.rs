//! Whether every fact arrived exactly once: the rings, the log and the positions database, compared with the input.
//!
//! This shares no code with what is audited: it reads the log's records one by one, asks the database in SQL, and
//! computes the positions anew, in integers.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use rusqlite::{Connection, OpenFlags};
use rust_decimal::Decimal;
use teeline_core::{Offset, Partition};
use teeline_delivery::positions::{FILL, Fill, Side};
use teeline_log::{Log, LogOptions, Record};
use teeline_ring::{Frame, inspect};

use super::{
    inputs::Input,
    workplace::{self, FILLS, Paths, TOPIC},
};
use crate::output::Failure;

/// Most examples that are kept of each thing that is wrong.
const EXAMPLES_MAX: usize = 10;

/// Records read from the log at once.
const RECORDS_PER_POLL: usize = 1_024;

/// A fill ring as it was left: the flight recorder of its last messages.
#[derive(Debug)]
pub(crate) struct RingRemains {
    /// Which life of the source.
    pub(crate) epoch: u64,
    /// How many messages were published in it.
    pub(crate) last_sequence: u64,
    /// Sequence and execution id of the messages that can still be read.
    messages: Vec<(u64, u64)>,
}

impl RingRemains {
    /// Reads what is left in the ring `dir`, while nobody uses it; `None` when there is no ring.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, Failure> {
        if !dir.exists() {
            return Ok(None);
        }
        let stat = inspect::stat(dir).map_err(Failure::new)?;
        let mut messages = Vec::new();
        let mut foreign = None;
        let note = |frame: Frame<'_>, _| {
            if let Frame::Message(message) = frame {
                match Fill::decode(message.payload) {
                    Ok(fill) => messages.push((message.sequence.0, fill.exec_id)),
                    Err(error) => foreign = Some(error),
                }
            }
        };
        inspect::dump(dir, note).map_err(Failure::new)?;
        match foreign {
            Some(error) => Err(Failure::new(format!(
                "{} holds a message that is no fill: {error}",
                dir.display()
            ))),
            None => Ok(Some(Self {
                epoch: stat.ring.epoch.0,
                last_sequence: stat.last_sequence.0,
                messages,
            })),
        }
    }
}

/// What the audit found. Every number that is not wanted is counted exactly.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    /// Facts in the input.
    pub(crate) fills: u64,
    /// Messages published in all lives of the fill ring.
    pub(crate) published: u64,
    /// Lives of the fill ring.
    pub(crate) epochs: u64,
    /// Messages that went with a lost ring before they were in the log, as far as its memory goes back.
    pub(crate) went_with_ring: u64,
    /// Fills in the log.
    pub(crate) in_log: u64,
    /// Facts that are not in the log.
    pub(crate) lost: Count,
    /// Records in the log too many.
    pub(crate) duplicated: Count,
    /// Records in the log that are not what the input says.
    pub(crate) altered: Count,
    /// Records in a partition that is not their account's, or before one that happened earlier.
    pub(crate) misplaced: Count,
    /// Messages left in the last ring that the log does not have under their identity.
    pub(crate) not_stored: Count,
    /// Positions that the input makes.
    pub(crate) positions: u64,
    /// Positions in the database that are not those.
    pub(crate) positions_wrong: u64,
    /// Examples of those, for people.
    pub(crate) positions_examples: Vec<String>,
    /// What could not be read to its end, and why.
    pub(crate) unreadable: Vec<String>,
    /// Quantities by (account, symbol) in the database.
    pub(crate) holdings: BTreeMap<(String, String), Decimal>,
}

/// What stands in the log.
struct Stored {
    /// How often each fact does, by its place in the input.
    times: Vec<u64>,
    /// The execution id behind every identity: (epoch, sequence).
    exec_ids: HashMap<(u64, u64), u64>,
}

impl Stored {
    fn new(facts: usize) -> Self {
        Self {
            times: vec![0; facts],
            exec_ids: HashMap::new(),
        }
    }
}

/// How many, and which were the first.
#[derive(Debug, Default)]
pub(crate) struct Count {
    pub(crate) count: u64,
    /// Execution ids.
    pub(crate) examples: Vec<u64>,
}

impl Count {
    fn add(&mut self, count: u64, exec_id: u64) {
        self.count += count;
        if count > 0 && self.examples.len() < EXAMPLES_MAX {
            self.examples.push(exec_id);
        }
    }
}

impl Audit {
    /// Audits what a run left in `paths` and in `rings` against its `input`.
    pub(crate) fn of(input: &Input, rings: &[RingRemains], paths: &Paths) -> Self {
        let mut audit = Self {
            fills: input.fills.len() as u64,
            published: rings.iter().map(|ring| ring.last_sequence).sum(),
            epochs: rings.len() as u64,
            ..Self::default()
        };
        let mut stored = Stored::new(input.fills.len());
        let log = audit.read_log(&input.fills, paths, &mut stored);
        for (exec_id, times) in (1..).zip(&stored.times) {
            audit.lost.add(u64::from(*times == 0), exec_id);
            audit.duplicated.add(times.saturating_sub(1), exec_id);
        }
        audit.compare_rings(rings, &stored);
        let positions = audit.compare_positions(&input.fills, paths);
        let failures = [log, positions].into_iter().filter_map(Result::err);
        audit.unreadable = failures.map(|failure| failure.to_string()).collect();
        audit
    }

    /// Whether the database holds what the input makes.
    pub(crate) fn positions_match(&self) -> bool {
        self.positions_wrong == 0
    }

    /// Whether everything is as it should be.
    pub(crate) fn passed(&self) -> bool {
        let wrong = [
            &self.lost,
            &self.duplicated,
            &self.altered,
            &self.misplaced,
            &self.not_stored,
        ];
        wrong.iter().all(|wrong| wrong.count == 0)
            && self.positions_match()
            && self.unreadable.is_empty()
    }

    /// Takes in every record of the log.
    fn read_log(
        &mut self,
        fills: &[Fill],
        paths: &Paths,
        stored: &mut Stored,
    ) -> Result<(), Failure> {
        let log = Log::open(paths.log(), &LogOptions::read_only()).map_err(Failure::new)?;
        let topic = log.topic(&workplace::name(TOPIC)).map_err(Failure::new)?;
        for partition in (0..workplace::PARTITIONS).map(Partition) {
            let reader = log.reader(&topic, partition, Offset(0));
            let mut reader = reader.map_err(Failure::new)?;
            let mut previous = 0;
            let mut take = |record: &Record<'_>| {
                // A control record reports a loss: what is lost is counted by its absence.
                if record.control.is_none() {
                    self.take(record, partition, &mut previous, fills, stored);
                }
            };
            while reader
                .poll(RECORDS_PER_POLL, &mut take)
                .map_err(Failure::new)?
                > 0
            {}
        }
        Ok(())
    }

    /// Takes in one record, which stands in `partition` behind the fill `previous`.
    fn take(
        &mut self,
        record: &Record<'_>,
        partition: Partition,
        previous: &mut u64,
        fills: &[Fill],
        stored: &mut Stored,
    ) {
        self.in_log += 1;
        let fill = Fill::decode(record.value).ok();
        let index = fill
            .as_ref()
            .and_then(|fill| usize::try_from(fill.exec_id.checked_sub(1)?).ok());
        let fact = index.and_then(|index| fills.get(index));
        let (Some(fill), Some(index), Some(fact)) = (fill, index, fact) else {
            return self.altered.add(1, 0);
        };
        stored.times[index] += 1;
        let key = fact.account.as_bytes();
        let gateway = workplace::source(FILLS).id();
        let identity = record
            .identity
            .filter(|identity| identity.source == gateway);
        let is_as_said =
            record.kind == FILL && record.key == Some(key) && fill == *fact && identity.is_some();
        self.altered.add(u64::from(!is_as_said), fill.exec_id);
        let home = teeline_log::partition_for_key(key, workplace::PARTITIONS);
        let is_placed = home == partition && fill.exec_id >= *previous;
        self.misplaced.add(u64::from(!is_placed), fill.exec_id);
        *previous = fill.exec_id;
        if let Some(identity) = identity {
            let numbers = (identity.epoch.0, identity.sequence.0);
            stored.exec_ids.insert(numbers, fill.exec_id);
        }
    }

    /// Looks for the messages left in the rings in the log. Those of a lost ring may be missing there under their old
    /// numbers; those of the last one may not.
    fn compare_rings(&mut self, rings: &[RingRemains], stored: &Stored) {
        for (index, ring) in rings.iter().enumerate() {
            let is_last = index + 1 == rings.len();
            for (sequence, exec_id) in &ring.messages {
                let is_stored = stored.exec_ids.get(&(ring.epoch, *sequence)) == Some(exec_id);
                match is_last {
                    true => self.not_stored.add(u64::from(!is_stored), *exec_id),
                    false => self.went_with_ring += u64::from(!is_stored),
                }
            }
        }
    }

    fn compare_positions(&mut self, fills: &[Fill], paths: &Paths) -> Result<(), Failure> {
        let expected = expected_positions(fills)?;
        let found = read_positions(&paths.database()).map_err(|error| {
            Failure::new(format!(
                "cannot read the positions in {}: {error}",
                paths.database().display()
            ))
        })?;
        self.positions = expected.len() as u64;
        let wrong = |place: &(String, String)| found.get(place) != expected.get(place);
        let places = expected
            .keys()
            .chain(found.keys().filter(|place| !expected.contains_key(*place)));
        for place in places.filter(|place| wrong(place)) {
            self.positions_wrong += 1;
            if self.positions_examples.len() < EXAMPLES_MAX {
                let say = |position: Option<&Position>| {
                    position.map_or_else(|| "nothing".to_owned(), Position::to_string)
                };
                let (account, symbol) = place;
                self.positions_examples.push(format!(
                    "{account} {symbol}: expected {}, found {}",
                    say(expected.get(place)),
                    say(found.get(place))
                ));
            }
        }
        self.holdings = found
            .into_iter()
            .map(|(place, position)| (place, position.quantity))
            .collect();
        Ok(())
    }
}

/// A row of the positions.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Position {
    quantity: Decimal,
    notional: Decimal,
    fills: u64,
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} for {} in {} fills",
            self.quantity, self.notional, self.fills
        )
    }
}

/// The sum of decimals, in an integer of its smallest unit so far.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    units: i128,
    scale: u32,
}

impl Sum {
    /// Adds `units / 10^scale`; `None` when that does not fit.
    fn add(&mut self, units: i128, scale: u32) -> Option<()> {
        let fine = self.scale.max(scale);
        let at = |units: i128, scale: u32| units.checked_mul(10_i128.checked_pow(fine - scale)?);
        self.units = at(self.units, self.scale)?.checked_add(at(units, scale)?)?;
        self.scale = fine;
        Some(())
    }

    fn decimal(mut self) -> Option<Decimal> {
        while self.scale > 0 && self.units % 10 == 0 {
            self.units /= 10;
            self.scale -= 1;
        }
        Decimal::try_from_i128_with_scale(self.units, self.scale).ok()
    }
}

fn expected_positions(fills: &[Fill]) -> Result<BTreeMap<(String, String), Position>, Failure> {
    let mut sums: BTreeMap<(String, String), (Sum, Sum, u64)> = BTreeMap::new();
    for fill in fills {
        let (quantity, notional, count) = sums
            .entry((fill.account.clone(), fill.symbol.clone()))
            .or_default();
        let sign = if fill.side == Side::Buy { 1 } else { -1 };
        let units = sign * fill.quantity.mantissa();
        let paid = units.checked_mul(fill.price.mantissa());
        *count += 1;
        quantity
            .add(units, fill.quantity.scale())
            .and_then(|()| notional.add(paid?, fill.quantity.scale() + fill.price.scale()))
            .ok_or_else(|| {
                Failure::new(format!(
                    "fill {} makes the position of {} in {} too large to audit",
                    fill.exec_id, fill.account, fill.symbol
                ))
            })?;
    }
    let positions = sums
        .into_iter()
        .map(|(place, (quantity, notional, fills))| {
            let position = quantity.decimal().zip(notional.decimal());
            let (quantity, notional) = position.ok_or_else(|| {
                Failure::new(format!(
                    "the position of {} in {} is too large to audit",
                    place.0, place.1
                ))
            })?;
            Ok((
                place,
                Position {
                    quantity,
                    notional,
                    fills,
                },
            ))
        });
    positions.collect()
}

/// All rows of the positions database; none when it does not exist.
fn read_positions(
    database: &Path,
) -> Result<BTreeMap<(String, String), Position>, Box<dyn std::error::Error>> {
    if !database.exists() {
        return Ok(BTreeMap::new());
    }
    let connection = Connection::open_with_flags(database, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    let mut statement =
        connection.prepare("SELECT account, symbol, quantity, notional, fills FROM positions")?;
    let mut rows = statement.query([])?;
    let mut positions = BTreeMap::new();
    while let Some(row) = rows.next()? {
        let decimal = |column| -> Result<Decimal, Box<dyn std::error::Error>> {
            Ok(Decimal::from_str_exact(row.get_ref(column)?.as_str()?)?)
        };
        let position = Position {
            quantity: decimal(2)?,
            notional: decimal(3)?,
            fills: row.get(4)?,
        };
        positions.insert((row.get(0)?, row.get(1)?), position);
    }
    Ok(positions)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rust_decimal::Decimal;

    use super::{super::inputs::Input, Sum, expected_positions};

    #[test]
    fn sums_of_different_scales_are_exact() {
        let mut sum = Sum::default();
        for _ in 0..10 {
            sum.add(1, 1).unwrap();
        }
        sum.add(-1, 20).unwrap();
        assert_eq!(sum.decimal().unwrap().to_string(), "0.99999999999999999999");
        sum.add(1, 20).unwrap();
        assert_eq!(sum.decimal().unwrap(), Decimal::ONE);
    }

    /// The exchange says the same: what it stated before the first fill plus all fills is what was left.
    #[test]
    fn real_positions_end_at_zero_in_14_of_15_coins_and_at_the_cut_half_trade_in_sui() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/fills");
        let path = data.join("hyperliquid_user_fills_500.jsonl");
        if !path.exists() {
            eprintln!("skipped: {} is not here", path.display());
            return;
        }
        let input = Input::jsonl(&path).unwrap();
        assert_eq!(input.fills.len(), 500);
        let positions = expected_positions(&input.fills).unwrap();
        let ends: Vec<_> = positions
            .into_iter()
            .map(|(place, position)| {
                let end = input.opening[&place] + position.quantity;
                (place.1, end.normalize())
            })
            .collect();
        let open: Vec<_> = ends.iter().filter(|(_, end)| !end.is_zero()).collect();
        assert_eq!(
            (ends.len(), open),
            (15, vec![&("SUI".to_owned(), "104.4".parse().unwrap())])
        );
    }
}
