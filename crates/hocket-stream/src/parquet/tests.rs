#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::scalar::append_text;
use super::types::LeafKind;
use crate::parquet::leaf::LeafValues;
use parquet::data_type::FixedLenByteArray;

fn text(kind: LeafKind, values: LeafValues) -> String {
    let mut out = Vec::new();
    append_text(&kind, &values, 0, false, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn decimals_are_written_as_python_writes_them() {
    for (value, scale, expected) in [
        (12_345, 2, "123.45"),
        (-5, 3, "-0.005"),
        (0, 2, "0.00"),
        (0, 8, "0E-8"),
        (15, 10, "1.5E-9"),
        (7, 0, "7"),
    ] {
        let kind = LeafKind::Decimal(scale);
        assert_eq!(text(kind.clone(), LeafValues::Int64(vec![value])), expected);
        let bytes = FixedLenByteArray::from(i128::from(value).to_be_bytes().to_vec());
        assert_eq!(text(kind, LeafValues::Fixed(vec![bytes])), expected);
    }
    let most = FixedLenByteArray::from(
        vec![0x80; 1]
            .into_iter()
            .chain(vec![0; 15])
            .collect::<Vec<_>>(),
    );
    let least = text(LeafKind::Decimal(0), LeafValues::Fixed(vec![most]));
    assert_eq!(least, i128::MIN.to_string());
}

#[test]
fn times_have_as_many_digits_as_they_need() {
    let at = |count, per_second, is_utc| {
        text(
            LeafKind::Timestamp(per_second, is_utc),
            LeafValues::Int64(vec![count]),
        )
    };
    assert_eq!(at(0, 1_000, true), "1970-01-01T00:00:00+00:00");
    assert_eq!(at(-1, 1_000, false), "1969-12-31T23:59:59.999000");
    assert_eq!(
        at(951_782_400_000_000_001, 1_000_000_000, false),
        "2000-02-29T00:00:00.000000001"
    );
    assert_eq!(
        at(253_402_300_799_000_000, 1_000_000, true),
        "9999-12-31T23:59:59+00:00"
    );
    assert_eq!(
        text(LeafKind::Date, LeafValues::Int32(vec![-719_162])),
        "0001-01-01"
    );
    let late = append_text(
        &LeafKind::Time(1_000),
        &LeafValues::Int32(vec![86_400_000]),
        0,
        false,
        &mut Vec::new(),
    );
    assert!(late.unwrap_err().contains("86400000"));
}
