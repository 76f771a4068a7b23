//! The textbook's day: fills that nobody traded, from a seed.

use rust_decimal::Decimal;
use teeline_delivery::positions::{Fill, Side};

use super::Input;

/// Fills of the textbook's day.
pub(crate) const FILLS_DEFAULT: usize = 10_000;

const ACCOUNTS: u64 = 10;

const STOCKS: [&str; 20] = [
    "ALDER", "ASPEN", "BEECH", "BIRCH", "CEDAR", "ELDER", "ELM", "FIR", "HAZEL", "HOLLY", "LARCH",
    "LIME", "MAPLE", "OAK", "PINE", "PLANE", "ROWAN", "SPRUCE", "WILLOW", "YEW",
];

/// 2026-01-05 14:30 UTC, when New York opens, in nanoseconds since the Unix epoch.
const OPEN_NS: u64 = 1_767_623_400_000_000_000;

/// `count` fills: prices walk in cents, quantities are lots of one to a thousand, times grow.
pub(super) fn generate(seed: u64, count: usize) -> Input {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut cents: Vec<i64> = STOCKS.iter().map(|_| random.i64(1_000..50_000)).collect();
    let mut time_ns = OPEN_NS;
    let fills = (1..=count as u64).map(|exec_id| {
        let stock = random.usize(..STOCKS.len());
        let price = &mut cents[stock];
        *price = (*price + random.i64(-25..=25)).max(100);
        time_ns += random.u64(1..5_000_000_000);
        Fill {
            exec_id,
            account: format!("acct-{}", random.u64(..ACCOUNTS)),
            symbol: STOCKS[stock].to_owned(),
            side: if random.bool() { Side::Buy } else { Side::Sell },
            price: Decimal::new(*price, 2),
            quantity: Decimal::from(random.u32(1..=1_000)),
            event_time_ns: time_ns,
        }
    });
    Input {
        fills: fills.collect(),
        title: "synthetic fills of ten accounts in twenty stocks".to_owned(),
        skipped: 0,
        opening: Default::default(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{ACCOUNTS, FILLS_DEFAULT, STOCKS, generate};

    #[test]
    fn one_seed_gives_one_day() {
        assert_eq!(generate(7, 100).fills, generate(7, 100).fills);
        assert_ne!(generate(7, 100).fills, generate(8, 100).fills);
    }

    #[test]
    fn the_day_has_all_accounts_and_stocks_and_numbers_without_holes() {
        let fills = generate(1, FILLS_DEFAULT).fills;
        let accounts: BTreeSet<_> = fills.iter().map(|fill| &fill.account).collect();
        let symbols: BTreeSet<_> = fills.iter().map(|fill| &fill.symbol).collect();
        assert_eq!(
            (accounts.len() as u64, symbols.len()),
            (ACCOUNTS, STOCKS.len())
        );
        assert!(fills.iter().map(|fill| fill.exec_id).eq(1..=10_000));
        let mut bytes = Vec::new();
        assert!(fills.iter().all(|fill| fill.encode(&mut bytes).is_ok()));
    }
}
