#![doc = include_str!("../../../../docs/formats/fill.md")]

use std::fmt;

use rust_decimal::Decimal;

/// Message type and record type of a fill.
pub const FILL: u16 = 1;

/// Where an encoded fill holds its routing key, the account: one length byte here, the text behind it.
pub const FILL_KEY_AT: usize = ACCOUNT_LEN_AT;

/// Longest account or symbol, in bytes: the longest in use (a 42-digit wallet address) with room to spare.
pub const LABEL_BYTES_MAX: usize = 63;

/// Most bytes that an encoded fill takes.
pub const FILL_BYTES_MAX: usize = ACCOUNT_AT + LABEL_BYTES_MAX + 1 + LABEL_BYTES_MAX;

const VERSION: u8 = 1;

const VERSION_AT: usize = 0;
const SIDE_AT: usize = VERSION_AT + 1;
const PRICE_SCALE_AT: usize = SIDE_AT + 1;
const QUANTITY_SCALE_AT: usize = PRICE_SCALE_AT + 1;
const RESERVED_AT: usize = QUANTITY_SCALE_AT + 1;
const EXEC_ID_AT: usize = RESERVED_AT + 4;
const EVENT_TIME_AT: usize = EXEC_ID_AT + size_of::<u64>();
const PRICE_AT: usize = EVENT_TIME_AT + size_of::<u64>();
const QUANTITY_AT: usize = PRICE_AT + size_of::<i128>();
const ACCOUNT_LEN_AT: usize = QUANTITY_AT + size_of::<i128>();
const ACCOUNT_AT: usize = ACCOUNT_LEN_AT + 1;

const _: () = assert!(
    VERSION_AT == 0
        && SIDE_AT == 1
        && PRICE_SCALE_AT == 2
        && QUANTITY_SCALE_AT == 3
        && RESERVED_AT == 4
        && EXEC_ID_AT == 8
        && EVENT_TIME_AT == 16
        && PRICE_AT == 24
        && QUANTITY_AT == 40
        && ACCOUNT_LEN_AT == 56
        && ACCOUNT_AT == 57
);

/// Which way a fill moves the position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Adds the quantity.
    Buy,
    /// Takes the quantity away.
    Sell,
}

/// One execution of an order.
///
/// ```
/// use teeline_delivery::positions::{Fill, Side};
///
/// let fill = Fill {
///     exec_id: 7,
///     account: "acct-3".into(),
///     symbol: "AAPL".into(),
///     side: Side::Buy,
///     price: "293.0500".parse()?,
///     quantity: "100".parse()?,
///     event_time_ns: 1_577_716_500_000_000_000,
/// };
/// let mut bytes = Vec::new();
/// fill.encode(&mut bytes)?;
/// assert_eq!(Fill::decode(&bytes)?, fill);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fill {
    /// The fact's own number: the same execution published again keeps it.
    pub exec_id: u64,
    /// Whose position it moves; the routing key. 1 to [`LABEL_BYTES_MAX`] graphic ASCII characters.
    pub account: String,
    /// What was traded. 1 to [`LABEL_BYTES_MAX`] graphic ASCII characters.
    pub symbol: String,
    /// Bought or sold.
    pub side: Side,
    /// Price of one unit; may be negative.
    pub price: Decimal,
    /// Units traded; above zero.
    pub quantity: Decimal,
    /// When it happened, in nanoseconds since the Unix epoch, as the venue says.
    pub event_time_ns: u64,
}

/// Why bytes are not a fill, or a fill cannot be written as bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FillError {
    /// Written by another version of teeline, or not a fill at all.
    #[error("fill format version {found} is not supported: this build reads and writes version 1")]
    Version {
        /// The version byte.
        found: u8,
    },
    /// Cut off, or followed by something.
    #[error("fill is {found} bytes long, its fields need {expected}")]
    Length {
        /// Bytes given.
        found: usize,
        /// Bytes that the fields take, as far as they could be read.
        expected: usize,
    },
    /// Neither 1 nor 2.
    #[error("fill side is {found}: 1 (buy) and 2 (sell) are known")]
    Side {
        /// The side byte.
        found: u8,
    },
    /// Bytes that must be zero are not.
    #[error("fill bytes 4..8 are reserved and must be zero")]
    Reserved,
    /// A mantissa or scale beyond what a decimal holds.
    #[error(
        "fill {field} {mantissa} / 10^{scale} is out of range: the mantissa has 96 bits, the scale is 28 at most"
    )]
    Decimal {
        /// `price` or `quantity`.
        field: &'static str,
        /// Its mantissa.
        mantissa: i128,
        /// Its scale.
        scale: u8,
    },
    /// Zero or negative.
    #[error("fill quantity {found} is not above zero: the side gives the direction")]
    Quantity {
        /// The quantity.
        found: Decimal,
    },
    /// Empty, too long, or with characters that are not graphic ASCII.
    #[error("fill {field} {found:?} is not 1 to 63 graphic ASCII characters")]
    Label {
        /// `account` or `symbol`.
        field: &'static str,
        /// The text.
        found: String,
    },
}

impl Fill {
    /// Appends the encoded fill to `out`; on error `out` is unchanged.
    ///
    /// # Errors
    ///
    /// [`FillError::Label`] and [`FillError::Quantity`] for fields outside their limits.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), FillError> {
        check_quantity(self.quantity)?;
        let account_len = label_len("account", &self.account)?;
        let symbol_len = label_len("symbol", &self.symbol)?;
        let mut head = [0; ACCOUNT_LEN_AT];
        head[VERSION_AT] = VERSION;
        head[SIDE_AT] = self.side.to_byte();
        head[PRICE_SCALE_AT] = scale_byte(self.price);
        head[QUANTITY_SCALE_AT] = scale_byte(self.quantity);
        head[EXEC_ID_AT..EVENT_TIME_AT].copy_from_slice(&self.exec_id.to_le_bytes());
        head[EVENT_TIME_AT..PRICE_AT].copy_from_slice(&self.event_time_ns.to_le_bytes());
        head[PRICE_AT..QUANTITY_AT].copy_from_slice(&self.price.mantissa().to_le_bytes());
        head[QUANTITY_AT..].copy_from_slice(&self.quantity.mantissa().to_le_bytes());
        out.extend_from_slice(&head);
        out.push(account_len);
        out.extend_from_slice(self.account.as_bytes());
        out.push(symbol_len);
        out.extend_from_slice(self.symbol.as_bytes());
        Ok(())
    }

    /// Reads a fill that takes up all of `bytes`.
    ///
    /// # Errors
    ///
    /// [`FillError`] names a field that is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, FillError> {
        let byte = |at: usize| {
            bytes.get(at).copied().ok_or(FillError::Length {
                found: bytes.len(),
                expected: at + 1,
            })
        };
        let version = byte(VERSION_AT)?;
        if version != VERSION {
            return Err(FillError::Version { found: version });
        }
        let account_end = ACCOUNT_AT + usize::from(byte(ACCOUNT_LEN_AT)?);
        let symbol_at = account_end + 1;
        let symbol_end = symbol_at + usize::from(byte(account_end)?);
        if bytes.len() != symbol_end {
            return Err(FillError::Length {
                found: bytes.len(),
                expected: symbol_end,
            });
        }
        if bytes[RESERVED_AT..EXEC_ID_AT] != [0; 4] {
            return Err(FillError::Reserved);
        }
        let fill = Self {
            exec_id: u64::from_le_bytes(field(bytes, EXEC_ID_AT)),
            account: label("account", &bytes[ACCOUNT_AT..account_end])?,
            symbol: label("symbol", &bytes[symbol_at..symbol_end])?,
            side: Side::from_byte(bytes[SIDE_AT])?,
            price: decimal("price", field(bytes, PRICE_AT), bytes[PRICE_SCALE_AT])?,
            quantity: decimal(
                "quantity",
                field(bytes, QUANTITY_AT),
                bytes[QUANTITY_SCALE_AT],
            )?,
            event_time_ns: u64::from_le_bytes(field(bytes, EVENT_TIME_AT)),
        };
        check_quantity(fill.quantity)?;
        Ok(fill)
    }
}

impl Side {
    const fn to_byte(self) -> u8 {
        match self {
            Self::Buy => 1,
            Self::Sell => 2,
        }
    }

    const fn from_byte(byte: u8) -> Result<Self, FillError> {
        match byte {
            1 => Ok(Self::Buy),
            2 => Ok(Self::Sell),
            found => Err(FillError::Side { found }),
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Buy => "buy",
            Self::Sell => "sell",
        })
    }
}

/// The bytes of a field of an encoded fill, whose length has been checked.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N]
        .try_into()
        .expect("a range of N bytes has N bytes")
}

/// The text of an account or symbol, if it is within the limits.
fn label(field: &'static str, bytes: &[u8]) -> Result<String, FillError> {
    let text = String::from_utf8_lossy(bytes);
    label_len(field, &text)?;
    Ok(text.into_owned())
}

/// Length byte of an account or symbol, if its text is within the limits.
fn label_len(field: &'static str, text: &str) -> Result<u8, FillError> {
    let valid =
        (1..=LABEL_BYTES_MAX).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
    match u8::try_from(text.len()) {
        Ok(len) if valid => Ok(len),
        _ => Err(FillError::Label {
            field,
            found: text.to_owned(),
        }),
    }
}

fn check_quantity(found: Decimal) -> Result<(), FillError> {
    if found > Decimal::ZERO {
        Ok(())
    } else {
        Err(FillError::Quantity { found })
    }
}

fn scale_byte(decimal: Decimal) -> u8 {
    u8::try_from(decimal.scale()).expect("a decimal's scale is 28 at most")
}

fn decimal(field: &'static str, mantissa: [u8; 16], scale: u8) -> Result<Decimal, FillError> {
    let mantissa = i128::from_le_bytes(mantissa);
    Decimal::try_from_i128_with_scale(mantissa, u32::from(scale)).map_err(|_| FillError::Decimal {
        field,
        mantissa,
        scale,
    })
}
