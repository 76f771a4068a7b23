//! Fills of an exchange account, one JSON object a line, as Hyperliquid's API gives them.
//!
//! Used of each object: `coin`, `side` (`B` buys, `A` sells), `px` and `sz` (decimals in quotes), `time`
//! (milliseconds since the Unix epoch), and `startPosition`, the account's position before the fill, where it stands.
//! There is no account in it: all fills are of one. Other fields are ignored.
//!
//! The API answers newest first, but within one millisecond oldest first: there, the stated positions follow each
//! other down the file. So the order of the facts is by time, and by the file's order within one time.

use std::collections::BTreeMap;

use rust_decimal::Decimal;
use serde::Deserialize;
use teeline_delivery::positions::{Fill, Side};

use super::{Input, InputError, Numbered, Place, Source};

/// Whose fills these are: the file does not say.
pub(crate) const ACCOUNT: &str = "main";

/// Longest line, in bytes; real ones have about 260.
const LINE_BYTES_MAX: usize = 64 * 1024;

const NS_PER_MS: u64 = 1_000_000;

#[derive(Deserialize)]
struct Line {
    coin: String,
    side: String,
    px: String,
    sz: String,
    time: u64,
    #[serde(rename = "startPosition")]
    start_position: Option<String>,
}

/// A line that can become a fact, and where it stands.
struct Stated {
    fill: Fill,
    before: Option<Decimal>,
    line: u64,
}

pub(super) fn read(source: &mut Source) -> Result<Input, InputError> {
    let mut stated = Vec::new();
    let mut line = Vec::new();
    while source.read_line(&mut line, LINE_BYTES_MAX)? {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let number = source.lines;
        stated
            .push(parse(&line, number).map_err(|why| source.malformed(Place::Line(number), why))?);
    }
    // Stable: the file's order stays within one time.
    stated.sort_by_key(|stated| stated.fill.event_time_ns);

    let mut facts = Numbered::default();
    let mut opening = BTreeMap::new();
    for Stated { fill, before, line } in stated {
        let place = (fill.account.clone(), fill.symbol.clone());
        if let Some(before) = before {
            opening.entry(place).or_insert(before);
        }
        facts
            .push(fill)
            .map_err(|why| source.malformed(Place::Line(line), why))?;
    }
    Ok(Input {
        title: format!(
            "fills of an exchange account from {}",
            source.path.display()
        ),
        fills: facts.fills,
        skipped: 0,
        opening,
    })
}

/// What one line says, or one clause on why it does not.
fn parse(line: &[u8], number: u64) -> Result<Stated, String> {
    let fields: Line = serde_json::from_slice(line).map_err(|error| {
        // serde_json counts lines within what it was given, which is one line.
        let what = error.to_string();
        let what = what.split(" at line ").next().unwrap_or(&what);
        format!("not a fill in JSON: {what} (column {})", error.column())
    })?;
    let decimal = |name, text: &str| {
        Decimal::from_str_exact(text)
            .map_err(|_| format!("{name} {text:?} is not a decimal of at most 28 digits"))
    };
    let side = match fields.side.as_str() {
        "B" => Side::Buy,
        "A" => Side::Sell,
        other => {
            return Err(format!(
                "side {other:?} is neither \"B\" (buy) nor \"A\" (sell)"
            ));
        }
    };
    let event_time_ns = fields
        .time
        .checked_mul(NS_PER_MS)
        .ok_or_else(|| format!("time {} is not in milliseconds since 1970", fields.time))?;
    Ok(Stated {
        fill: Fill {
            exec_id: 0,
            account: ACCOUNT.to_owned(),
            price: decimal("px", &fields.px)?,
            quantity: decimal("sz", &fields.sz)?,
            symbol: fields.coin,
            side,
            event_time_ns,
        },
        before: fields
            .start_position
            .map(|text| decimal("startPosition", &text))
            .transpose()?,
        line: number,
    })
}

#[cfg(test)]
mod tests {
    use rust_decimal::Decimal;
    use teeline_delivery::positions::Side;

    use super::super::{Input, tests::file};

    fn error_of(text: &str) -> String {
        let (_dir, path) = file("fills.jsonl", text.as_bytes());
        Input::jsonl(&path).unwrap_err().to_string()
    }

    #[test]
    fn facts_are_in_order_of_time_and_within_one_time_of_the_file() {
        let text = r#"
{"coin":"C","side":"A","px":"3","sz":"3","time":9,"startPosition":"3"}
{"coin":"A","side":"B","px":"1","sz":"1","time":7,"startPosition":"-1"}

{"coin":"A","side":"B","px":"2","sz":"2","time":7,"startPosition":"0"}
"#;
        let (_dir, path) = file("fills.jsonl", text.as_bytes());
        let input = Input::jsonl(&path).unwrap();
        let facts: Vec<_> = input
            .fills
            .iter()
            .map(|f| (f.exec_id, f.symbol.as_str(), f.price, f.side))
            .collect();
        let price = Decimal::from;
        assert_eq!(
            facts,
            [
                (1, "A", price(1), Side::Buy),
                (2, "A", price(2), Side::Buy),
                (3, "C", price(3), Side::Sell)
            ]
        );
        let opening: Vec<_> = input
            .opening
            .iter()
            .map(|((_, symbol), before)| (symbol.as_str(), *before))
            .collect();
        assert_eq!(opening, [("A", Decimal::NEGATIVE_ONE), ("C", price(3))]);
    }

    #[test]
    fn a_malformed_line_is_named_by_its_number() {
        let good = r#"{"coin":"A","side":"B","px":"1","sz":"1","time":7}"#;
        for (bad, says) in [
            ("{", "EOF while parsing an object"),
            (
                r#"{"coin":"A","side":"B","px":"1","time":7}"#,
                "missing field `sz`",
            ),
            (
                r#"{"coin":"A","side":"B","px":1.5,"sz":"1","time":7}"#,
                "expected a string",
            ),
            (
                r#"{"coin":"A","side":"X","px":"1","sz":"1","time":7}"#,
                "side \"X\"",
            ),
            (
                r#"{"coin":"A","side":"B","px":"1e3","sz":"1","time":7}"#,
                "px \"1e3\"",
            ),
            (
                r#"{"coin":"A","side":"B","px":"1","sz":"0","time":7}"#,
                "quantity 0",
            ),
            (
                r#"{"coin":"","side":"B","px":"1","sz":"1","time":7}"#,
                "symbol",
            ),
            (
                r#"{"coin":"A","side":"B","px":"1","sz":"1","time":18446744073709551615}"#,
                "milliseconds",
            ),
        ] {
            let error = error_of(&format!("{good}\n{bad}\n{good}\n"));
            assert!(
                error.contains("line 2: ") && error.contains(says),
                "{error}"
            );
        }
        let long = "x".repeat(super::LINE_BYTES_MAX + 1);
        assert!(error_of(&format!("{good}\n{long}\n")).contains("line 2: the line is longer"));
    }
}
