//! Real fills: 500 of one account, with the exchange's own word on the position before each.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{collections::BTreeMap, fs, path::Path};

use rust_decimal::Decimal;
use serde_json::Value;
use teeline_delivery::positions::{AccountPosition, Fill, Side};

/// The fills in the order in which they happened, each with the position before it.
fn fills() -> Option<Vec<(Fill, Decimal)>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/data/fills/hyperliquid_user_fills_500.jsonl");
    let Ok(text) = fs::read_to_string(&path) else {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    };
    let mut lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    lines.sort_by_key(|line| line["time"].as_u64());
    let decimal = |value: &Value| Decimal::from_str_exact(value.as_str().unwrap()).unwrap();
    let fills = (1..).zip(&lines).map(|(exec_id, line)| {
        let fill = Fill {
            exec_id,
            account: "hyperliquid".into(),
            symbol: line["coin"].as_str().unwrap().into(),
            side: match line["side"].as_str().unwrap() {
                "B" => Side::Buy,
                "A" => Side::Sell,
                side => panic!("side {side}"),
            },
            price: decimal(&line["px"]),
            quantity: decimal(&line["sz"]),
            event_time_ns: line["time"].as_u64().unwrap() * 1_000_000,
        };
        (fill, decimal(&line["startPosition"]))
    });
    Some(fills.collect())
}

#[test]
fn real_fills_survive_the_codec_to_the_last_digit() {
    let mut bytes = Vec::new();
    for (fill, _) in fills().into_iter().flatten() {
        bytes.clear();
        fill.encode(&mut bytes).unwrap();
        let read = Fill::decode(&bytes).unwrap();
        assert_eq!(read, fill);
        assert_eq!(
            (read.price.to_string(), read.quantity.to_string()),
            (fill.price.to_string(), fill.quantity.to_string())
        );
    }
}

/// The file's window cuts one half of a self-trade off, in SUI.
#[test]
fn positions_end_where_the_exchange_s_own_do() {
    let Some(fills) = fills() else { return };
    let mut positions = BTreeMap::new();
    for (fill, before) in &fills {
        positions
            .entry(&fill.symbol)
            .or_insert_with(|| AccountPosition {
                quantity: *before,
                ..AccountPosition::flat(&fill.account, &fill.symbol)
            })
            .apply(fill)
            .unwrap();
    }
    assert_eq!(fills.len(), 500);
    assert_eq!(positions.len(), 15);
    for (symbol, position) in positions {
        let end = if symbol == "SUI" { "104.4" } else { "0" };
        assert_eq!(position.quantity.to_string(), end, "{symbol}");
    }
}
