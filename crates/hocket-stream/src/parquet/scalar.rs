//! Single values of a leaf column: numbers as bytes, and every kind as text.

use parquet::data_type::AsBytes;

use crate::parquet::leaf::LeafValues;
use crate::parquet::types::LeafKind;
use crate::shard::samples::{NumberKind, NumberType};

const SECONDS_PER_DAY: i64 = 86_400;
const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// A value that does not have its column's type: the text names the problem.
pub(crate) type Unreadable = String;

/// Returns the bytes of a value of bytes or text.
pub(crate) fn bytes(values: &LeafValues, at: usize) -> Option<&[u8]> {
    match values {
        LeafValues::Bytes(values) => values.get(at).map(AsBytes::as_bytes),
        LeafValues::Fixed(values) => values.get(at).map(AsBytes::as_bytes),
        _ => None,
    }
}

/// Returns an integer, or the count of a time; none for a time of 96 bits whose nanoseconds do not fit in 64.
pub(crate) fn integer(values: &LeafValues, at: usize) -> Option<i64> {
    match values {
        LeafValues::Int32(values) => values.get(at).map(|&value| value.into()),
        LeafValues::Int64(values) => values.get(at).copied(),
        // Nanoseconds wrap around for a moment outside of the years 1678 to 2261.
        LeafValues::Int96(values) => values
            .get(at)
            .map(|value| (value.to_nanos(), value.to_seconds()))
            .filter(|(nanos, seconds)| nanos.div_euclid(1_000_000_000) == *seconds)
            .map(|(nanos, _)| nanos),
        _ => None,
    }
}

/// Appends a number in little-endian order with the width of `number`.
pub(crate) fn append_number(
    values: &LeafValues,
    at: usize,
    number: NumberType,
    out: &mut Vec<u8>,
) -> Result<(), Unreadable> {
    let own = match values {
        // A file stores small integers in 32 bits, and those without a sign with the same bits.
        LeafValues::Int32(values) => values
            .get(at)
            .map(|value| widen((*value).into(), number, 32)),
        LeafValues::Int64(values) => values.get(at).map(|value| widen(*value, number, 64)),
        LeafValues::Float(values) => values.get(at).map(|value| u64::from(value.to_bits())),
        LeafValues::Double(values) => values.get(at).map(|value| value.to_bits()),
        LeafValues::Fixed(values) => values.get(at).and_then(|value| {
            let pair: [u8; 2] = value.as_bytes().try_into().ok()?;
            Some(u16::from_le_bytes(pair).into())
        }),
        _ => None,
    };
    let bits = own.ok_or_else(|| "a value of another type in a column of numbers".to_owned())?;
    out.extend_from_slice(bits.to_le_bytes().get(..number.bytes).unwrap_or_default());
    Ok(())
}

/// Returns a stored integer of `stored` bits as one of 64 bits with the sign of its type.
fn widen(value: i64, number: NumberType, stored: u32) -> u64 {
    match (number.kind, stored) {
        (NumberKind::Unsigned, 32) => u64::from(value as u32),
        _ => value as u64,
    }
}

/// Appends an integer as one of 64 bits with a sign.
pub(crate) fn append_int64(
    values: &LeafValues,
    at: usize,
    number: NumberType,
    out: &mut Vec<u8>,
) -> Result<(), Unreadable> {
    let wide = NumberType { bytes: 8, ..number };
    append_number(values, at, wide, out)
}

/// Appends a float as one of 64 bits, which holds every smaller one.
pub(crate) fn append_float64(
    values: &LeafValues,
    at: usize,
    out: &mut Vec<u8>,
) -> Result<(), Unreadable> {
    let value = match values {
        LeafValues::Float(values) => values.get(at).map(|&value| value.into()),
        LeafValues::Double(values) => values.get(at).copied(),
        LeafValues::Fixed(_) => {
            let pair = bytes(values, at).and_then(|bytes| bytes.try_into().ok());
            pair.map(|pair| half(u16::from_le_bytes(pair)))
        }
        _ => None,
    };
    let value: f64 =
        value.ok_or_else(|| "a value of another type in a column of floats".to_owned())?;
    out.extend_from_slice(&value.to_le_bytes());
    Ok(())
}

/// Appends a value as text: as a sample stores it or, if `is_json`, as JSON.
pub(crate) fn append_text(
    kind: &LeafKind,
    values: &LeafValues,
    at: usize,
    is_json: bool,
    out: &mut Vec<u8>,
) -> Result<(), Unreadable> {
    let other = || "a value of another type than its column".to_owned();
    let count = || {
        integer(values, at).ok_or_else(|| {
            "no integer, or a time of 96 bits (INT96) outside of the years 1678 to 2261".to_owned()
        })
    };
    let text = match kind {
        LeafKind::Bool => match values {
            LeafValues::Bool(values) => values.get(at).copied().ok_or_else(other)?.to_string(),
            _ => return Err(other()),
        },
        LeafKind::Number(number) => number_text(values, at, *number).ok_or_else(other)?,
        LeafKind::Text => {
            let text = std::str::from_utf8(bytes(values, at).ok_or_else(other)?);
            let text = text.map_err(|_| "a string that is not UTF-8".to_owned())?;
            return append_string(text, is_json, out);
        }
        LeafKind::Binary => {
            let value = bytes(values, at).ok_or_else(other)?;
            if !is_json {
                out.extend_from_slice(value);
                return Ok(());
            }
            return append_string(&base64(value), is_json, out);
        }
        LeafKind::Uuid => {
            return append_string(&uuid(bytes(values, at).ok_or_else(other)?), is_json, out);
        }
        LeafKind::Decimal(scale) => {
            let digits = match bytes(values, at) {
                Some(value) => big_endian_digits(value),
                None => count()?.to_string(),
            };
            return append_string(&decimal(&digits, *scale), is_json, out);
        }
        LeafKind::Date => return append_string(&date(count()?), is_json, out),
        LeafKind::Time(per_second) => {
            let count = count()?;
            if !(0..SECONDS_PER_DAY * per_second).contains(&count) {
                return Err(format!(
                    "the time of day {count}, expected less than 24 hours"
                ));
            }
            return append_string(&time_of_day(count, *per_second), is_json, out);
        }
        LeafKind::Timestamp(per_second, is_utc) => {
            let text = timestamp(count()?, *per_second, *is_utc);
            return append_string(&text, is_json, out);
        }
        LeafKind::Null => return Err("a value in a column without any".into()),
        LeafKind::Unsupported(name) => return Err(format!("a value of type {name}")),
    };
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

fn append_string(text: &str, is_json: bool, out: &mut Vec<u8>) -> Result<(), Unreadable> {
    if is_json {
        return serde_json::to_writer(out, text).map_err(|error| error.to_string());
    }
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

/// Returns a number as Python's JSON writes it.
fn number_text(values: &LeafValues, at: usize, number: NumberType) -> Option<String> {
    let float = |value: f64| match value {
        _ if value.is_nan() => "NaN".into(),
        _ if value.is_infinite() && value > 0.0 => "Infinity".into(),
        _ if value.is_infinite() => "-Infinity".into(),
        _ => serde_json::Number::from_f64(value)
            .map_or_else(String::new, |number| number.to_string()),
    };
    match values {
        LeafValues::Float(values) => values.get(at).map(|&value| float(value.into())),
        LeafValues::Double(values) => values.get(at).map(|&value| float(value)),
        LeafValues::Fixed(_) => {
            let pair: [u8; 2] = bytes(values, at)?.try_into().ok()?;
            Some(float(half(u16::from_le_bytes(pair))))
        }
        _ => {
            let value = integer(values, at)?;
            let is_wide = matches!(values, LeafValues::Int64(_));
            Some(match (number.kind, is_wide) {
                (NumberKind::Unsigned, true) => (value as u64).to_string(),
                (NumberKind::Unsigned, false) => (value as u32).to_string(),
                _ => value.to_string(),
            })
        }
    }
}

/// Returns the value of a float of 16 bits.
fn half(bits: u16) -> f64 {
    let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    sign * match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    }
}

/// Returns the date of a number of days since 1970, by the proleptic Gregorian calendar.
fn date(days: i64) -> String {
    // Eras of 400 years, and years that begin in March, so that a leap day is the last one of a year.
    let shifted = i128::from(days) + 719_468;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + i128::from(month <= 2);
    format!("{year:04}-{month:02}-{day_of_month:02}")
}

/// Returns a time of day, with 6 digits of a second, with 9 if needed, and with none if they are 0.
fn time_of_day(count: i64, per_second: i64) -> String {
    let (seconds, rest) = (count / per_second, count % per_second);
    let nanos = rest * (1_000_000_000 / per_second);
    let digits = match nanos {
        0 => String::new(),
        _ if nanos % 1000 == 0 => format!(".{:06}", nanos / 1000),
        _ => format!(".{nanos:09}"),
    };
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{hour:02}:{minute:02}:{second:02}{digits}")
}

fn timestamp(count: i64, per_second: i64, is_utc: bool) -> String {
    let day = SECONDS_PER_DAY * per_second;
    let (days, rest) = (count.div_euclid(day), count.rem_euclid(day));
    let zone = if is_utc { "+00:00" } else { "" };
    format!("{}T{}{zone}", date(days), time_of_day(rest, per_second))
}

fn uuid(value: &[u8]) -> String {
    let hex: Vec<String> = value.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |range: std::ops::Range<usize>| hex.get(range).unwrap_or_default().concat();
    [0..4, 4..6, 6..8, 8..10, 10..16].map(part).join("-")
}

/// Returns the digits of a big-endian integer in two's complement, of any size.
fn big_endian_digits(value: &[u8]) -> String {
    let is_negative = value.first().is_some_and(|&byte| byte >= 0x80);
    // The magnitude, in digits of 10^9, the lowest first.
    let mut parts: Vec<u64> = vec![0];
    let mut add = |byte: u8| {
        let mut carry = u64::from(byte);
        for part in &mut parts {
            let next = *part * 256 + carry;
            (*part, carry) = (next % 1_000_000_000, next / 1_000_000_000);
        }
        if carry > 0 {
            parts.push(carry);
        }
    };
    // -x is the complement of x - 1, so the magnitude is the complement plus 1.
    value
        .iter()
        .for_each(|&byte| add(if is_negative { !byte } else { byte }));
    if is_negative {
        let mut carry = 1;
        for part in &mut parts {
            let next = *part + carry;
            (*part, carry) = (next % 1_000_000_000, next / 1_000_000_000);
        }
        if carry > 0 {
            parts.push(carry);
        }
    }
    let mut text = parts.last().copied().unwrap_or_default().to_string();
    for part in parts.iter().rev().skip(1) {
        text.push_str(&format!("{part:09}"));
    }
    if is_negative {
        format!("-{text}")
    } else {
        text
    }
}

/// Returns a decimal number as Python's `Decimal` writes it.
fn decimal(digits: &str, scale: usize) -> String {
    let (sign, digits) = match digits.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", digits),
    };
    let digits = match digits.trim_start_matches('0') {
        "" => "0",
        rest => rest,
    };
    let adjusted = digits.len() as i64 - 1 - scale as i64;
    if adjusted < -6 {
        let (first, rest) = digits.split_at(1);
        let point = if rest.is_empty() { "" } else { "." };
        return format!("{sign}{first}{point}{rest}E{adjusted}");
    }
    if scale == 0 {
        return format!("{sign}{digits}");
    }
    let padded = format!("{digits:0>width$}", width = scale + 1);
    let (whole, fraction) = padded.split_at(padded.len() - scale);
    format!("{sign}{whole}.{fraction}")
}

fn base64(value: &[u8]) -> String {
    let mut text = String::with_capacity(value.len().div_ceil(3) * 4);
    for group in value.chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or_default());
        let word = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            let index = (word >> (18 - 6 * place) & 63) as usize;
            text.push(if place > group.len() {
                '='
            } else {
                BASE64[index] as char
            });
        }
    }
    text
}
