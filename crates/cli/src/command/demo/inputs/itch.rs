//! Executions out of a Nasdaq TotalView-ITCH 5.0 file: messages behind a 2-byte big-endian length.
//!
//! An execution becomes a fill when its side is known. `P` (a trade against a hidden order) states it. `E` and `C`
//! name the resting order that was executed, whose side the book knows: so the book is followed through `A`, `F`,
//! `U`, `D`, `X`, `E` and `C`. An execution of an order that is not in the book, since the file began after it was
//! entered, is skipped and counted. The fill is the resting order's: its side, its symbol, and its price unless `C`
//! states another.
//!
//! ITCH names no accounts: the account is the order's reference number modulo 10. Its times are nanoseconds since
//! midnight of a day that the file does not name, and are carried as they are.

use std::{array, collections::HashMap};

use rust_decimal::Decimal;
use teeline_delivery::positions::{Fill, Side};

use super::{Input, InputError, Numbered, Place, Source};

/// Bytes of every message type of ITCH 5.0, so that a foreign or shifted file is noticed at once.
const MESSAGE_LENGTHS: [(u8, usize); 23] = [
    (b'S', 12),
    (b'R', 39),
    (b'H', 25),
    (b'Y', 20),
    (b'L', 26),
    (b'V', 35),
    (b'W', 12),
    (b'K', 28),
    (b'J', 35),
    (b'h', 21),
    (b'A', 36),
    (b'F', 40),
    (b'E', 31),
    (b'C', 36),
    (b'X', 23),
    (b'D', 19),
    (b'U', 35),
    (b'P', 44),
    (b'Q', 40),
    (b'B', 19),
    (b'I', 50),
    (b'N', 20),
    (b'O', 48),
];

const LENGTH_MAX: usize = 50;

/// Decimal places of a price.
const PRICE_SCALE: u32 = 4;

// Where fields lie in a message; all numbers are big-endian.
const TIME_AT: usize = 5;
const REFERENCE_AT: usize = 11;
/// `A`, `F`, `P`.
const SIDE_AT: usize = 19;
/// `A`, `F`, `P`.
const SHARES_AT: usize = 20;
/// `A`, `F`, `P`.
const STOCK_AT: usize = 24;
/// `A`, `F`, `P`, `C`.
const PRICE_AT: usize = 32;
/// `E`, `C`, `X`: executed or cancelled.
const TAKEN_AT: usize = 19;
/// `U`.
const NEW_REFERENCE_AT: usize = 19;
/// `U`.
const NEW_SHARES_AT: usize = 27;
/// `U`.
const NEW_PRICE_AT: usize = 31;

/// A resting order.
#[derive(Clone, Copy)]
struct Order {
    side: Side,
    stock: [u8; 8],
    price: u32,
    shares: u32,
}

#[derive(Default)]
struct Reader {
    book: HashMap<u64, Order>,
    facts: Numbered,
    skipped: u64,
}

pub(super) fn read(source: &mut Source) -> Result<Input, InputError> {
    let mut reader = Reader::default();
    let mut buffer = [0; LENGTH_MAX];
    loop {
        let place = Place::Byte(source.offset);
        let mut length = [0; 2];
        match source.read(&mut length)? {
            0 => break,
            2 => {}
            _ => {
                return Err(source.malformed(
                    place,
                    "the file ends within a message's length: it is cut off",
                ));
            }
        }
        let length = usize::from(u16::from_be_bytes(length));
        if length == 0 && source.read(&mut [0])? == 0 {
            break; // How Nasdaq's files say that the session is over.
        }
        let Some(message) = buffer
            .get_mut(..length)
            .filter(|message| !message.is_empty())
        else {
            let why = format!(
                "no message of ITCH 5.0 has {length} bytes: this is not such a file, or it is damaged"
            );
            return Err(source.malformed(place, why));
        };
        let found = source.read(message)?;
        if found < length {
            let why =
                format!("the file ends {found} bytes into a message of {length}: it is cut off");
            return Err(source.malformed(place, why));
        }
        reader
            .message(message)
            .map_err(|why| source.malformed(place, why))?;
    }
    Ok(Input {
        title: format!("executions of the ITCH file {}", source.path.display()),
        fills: reader.facts.fills,
        skipped: reader.skipped,
        opening: Default::default(),
    })
}

impl Reader {
    /// Takes in one message; the error is one clause for people.
    fn message(&mut self, message: &[u8]) -> Result<(), String> {
        let kind = message[0];
        let expected = MESSAGE_LENGTHS
            .iter()
            .find(|(known, _)| *known == kind)
            .map(|(_, length)| *length);
        if expected != Some(message.len()) {
            let length = message.len();
            let kind = kind.escape_ascii();
            return Err(match expected {
                Some(expected) => {
                    format!("message `{kind}` has {length} bytes, ITCH 5.0 says {expected}")
                }
                None => format!(
                    "ITCH 5.0 has no message `{kind}`: this is not such a file, or it is damaged"
                ),
            });
        }
        match kind {
            b'A' | b'F' => drop(self.book.insert(reference(message), stated_order(message)?)),
            b'U' => self.replace(message),
            b'D' => drop(self.book.remove(&reference(message))),
            b'X' => drop(self.take(message)),
            b'E' | b'C' => match self.take(message) {
                Some(order) => {
                    let price = if kind == b'C' {
                        u32_at(message, PRICE_AT)
                    } else {
                        order.price
                    };
                    let shares = u32_at(message, TAKEN_AT);
                    self.execution(
                        message,
                        Order {
                            price,
                            shares,
                            ..order
                        },
                    )?;
                }
                None => self.skipped += 1,
            },
            b'P' => self.execution(message, stated_order(message)?)?,
            _ => {}
        }
        Ok(())
    }

    /// `U`: the new order stands on the old one's side.
    fn replace(&mut self, message: &[u8]) {
        if let Some(old) = self.book.remove(&reference(message)) {
            let price = u32_at(message, NEW_PRICE_AT);
            let shares = u32_at(message, NEW_SHARES_AT);
            self.book.insert(
                u64_at(message, NEW_REFERENCE_AT),
                Order {
                    price,
                    shares,
                    ..old
                },
            );
        }
    }

    /// `E`, `C`, `X`: takes shares off a resting order, and the order off the book when none is left; returns the order
    /// as it was.
    fn take(&mut self, message: &[u8]) -> Option<Order> {
        let order = self.book.get_mut(&reference(message))?;
        let before = *order;
        order.shares = order.shares.saturating_sub(u32_at(message, TAKEN_AT));
        if order.shares == 0 {
            self.book.remove(&reference(message));
        }
        Some(before)
    }

    fn execution(&mut self, message: &[u8], traded: Order) -> Result<(), String> {
        self.facts.push(Fill {
            exec_id: 0,
            account: format!("acct-{}", reference(message) % 10),
            symbol: String::from_utf8_lossy(traded.stock.trim_ascii_end()).into_owned(),
            side: traded.side,
            price: Decimal::new(i64::from(traded.price), PRICE_SCALE),
            quantity: Decimal::from(traded.shares),
            event_time_ns: u48_at(message, TIME_AT),
        })
    }
}

/// The order that `A`, `F` or `P` states.
fn stated_order(message: &[u8]) -> Result<Order, String> {
    let side = match message[SIDE_AT] {
        b'B' => Side::Buy,
        b'S' => Side::Sell,
        other => {
            return Err(format!(
                "side `{}` is neither B nor S",
                other.escape_ascii()
            ));
        }
    };
    Ok(Order {
        side,
        stock: bytes_at(message, STOCK_AT),
        price: u32_at(message, PRICE_AT),
        shares: u32_at(message, SHARES_AT),
    })
}

fn reference(message: &[u8]) -> u64 {
    u64_at(message, REFERENCE_AT)
}

/// Lengths were compared with the table: every field lies within its message.
fn bytes_at<const N: usize>(message: &[u8], at: usize) -> [u8; N] {
    array::from_fn(|index| message[at + index])
}

fn u32_at(message: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes_at(message, at))
}

fn u48_at(message: &[u8], at: usize) -> u64 {
    bytes_at::<6>(message, at)
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn u64_at(message: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes_at(message, at))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use teeline_delivery::positions::Side;

    use super::super::{Input, InputError, tests::file};

    /// A message of `kind` about order `reference`: `fields` follow the reference.
    fn message(kind: u8, reference: u64, fields: &[&[u8]]) -> Vec<u8> {
        let mut body = vec![kind, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9];
        body.extend_from_slice(&reference.to_be_bytes());
        fields
            .iter()
            .for_each(|field| body.extend_from_slice(field));
        let mut framed = u16::try_from(body.len()).unwrap().to_be_bytes().to_vec();
        framed.append(&mut body);
        framed
    }

    fn add(reference: u64, side: u8, shares: u32, price: u32) -> Vec<u8> {
        message(
            b'A',
            reference,
            &[
                &[side],
                &shares.to_be_bytes(),
                b"AAPL    ",
                &price.to_be_bytes(),
            ],
        )
    }

    fn executed(reference: u64, shares: u32) -> Vec<u8> {
        message(b'E', reference, &[&shares.to_be_bytes(), &[0; 8]])
    }

    fn executed_at(reference: u64, shares: u32, price: u32) -> Vec<u8> {
        message(
            b'C',
            reference,
            &[&shares.to_be_bytes(), &[0; 8], b"Y", &price.to_be_bytes()],
        )
    }

    fn replaced(old: u64, new: u64, shares: u32, price: u32) -> Vec<u8> {
        message(
            b'U',
            old,
            &[
                &new.to_be_bytes(),
                &shares.to_be_bytes(),
                &price.to_be_bytes(),
            ],
        )
    }

    fn traded(reference: u64, side: u8, shares: u32, price: u32) -> Vec<u8> {
        let number = [0; 8];
        message(
            b'P',
            reference,
            &[
                &[side],
                &shares.to_be_bytes(),
                b"MSFT    ",
                &price.to_be_bytes(),
                &number,
            ],
        )
    }

    fn read(messages: &[Vec<u8>]) -> Result<Input, InputError> {
        let (_dir, path) = file("x.itch", &messages.concat());
        Input::itch(&path)
    }

    /// (account, symbol, side, quantity, price) of every fill.
    fn fills(messages: &[Vec<u8>]) -> (Vec<String>, u64) {
        let input = read(messages).unwrap();
        let line = |f: &super::Fill| {
            format!(
                "{} {} {} {} {}",
                f.account, f.symbol, f.side, f.quantity, f.price
            )
        };
        (input.fills.iter().map(line).collect(), input.skipped)
    }

    #[test]
    fn executions_take_side_symbol_and_price_from_the_book_and_trades_from_themselves() {
        let messages = [
            add(21, b'S', 100, 1_234_500),
            executed(21, 30),
            executed_at(21, 30, 1_230_000),
            traded(7, b'B', 5, 10_000),
        ];
        let expected = [
            "acct-1 AAPL sell 30 123.4500",
            "acct-1 AAPL sell 30 123.0000",
            "acct-7 MSFT buy 5 1.0000",
        ];
        assert_eq!(fills(&messages), (expected.map(str::to_owned).to_vec(), 0));
    }

    #[test]
    fn an_order_replaced_deleted_cancelled_or_used_up_is_out_of_the_book() {
        let cancel = |reference, shares: u32| message(b'X', reference, &[&shares.to_be_bytes()]);
        let messages = [
            add(1, b'B', 10, 1),
            replaced(1, 2, 20, 30_000),
            executed(1, 1), // skipped: 1 is 2 now
            executed(2, 20),
            executed(2, 1), // skipped: used up
            add(3, b'B', 10, 1),
            cancel(3, 4),
            executed(3, 6),
            executed(3, 1), // skipped: cancelled and used up
            add(4, b'B', 10, 1),
            message(b'D', 4, &[]),
            executed(4, 1), // skipped: deleted
        ];
        let expected = ["acct-2 AAPL buy 20 3.0000", "acct-3 AAPL buy 6 0.0001"];
        assert_eq!(fills(&messages), (expected.map(str::to_owned).to_vec(), 4));
    }

    #[test]
    fn a_file_cut_at_any_byte_is_noticed_unless_cut_between_messages() {
        let whole = [add(1, b'B', 10, 1), executed(1, 1)].concat();
        let between = whole.len() - executed(1, 1).len();
        for cut in 1..whole.len() {
            let (_dir, path) = file("cut.itch", whole.get(..cut).unwrap());
            match Input::itch(&path) {
                Err(InputError::Malformed { why, .. }) => {
                    assert!(why.ends_with("it is cut off"), "{cut}: {why}")
                }
                Err(InputError::Empty { .. }) => assert_eq!(cut, between),
                other => panic!("cut at {cut}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_foreign_file_is_refused_at_its_first_message() {
        for (bytes, says) in [
            (
                &b"PK\x03\x04 some archive"[..],
                "byte 0: no message of ITCH 5.0 has 20555 bytes",
            ),
            (
                &[0, 12, b'z', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                "byte 0: ITCH 5.0 has no message `z`",
            ),
            (
                &[0, 2, b'A', 0],
                "byte 0: message `A` has 2 bytes, ITCH 5.0 says 36",
            ),
            (&[0, 0, 1], "no message of ITCH 5.0 has 0 bytes"),
        ] {
            let (_dir, path) = file("foreign", bytes);
            let error = Input::itch(&path).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let error = read(&[add(1, b'B', 1, 1), add(2, b'?', 1, 1)])
            .unwrap_err()
            .to_string();
        assert!(error.contains("byte 38: side `?`"), "{error}");
    }

    #[test]
    fn the_restored_hour_of_apple_gives_1907_fills() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/itch");
        let path = data.join("20191230_AAPL_0935_restored.itch50");
        if fs::metadata(&path).is_err() {
            eprintln!("skipped: {} is not here", path.display());
            return;
        }
        let input = Input::itch(&path).unwrap();
        assert_eq!((input.fills.len(), input.skipped), (1_907, 540));
        // Hidden orders trade against both sides, but `P` always says B since 2014.
        assert!(input.fills.iter().all(|fill| fill.symbol == "AAPL"));
        assert!(input.fills.iter().any(|fill| fill.side == Side::Sell));
    }
}
