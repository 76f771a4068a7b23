//! What an account holds of a symbol, in exact decimal arithmetic.

use rust_decimal::Decimal;

use super::{Fill, Side};

/// What an account holds of a symbol, as the sum of its fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccountPosition {
    /// The account.
    pub account: String,
    /// The symbol.
    pub symbol: String,
    /// Bought less sold.
    pub quantity: Decimal,
    /// Paid for what was bought, less received for what was sold: the sum of price times signed quantity.
    pub notional: Decimal,
    /// How many fills it is the sum of.
    pub fills: u64,
}

/// A sum or product that no [`Decimal`] holds exactly: it needs more than 96 bits or more than 28 decimal places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("its {figure} would need more than 96 bits or 28 decimal places")]
pub struct Inexact {
    /// `quantity` or `notional`.
    pub figure: &'static str,
}

impl AccountPosition {
    /// Before the first fill.
    #[must_use]
    pub fn flat(account: &str, symbol: &str) -> Self {
        Self {
            account: account.to_owned(),
            symbol: symbol.to_owned(),
            quantity: Decimal::ZERO,
            notional: Decimal::ZERO,
            fills: 0,
        }
    }

    /// Adds `fill`, exactly.
    ///
    /// # Errors
    ///
    /// [`Inexact`] instead of rounding; the position is unchanged then.
    ///
    /// # Panics
    ///
    /// If the fill is another account's or of another symbol.
    pub fn apply(&mut self, fill: &Fill) -> Result<(), Inexact> {
        assert_eq!(
            (&self.account, &self.symbol),
            (&fill.account, &fill.symbol),
            "a fill moves the position of its own account and symbol"
        );
        let bought = match fill.side {
            Side::Buy => fill.quantity,
            Side::Sell => -fill.quantity,
        };
        let quantity = sum(self.quantity, bought).ok_or(Inexact { figure: "quantity" })?;
        let notional = product(fill.price, bought)
            .and_then(|paid| sum(self.notional, paid))
            .ok_or(Inexact { figure: "notional" })?;
        self.quantity = quantity;
        self.notional = notional;
        self.fills += 1;
        Ok(())
    }
}

/// `a + b`, if a decimal holds it exactly. (`Decimal::checked_add` rounds.)
fn sum(a: Decimal, b: Decimal) -> Option<Decimal> {
    let scale = a.scale().max(b.scale());
    let mantissa = mantissa_at(a, scale)?.checked_add(mantissa_at(b, scale)?)?;
    exact(mantissa, scale)
}

/// `a * b`, if a decimal holds it exactly. (`Decimal::checked_mul` rounds.)
fn product(a: Decimal, b: Decimal) -> Option<Decimal> {
    let (a, b) = (a.normalize(), b.normalize());
    exact(
        a.mantissa().checked_mul(b.mantissa())?,
        a.scale() + b.scale(),
    )
}

/// The mantissa of `value` written with `scale` decimal places, which are at least its own.
fn mantissa_at(value: Decimal, scale: u32) -> Option<i128> {
    let factor = 10_i128.checked_pow(scale - value.scale())?;
    value.mantissa().checked_mul(factor)
}

/// `mantissa / 10^scale` without trailing zeros, if a decimal holds it.
fn exact(mut mantissa: i128, mut scale: u32) -> Option<Decimal> {
    while scale > 0 && mantissa % 10 == 0 {
        mantissa /= 10;
        scale -= 1;
    }
    Decimal::try_from_i128_with_scale(mantissa, scale).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decimal(text: &str) -> Decimal {
        Decimal::from_str_exact(text).unwrap()
    }

    fn fill(side: Side, price: &str, quantity: &str) -> Fill {
        Fill {
            exec_id: 1,
            account: "a".into(),
            symbol: "s".into(),
            side,
            price: decimal(price),
            quantity: decimal(quantity),
            event_time_ns: 0,
        }
    }

    #[test]
    fn tenths_sum_to_one_and_the_way_back_ends_at_zero() {
        let mut position = AccountPosition::flat("a", "s");
        for _ in 0..10 {
            position.apply(&fill(Side::Buy, "0.1", "0.1")).unwrap();
        }
        assert_eq!(position.quantity.to_string(), "1");
        assert_eq!(position.notional.to_string(), "0.1");
        position.apply(&fill(Side::Sell, "0.3", "1.00")).unwrap();
        assert_eq!(position.quantity.to_string(), "0");
        assert_eq!(position.notional.to_string(), "-0.2");
        assert_eq!(position.fills, 11);
    }

    #[test]
    fn a_negative_price_turns_the_notional_round() {
        let mut position = AccountPosition::flat("a", "s");
        position.apply(&fill(Side::Buy, "-37.63", "1000")).unwrap();
        assert_eq!(position.quantity, decimal("1000"));
        assert_eq!(position.notional, decimal("-37630"));
    }

    /// Where `Decimal`'s own arithmetic would round without a word.
    #[test]
    fn what_no_decimal_holds_is_an_error_and_changes_nothing() {
        let tiny = "0.0000000000000000000000000001";
        let cases = [
            (fill(Side::Buy, tiny, "0.1"), "notional"),
            (fill(Side::Buy, "1", tiny), "quantity"),
            (
                fill(Side::Buy, "1", "79228162514264337593543950335"),
                "quantity",
            ),
            (
                fill(Side::Sell, "79228162514264337593543950335", "3"),
                "notional",
            ),
        ];
        for (fill, figure) in cases {
            let mut position = AccountPosition {
                quantity: decimal("79228162514264337593543950.3"),
                ..AccountPosition::flat("a", "s")
            };
            let before = position.clone();
            assert_eq!(position.apply(&fill), Err(Inexact { figure }));
            assert_eq!(position, before);
        }
    }

    #[test]
    fn products_whose_zeros_cancel_fit() {
        assert_eq!(
            product(decimal("0.00000000000004"), decimal("0.000000000000025")),
            Some(decimal("0.000000000000000000000000001"))
        );
        assert_eq!(product(Decimal::MAX, decimal("1.00")), Some(Decimal::MAX));
        assert_eq!(sum(Decimal::MAX, Decimal::MIN), Some(Decimal::ZERO));
    }
}
