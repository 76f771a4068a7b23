//! A moment as people write it: a time of day, how long ago, or the number that stands in a record.

use jiff::{civil::DateTime, tz::TimeZone};
use teeline_core::time::Clock;
use teeline_os::SystemClock;

use super::change::duration;

const SECOND_NS: u64 = 1_000_000_000;

/// Nanoseconds since the Unix epoch of `2026-11-30T09:15:00Z` (with a fraction, if it has one), of `90m` ago, or of the
/// number itself.
pub(super) fn moment(text: &str) -> Result<u64, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    if let Some(time_ns) = date_and_time(text) {
        return Ok(time_ns);
    }
    let ago = duration(text).map_err(|_| {
        format!(
            "`{text}` is no time: 2026-11-30T09:15:00Z is expected, or how long ago, as in 90m, or nanoseconds since 1970"
        )
    })?;
    let ago_ns = u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX);
    Ok(SystemClock.wall_ns().saturating_sub(ago_ns))
}

/// RFC 3339, in UTC.
fn date_and_time(text: &str) -> Option<u64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let [year, month, day] = fields(date, '-', [4, 2, 2])?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = fields(time, ':', [2, 2, 2])?;
    let small = |number: u64| i8::try_from(number).ok();
    let time = DateTime::new(
        i16::try_from(year).ok()?,
        small(month)?,
        small(day)?,
        small(hour)?,
        small(minute)?,
        small(second)?,
        0,
    );
    let time = TimeZone::UTC.to_timestamp(time.ok()?).ok()?;
    // Before 1970 there is no such number.
    let seconds = u64::try_from(time.as_second()).ok()?;
    let digits = fraction.len();
    if digits == 0 || digits > 9 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let unit = 10_u64.pow(9 - u32::try_from(digits).ok()?);
    let nanos = fraction.parse::<u64>().ok()? * unit;
    seconds.checked_mul(SECOND_NS)?.checked_add(nanos)
}

/// Three numbers of so many digits.
fn fields(text: &str, separator: char, digits: [usize; 3]) -> Option<[u64; 3]> {
    let mut parts = text.split(separator);
    let mut numbers = [0; 3];
    for (number, digits) in numbers.iter_mut().zip(digits) {
        let part = parts.next().filter(|part| part.len() == digits)?;
        if !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        *number = part.parse().ok()?;
    }
    parts.next().is_none().then_some(numbers)
}

#[cfg(test)]
mod tests {
    use teeline_core::time::Clock;
    use teeline_os::SystemClock;

    use super::moment;

    #[test]
    fn a_time_is_read_as_people_write_it() {
        // As `date -u -d TIME +%s` has them.
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T23:59:59Z", 951_868_799),
            ("2024-03-01T00:00:00Z", 1_709_251_200),
            ("2026-11-30T09:15:00Z", 1_796_030_100),
            ("2100-03-01T00:00:00Z", 4_107_542_400),
        ] {
            assert_eq!(moment(text), Ok(seconds * 1_000_000_000), "{text}");
        }
        assert_eq!(
            moment("2026-11-30T09:15:00.25Z"),
            Ok(1_796_030_100_250_000_000)
        );
        assert_eq!(moment("1796030100000000000"), Ok(1_796_030_100_000_000_000));
        let (before, ago) = (SystemClock.wall_ns(), moment("90m").unwrap());
        assert!((before..=SystemClock.wall_ns()).contains(&(ago + 90 * 60 * 1_000_000_000)));
        for text in [
            "",
            "yesterday",
            "2026-11-30",
            "2026-11-30T09:15Z",
            "2026-11-30T09:15:00",
            "2023-02-29T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-11-30T24:00:00Z",
            "2026-11-30T09:15:00.Z",
            "1969-12-31T23:59:59Z",
        ] {
            assert!(moment(text).unwrap_err().contains("is no time"), "{text}");
        }
    }
}
