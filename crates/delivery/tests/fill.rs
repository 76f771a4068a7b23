//! What the bytes of a fill promise.
#![allow(clippy::unwrap_used, reason = "tests")]

use rust_decimal::Decimal;
use teeline_delivery::positions::{
    FILL_BYTES_MAX, FILL_KEY_AT, Fill, FillError, LABEL_BYTES_MAX, Side,
};

fn fill() -> Fill {
    Fill {
        exec_id: 0x0102_0304_0506_0708,
        account: "acct-7".into(),
        symbol: "AAPL".into(),
        side: Side::Sell,
        price: "-293.0500".parse().unwrap(),
        quantity: "1500.25".parse().unwrap(),
        event_time_ns: 1_577_716_500_123_456_789,
    }
}

fn encoded(fill: &Fill) -> Vec<u8> {
    let mut bytes = Vec::new();
    fill.encode(&mut bytes).unwrap();
    bytes
}

/// Bytes of a golden file: two hex digits each, `#` begins a comment.
fn golden(text: &str) -> Vec<u8> {
    text.lines()
        .flat_map(|line| line.split('#').next().unwrap().split_whitespace())
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}

#[test]
fn version_1_is_written_and_read_as_the_golden_file_says() {
    let golden = golden(include_str!("golden/fill.v1.hex"));
    assert_eq!(encoded(&fill()), golden);
    assert_eq!(Fill::decode(&golden).unwrap(), fill());
}

#[test]
fn the_routing_key_is_found_without_knowing_fills() {
    let bytes = encoded(&fill());
    let len = usize::from(bytes[FILL_KEY_AT]);
    assert_eq!(
        &bytes[FILL_KEY_AT + 1..FILL_KEY_AT + 1 + len],
        fill().account.as_bytes()
    );
}

#[test]
fn every_byte_changed_is_refused_or_read_as_another_fill() {
    let bytes = encoded(&fill());
    for at in 0..bytes.len() {
        for flip in 1..=u8::MAX {
            let mut edited = bytes.clone();
            edited[at] ^= flip;
            if let Ok(read) = Fill::decode(&edited) {
                assert_ne!(read, fill(), "byte {at} changed by {flip:#04x} unnoticed");
                assert_eq!(encoded(&read), edited, "byte {at} read, but not as written");
            }
        }
    }
}

#[test]
fn a_fill_cut_short_or_followed_by_a_byte_is_refused() {
    let bytes = encoded(&fill());
    for len in 0..bytes.len() {
        assert!(
            matches!(Fill::decode(&bytes[..len]), Err(FillError::Length { found, .. }) if found == len)
        );
    }
    let longer = [bytes.as_slice(), &[0]].concat();
    assert_eq!(
        Fill::decode(&longer),
        Err(FillError::Length {
            found: longer.len(),
            expected: bytes.len()
        })
    );
}

#[test]
fn each_field_outside_its_limits_is_named() {
    let bytes = encoded(&fill());
    let edited = |at: usize, byte: u8| {
        let mut edited = bytes.clone();
        edited[at] = byte;
        Fill::decode(&edited).unwrap_err().to_string()
    };
    assert_eq!(
        edited(0, 9),
        "fill format version 9 is not supported: this build reads and writes version 1"
    );
    assert_eq!(
        edited(1, 0),
        "fill side is 0: 1 (buy) and 2 (sell) are known"
    );
    assert!(edited(2, 29).starts_with("fill price -2930500 / 10^29 is out of range"));
    assert!(edited(3, 29).starts_with("fill quantity 150025 / 10^29 is out of range"));
    assert_eq!(
        edited(6, 1),
        "fill bytes 4..8 are reserved and must be zero"
    );
    assert!(edited(39, 1).starts_with("fill price "));
    assert!(edited(55, 0x80).starts_with("fill quantity -"));
    let mut smallest = bytes.clone();
    smallest[24..40].copy_from_slice(&i128::MIN.to_le_bytes());
    assert!(matches!(
        Fill::decode(&smallest),
        Err(FillError::Decimal {
            field: "price",
            mantissa: i128::MIN,
            ..
        })
    ));
    assert!(edited(57, b' ').starts_with("fill account \" cct-7\" is not"));
    assert!(edited(64, 0xFF).starts_with("fill symbol "));
}

#[test]
fn a_fill_that_no_reader_would_accept_is_not_written() {
    let refused = |change: &dyn Fn(&mut Fill)| {
        let mut fill = fill();
        change(&mut fill);
        let mut out = vec![42];
        let error = fill.encode(&mut out).unwrap_err();
        assert_eq!(out, [42], "half a fill was written");
        error
    };
    for text in ["", " ", "a b", "é", "a\0", &"x".repeat(LABEL_BYTES_MAX + 1)] {
        let error = refused(&|fill| fill.account = text.into());
        assert!(matches!(
            error,
            FillError::Label {
                field: "account",
                ..
            }
        ));
        let error = refused(&|fill| fill.symbol = text.into());
        assert!(matches!(
            error,
            FillError::Label {
                field: "symbol",
                ..
            }
        ));
    }
    for quantity in [Decimal::ZERO, Decimal::NEGATIVE_ONE] {
        let error = refused(&|fill| fill.quantity = quantity);
        assert_eq!(error, FillError::Quantity { found: quantity });
    }
}

#[test]
fn the_largest_fill_and_the_extreme_decimals_round_trip() {
    let finest = Decimal::try_from_i128_with_scale(1, 28).unwrap();
    for price in [Decimal::MAX, Decimal::MIN, Decimal::ZERO, finest] {
        for quantity in [Decimal::MAX, finest] {
            let fill = Fill {
                account: "a".repeat(LABEL_BYTES_MAX),
                symbol: "s".repeat(LABEL_BYTES_MAX),
                price,
                quantity,
                exec_id: u64::MAX,
                event_time_ns: u64::MAX,
                side: Side::Buy,
            };
            let bytes = encoded(&fill);
            assert_eq!(bytes.len(), FILL_BYTES_MAX);
            assert_eq!(Fill::decode(&bytes).unwrap(), fill);
        }
    }
}

#[test]
fn trailing_zeros_of_a_price_survive() {
    let read = Fill::decode(&encoded(&fill())).unwrap();
    assert_eq!(read.price.to_string(), "-293.0500");
    assert_eq!(read.quantity.to_string(), "1500.25");
}
