//! Points in time as text: RFC 3339 in UTC with microseconds and `Z`, as in `2020-02-29T23:59:59.123456Z`.

use serde::Serializer;
use std::num::NonZero;
use time::format_description::well_known::{
    Iso8601, Rfc3339,
    iso8601::{Config, EncodedConfig, TimePrecision},
};
use time::{OffsetDateTime, UtcOffset};

/// The format of a time as text, with six digits behind the seconds.
const MICROSECOND_FORMAT: EncodedConfig =
    Config::DEFAULT.set_time_precision(TimePrecision::Second { decimal_digits: NonZero::new(6) }).encode();

/// Returns a time as text. Panics for a year outside of 1 to 9999, which no column of ours allows.
pub fn to_text(time: OffsetDateTime) -> String {
    time.format(&Iso8601::<MICROSECOND_FORMAT>).expect("the year is from 1 to 9999")
}

/// Serializes a time as the text that [`to_text`] returns.
pub(super) fn serialize<S: Serializer>(time: &OffsetDateTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&to_text(*time))
}

/// Parses a time as RFC 3339, PostgreSQL or Ruby write times: also with a space for the `T`, an offset of hours alone,
/// or `UTC` for `Z`. Cuts digits off behind the microseconds. Returns `None` for a time without an offset, and for
/// years outside of 1 to 9999.
pub fn parse(text: &str) -> Option<OffsetDateTime> {
    let utc = text.strip_suffix("UTC").map(|text| format!("{}Z", text.trim_end()));
    let text = utc.as_deref().unwrap_or(text);
    let parse = |text: &str| OffsetDateTime::parse(text, &Rfc3339);
    let time = parse(text).or_else(|_| parse(&format!("{text}:00"))).ok()?;
    let time = time.checked_to_offset(UtcOffset::UTC).filter(|time| time.year() > 0)?;
    Some(time.truncate_to_microsecond())
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
        for (micros, expected) in rows {
            let time = OffsetDateTime::from_unix_timestamp_nanos(micros * 1000).unwrap();
            assert_eq!(to_text(time), expected);
        }
    }

    #[test]
    fn timestamps_from_text() {
        let rows = [
            ("2020-02-29T23:59:59.123456Z", "2020-02-29T23:59:59.123456Z"),
            ("2020-02-29t23:59:59z", "2020-02-29T23:59:59.000000Z"),
            ("2020-02-29 23:59:59.5+00", "2020-02-29T23:59:59.500000Z"),
            ("2020-03-01T01:29:59.1234567+01:30", "2020-02-29T23:59:59.123456Z"),
            ("1969-12-31T23:59:59.1234567Z", "1969-12-31T23:59:59.123456Z"),
            ("2020-02-29T23:59:59-00:30", "2020-03-01T00:29:59.000000Z"),
            ("2020-03-01 04:59:59+05", "2020-02-29T23:59:59.000000Z"),
            ("2020-02-29 23:59:59 UTC", "2020-02-29T23:59:59.000000Z"),
            ("2020-02-29T23:59:59.5UTC", "2020-02-29T23:59:59.500000Z"),
            ("2016-12-31T23:59:60Z", "2016-12-31T23:59:59.999999Z"),
            ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00.000000Z"),
            ("9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59.999999Z"),
        ];
        for (given, expected) in rows {
            assert_eq!(parse(given).map(to_text).as_deref(), Some(expected), "{given}");
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
            "UTC",
            "2020-02-29 UTC",
            "2020-02-29 23:59:59 +00 UTC",
            "2020-02-29 23:59:59Z UTC",
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
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
