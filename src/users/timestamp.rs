//! Moments, as RFC 3339 writes them.

use serde::{Serialize, Serializer};
use std::fmt;

/// A moment: microseconds since 1970-01-01T00:00:00Z. As text: RFC 3339 in UTC with microseconds and `Z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The moment so many microseconds after 1970-01-01T00:00:00Z, or `None` outside the years 1 to 9999,
    /// which RFC 3339 cannot write.
    pub fn from_unix_micros(micros: i64) -> Option<Timestamp> {
        const YEAR_1: i64 = -62_135_596_800_000_000;
        const YEAR_10000: i64 = 253_402_300_800_000_000;
        (YEAR_1..YEAR_10000).contains(&micros).then_some(Timestamp(micros))
    }

    /// Microseconds since 1970-01-01T00:00:00Z.
    pub fn unix_micros(self) -> i64 {
        self.0
    }

    /// A moment as RFC 3339 writes it, or PostgreSQL: an offset of hours alone, a space instead of the `T`. What is
    /// behind the microseconds is cut off. `None` for other texts, those without an offset included.
    pub fn parse(text: &str) -> Option<Timestamp> {
        let text = text.as_bytes();
        let number = |at: usize, digits: usize| {
            let digits = text.get(at..at + digits)?;
            let is_number = digits.iter().all(u8::is_ascii_digit);
            is_number.then(|| digits.iter().fold(0, |number, digit| number * 10 + i64::from(digit - b'0')))
        };
        let is = |at: usize, one_of: &[u8]| text.get(at).is_some_and(|byte| one_of.contains(byte));
        let punctuated = is(4, b"-") && is(7, b"-") && is(10, b"Tt ") && is(13, b":") && is(16, b":");
        let [year, month, day] = [number(0, 4)?, number(5, 2)?, number(8, 2)?];
        let [hour, minute, second] = [number(11, 2)?, number(14, 2)?, number(17, 2)?];
        let days = day_of(year, month, day);
        let exists = date_of(days) == (year, month, day);
        // The last minute of some years has a second more.
        if !exists || !punctuated || hour > 23 || minute > 59 || second > 60 {
            return None;
        }
        let (mut at, mut micros) = (19, 0);
        if is(at, b".") {
            let digits = text[at + 1..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            let known = digits.min(6);
            micros = number(at + 1, known).filter(|_| digits > 0)? * 10_i64.pow(6 - known as u32);
            at += 1 + digits;
        }
        let offset = match &text[at..] {
            [b'Z' | b'z'] => 0,
            [sign @ (b'+' | b'-'), rest @ ..] => {
                let minutes = match rest.len() {
                    2 => 0,
                    4 => number(at + 3, 2)?,
                    5 if rest[2] == b':' => number(at + 4, 2)?,
                    _ => return None,
                };
                let hours = number(at + 1, 2).filter(|hours| *hours < 24 && minutes < 60)?;
                (hours * 60 + minutes) * if *sign == b'-' { -60 } else { 60 }
            }
            _ => return None,
        };
        let seconds = days * 86_400 + hour * 3600 + minute * 60 + second - offset;
        Timestamp::from_unix_micros(seconds * 1_000_000 + micros)
    }

    /// As text.
    pub(crate) fn to_rfc3339(self) -> [u8; 27] {
        let seconds = self.0.div_euclid(1_000_000);
        let ((year, month, day), second) = (date_of(seconds.div_euclid(86_400)), seconds.rem_euclid(86_400));
        let mut text = *b"0000-00-00T00:00:00.000000Z";
        put(&mut text[0..4], year);
        put(&mut text[5..7], month);
        put(&mut text[8..10], day);
        put(&mut text[11..13], second / 3600);
        put(&mut text[14..16], second / 60 % 60);
        put(&mut text[17..19], second % 60);
        put(&mut text[20..26], self.0.rem_euclid(1_000_000));
        text
    }
}

/// Year, month and day of a day since 1970-01-01, in the Gregorian calendar. As Howard Hinnant computes it
/// ("chrono-compatible low-level date algorithms"): years begin in March, so that a leap day is a year's last, and 400
/// of them have 146,097 days.
fn date_of(day: i64) -> (i64, i64, i64) {
    let (era, day) = ((day + 719_468).div_euclid(146_097), (day + 719_468).rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    (era * 400 + year + i64::from(month <= 2), month, day)
}

/// The reverse. What is no date becomes the day of another one.
fn day_of(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let (era, year) = (year.div_euclid(400), year.rem_euclid(400));
    let day = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year * 365 + year / 4 - year / 100 + day - 719_468
}

/// Decimal digits of fixed width.
fn put(digits: &mut [u8], mut number: i64) {
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(str::from_utf8(&self.to_rfc3339()).expect("ASCII"))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(str::from_utf8(&self.to_rfc3339()).expect("ASCII"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_dates() {
        assert_eq!(date_of(0), (1970, 1, 1));
        let mut expected = (1, 1, 1);
        // From 0001-01-01 to 9999-12-31.
        for day in -719_162..=2_932_896 {
            assert_eq!(date_of(day), expected, "{day}");
            let (year, month, of_month) = expected;
            assert_eq!(day_of(year, month, of_month), day);
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = match month {
                2 => 28 + i64::from(leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            expected = match (month, of_month == length) {
                (_, false) => (year, month, of_month + 1),
                (12, true) => (year + 1, 1, 1),
                (_, true) => (year, month + 1, 1),
            };
        }
        assert_eq!(expected, (10_000, 1, 1));
    }

    #[test]
    fn timestamps() {
        let rows = [
            (0, "1970-01-01T00:00:00.000000Z"),
            (1, "1970-01-01T00:00:00.000001Z"),
            (-1, "1969-12-31T23:59:59.999999Z"),
            (951_782_400_000_000, "2000-02-29T00:00:00.000000Z"),
            (253_402_300_799_999_999, "9999-12-31T23:59:59.999999Z"),
            (-62_135_596_800_000_000, "0001-01-01T00:00:00.000000Z"),
        ];
        for (micros, text) in rows {
            assert_eq!(Timestamp::from_unix_micros(micros).unwrap().to_string(), text);
        }
        for micros in [i64::MIN, i64::MAX, 253_402_300_800_000_000] {
            assert_eq!(Timestamp::from_unix_micros(micros), None);
        }
    }

    #[test]
    fn timestamps_from_text() {
        let rows = [
            ("2020-02-29T23:59:59.123456Z", "2020-02-29T23:59:59.123456Z"),
            ("2020-02-29t23:59:59z", "2020-02-29T23:59:59.000000Z"),
            ("2020-02-29 23:59:59.5+00", "2020-02-29T23:59:59.500000Z"),
            ("2020-03-01T01:29:59.1234567+01:30", "2020-02-29T23:59:59.123456Z"),
            ("2020-02-29T23:59:59-0030", "2020-03-01T00:29:59.000000Z"),
            ("2016-12-31T23:59:60Z", "2017-01-01T00:00:00.000000Z"),
            ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00.000000Z"),
            ("9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59.999999Z"),
        ];
        for (text, expected) in rows {
            let found = Timestamp::parse(text).map(|time| time.to_string());
            assert_eq!(found.as_deref(), Some(expected), "{text}");
        }
        let wrong = [
            "",
            "2020-02-29",
            "2020-02-29T23:59:59",
            "2020-02-30T23:59:59Z",
            "2019-02-29T23:59:59Z",
            "2020-13-01T00:00:00Z",
            "2020-00-01T00:00:00Z",
            "2020-01-01T24:00:00Z",
            "2020-01-01T00:60:00Z",
            "2020-01-01T00:00:61Z",
            "2020-01-01T00:00:00.Z",
            "2020-01-01T00:00:00+1",
            "2020-01-01T00:00:00+24:00",
            "2020-01-01T00:00:00+01:60",
            "2020-01-01T00:00:00Zx",
            "2020-01-01T00:00:00+01:0x",
            "now",
            "infinity",
            "0000-12-31T00:00:00Z",
            "0001-01-01T00:00:00+01:00",
            "9999-12-31T23:59:59-01:00",
            "+2020-01-01T00:00:00Z",
            "2020-01-01T00:00:0éZ",
            "1577836800",
        ];
        for text in wrong {
            assert_eq!(Timestamp::parse(text), None, "{text}");
        }
    }
}
