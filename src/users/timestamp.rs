//! Moments, as RFC 3339 writes them.

use serde::{Serialize, Serializer};
use std::fmt;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

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

    /// Parses a moment as RFC 3339 writes it, or as PostgreSQL does: a space for the `T`, an offset of hours alone. Cuts
    /// off what follows the microseconds. Returns `None` for other texts, those without an offset included.
    pub fn parse(text: &str) -> Option<Timestamp> {
        let parse = |text: &str| OffsetDateTime::parse(text, &Rfc3339);
        let time = parse(text).or_else(|_| parse(&format!("{text}:00"))).ok()?;
        Timestamp::from_unix_micros(time.unix_timestamp_nanos().div_euclid(1000).try_into().ok()?)
    }

    /// Returns the time as text.
    fn to_rfc3339(self) -> [u8; 27] {
        let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(self.0) * 1000);
        let time = time.expect("it is of the years 1 to 9999");
        let (year, month, day) = time.to_calendar_date();
        let (hour, minute, second, micros) = time.to_hms_micro();
        let mut text = *b"0000-00-00T00:00:00.000000Z";
        let pairs = [(5, u8::from(month)), (8, day), (11, hour), (14, minute), (17, second)];
        let pairs = pairs.map(|(at, number)| (at, at + 2, number.into()));
        for (from, to, mut number) in [(0, 4, year.unsigned_abs()), (20, 26, micros)].into_iter().chain(pairs)
        {
            for digit in text[from..to].iter_mut().rev() {
                *digit += (number % 10) as u8;
                number /= 10;
            }
        }
        text
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
            ("2020-02-29T23:59:59-00:30", "2020-03-01T00:29:59.000000Z"),
            ("2020-03-01 04:59:59+05", "2020-02-29T23:59:59.000000Z"),
            ("2016-12-31T23:59:60Z", "2016-12-31T23:59:59.999999Z"),
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
            "2020-01-01T00:00:00-0030",
            "2020-01-01T00:00+01",
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
