//! Parsing of text shards: converts JSON objects and separated values to the bytes of MDS columns.

use serde_json::{Map, Value};

use crate::shard::schema::Column;

/// A sample that does not match its columns.
pub(crate) struct SampleMismatch {
    pub expected: String,
    pub actual: String,
}

type Fit<T> = Result<T, SampleMismatch>;

fn misfit(expected: impl Into<String>, actual: impl Into<String>) -> SampleMismatch {
    SampleMismatch {
        expected: expected.into(),
        actual: actual.into(),
    }
}

/// Returns the text of a sample without its terminating newline.
fn line<'a>(sample: &'a [u8], newline: &str) -> Fit<&'a str> {
    let text =
        std::str::from_utf8(sample).map_err(|error| misfit("UTF-8 text", error.to_string()))?;
    text.strip_suffix(newline)
        .ok_or_else(|| misfit("a newline at the end", "none"))
}

/// Parses one JSON object. Keys that are not columns are ignored.
pub(crate) fn read_json(
    sample: &[u8],
    columns: &[Column],
    newline: &str,
    mut take: impl FnMut(usize, &[u8]),
) -> Fit<()> {
    let object: Map<String, Value> = serde_json::from_str(line(sample, newline)?)
        .map_err(|error| misfit("a JSON object", error.to_string()))?;
    for (place, column) in columns.iter().enumerate() {
        let (name, value) = (&column.name, object.get(&column.name));
        match column.encoding.as_str() {
            "str" => {
                let text = value.and_then(Value::as_str);
                take(
                    place,
                    text.ok_or_else(|| wrong(name, "a string", value))?
                        .as_bytes(),
                );
            }
            "int" => {
                let number = value.and_then(Value::as_i64);
                let number = number.ok_or_else(|| wrong(name, "an integer of 64 bits", value))?;
                take(place, &number.to_le_bytes());
            }
            _ => {
                let number = value.and_then(Value::as_f64);
                let number = number.ok_or_else(|| wrong(name, "a number", value))?;
                take(place, &number.to_le_bytes());
            }
        }
    }
    Ok(())
}

fn wrong(name: &str, expected: &str, value: Option<&Value>) -> SampleMismatch {
    let actual = value.map_or("nothing".to_owned(), |value| excerpt(&value.to_string()));
    misfit(format!("{expected} as `{name}`"), actual)
}

/// Parses one line of separated values.
pub(crate) fn read_xsv(
    sample: &[u8],
    columns: &[Column],
    separator: &str,
    newline: &str,
    mut take: impl FnMut(usize, &[u8]),
) -> Fit<()> {
    let text = line(sample, newline)?;
    let found = text.split(separator).count();
    if found != columns.len() {
        return Err(misfit(
            format!("{} values", columns.len()),
            format!("{found}"),
        ));
    }
    for (place, (column, value)) in columns.iter().zip(text.split(separator)).enumerate() {
        let refuse =
            |expected: &str| misfit(format!("{expected} as `{}`", column.name), excerpt(value));
        match column.encoding.as_str() {
            "str" => take(place, value.as_bytes()),
            "int" => {
                let number: i64 = value.parse().map_err(|_| refuse("an integer of 64 bits"))?;
                take(place, &number.to_le_bytes());
            }
            _ => {
                let number: f64 = value.parse().map_err(|_| refuse("a number"))?;
                take(place, &number.to_le_bytes());
            }
        }
    }
    Ok(())
}

/// Returns the beginning of a text, for a message.
fn excerpt(text: &str) -> String {
    let shown: String = text.chars().take(60).collect();
    format!("`{}`", shown.escape_debug())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use proptest::prelude::*;

    fn columns() -> Vec<Column> {
        [
            ("a", "int", Some(8)),
            ("b", "str", None),
            ("c", "float64", Some(8)),
        ]
        .map(|(name, encoding, width)| Column {
            name: name.into(),
            encoding: encoding.into(),
            width,
        })
        .to_vec()
    }

    fn json(sample: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let mut values = Vec::new();
        read_json(sample, &columns(), "\n", |_, value| {
            values.push(value.to_vec())
        })
        .map(|()| values)
        .map_err(|found| format!("{}; {}", found.expected, found.actual))
    }

    fn xsv(sample: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let mut values = Vec::new();
        read_xsv(sample, &columns(), "::", "\r\n", |_, value| {
            values.push(value.to_vec())
        })
        .map(|()| values)
        .map_err(|found| format!("{}; {}", found.expected, found.actual))
    }

    #[test]
    fn errors_name_the_invalid_value() {
        for (sample, expected) in [
            (&b"{\"a\": 1}\n"[..], "a string as `b`; nothing"),
            (
                b"{\"a\": 9223372036854775808, \"b\": \"\", \"c\": 1}\n",
                "64 bits as `a`; `9223372036854775808`",
            ),
            (b"{\"a\": 1, \"b\": 2, \"c\": 1}\n", "a string as `b`; `2`"),
            (b"{\"a\": 1}", "newline"),
            (b"[1]\n", "a JSON object"),
            (b"\xff\n", "UTF-8"),
        ] {
            let message = json(sample).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
        for (sample, expected) in [
            (&b"1::x\r\n"[..], "3 values; 2"),
            (b"1.5::x::1\r\n", "64 bits as `a`; `1.5`"),
            (b"1::x::one\r\n", "a number as `c`; `one`"),
            (b"1::x::1\n", "newline"),
        ] {
            let message = xsv(sample).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }

    proptest! {
        #[test]
        fn numbers_and_texts_round_trip_bit_for_bit(a: i64, b in "[^:\r\n]*", c in prop::num::f64::NORMAL) {
            let expected = vec![a.to_le_bytes().to_vec(), b.as_bytes().to_vec(), c.to_le_bytes().to_vec()];
            let object = serde_json::json!({"a": a, "b": b, "c": c, "more": [1]});
            prop_assert_eq!(&json(format!("{object}\n").as_bytes()).unwrap(), &expected);
            prop_assert_eq!(&xsv(format!("{a}::{b}::{c:?}\r\n").as_bytes()).unwrap(), &expected);
        }

        #[test]
        fn arbitrary_bytes_never_panic(sample: Vec<u8>) {
            let _ = (json(&sample), xsv(&sample));
        }
    }
}
