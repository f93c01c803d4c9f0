//! Conversion of pickle values to the manifest's tagged JSON.

use serde_json::{Map, Number, Value as Json, json};

use super::names::GlobalMeaning;
use super::tree::{DecodedPickle, PickleFault, PickleNode, PickleValue};
use crate::format::digest::to_base64;

const DEEPEST: usize = 64;

/// The largest integer that every JSON reader preserves.
const EXACT: i64 = 1 << 53;

/// Converts a value without tensors to JSON.
///
/// `left` is the number of values that may still be written; text and bytes count one more value for every 16
/// bytes. The limit is needed because a memo can refer to one list a million times.
pub(crate) fn to_json(
    pickle: &DecodedPickle<'_>,
    value: PickleValue,
    left: &mut usize,
) -> Result<Json, PickleFault> {
    write(pickle, value, left, 0)
}

fn write(
    pickle: &DecodedPickle<'_>,
    value: PickleValue,
    left: &mut usize,
    depth: usize,
) -> Result<Json, PickleFault> {
    spend(left, 1)?;
    if depth > DEEPEST {
        return Err(PickleFault::Unfit(format!(
            "a value is nested more than {DEEPEST} deep, or holds itself"
        )));
    }
    let all = |items: &[PickleValue], left: &mut usize| {
        items
            .iter()
            .map(|&item| write(pickle, item, left, depth + 1))
            .collect::<Result<Vec<Json>, PickleFault>>()
    };
    let node = match value {
        PickleValue::None => return Ok(Json::Null),
        PickleValue::Bool(value) => return Ok(Json::Bool(value)),
        PickleValue::Int(number) => return Ok(integer(number.into())),
        PickleValue::Float(number) => return Ok(float(number)),
        PickleValue::Name(GlobalMeaning::Dtype(dtype)) => {
            return Ok(json!(format!("torch.{}", dtype.name())));
        }
        PickleValue::Name(name) => return Err(unfit(pickle, name)),
        PickleValue::Node(_) => pickle.node(value),
    };
    let Some(node) = node else {
        return Err(PickleFault::Broken("a value is nowhere".to_owned()));
    };
    Ok(match node {
        PickleNode::Text(text) => {
            spend(left, text.len() / 16)?;
            json!(text)
        }
        PickleNode::Bytes(bytes) => {
            spend(left, bytes.len() / 16)?;
            json!({"$bytes": to_base64(bytes)})
        }
        PickleNode::Long(bytes) => json!({"$int": decimal(bytes)}),
        PickleNode::List(items) => Json::Array(all(items, left)?),
        PickleNode::Tuple(items) | PickleNode::Set(items) => json!({"$tuple": all(items, left)?}),
        PickleNode::Dict(pairs) => mapping(pickle, pairs, left, depth)?,
        PickleNode::Record(record) => {
            let (name, arguments, _) = **record;
            match name {
                GlobalMeaning::RebuildTensor | GlobalMeaning::RebuildTensorV3 => {
                    return Err(PickleFault::Broken(
                        "a tensor is nested inside a value".to_owned(),
                    ));
                }
                GlobalMeaning::NumpyScalar => {
                    numpy_scalar(pickle, arguments).ok_or_else(|| unfit(pickle, name))?
                }
                _ => return Err(unfit(pickle, name)),
            }
        }
        PickleNode::Persistent(_) => {
            return Err(PickleFault::Broken(
                "a storage is nested inside a value".to_owned(),
            ));
        }
    })
}

fn mapping(
    pickle: &DecodedPickle<'_>,
    pairs: &[(PickleValue, PickleValue)],
    left: &mut usize,
    depth: usize,
) -> Result<Json, PickleFault> {
    let plain: Option<Vec<&str>> = pairs
        .iter()
        .map(|(key, _)| pickle.text(*key).filter(|key| !key.starts_with('$')))
        .collect();
    if let Some(keys) = plain {
        let mut map = Map::with_capacity(pairs.len());
        for (key, (_, value)) in keys.iter().zip(pairs) {
            spend(left, key.len() / 16)?;
            map.insert((*key).to_owned(), write(pickle, *value, left, depth + 1)?);
        }
        return Ok(Json::Object(map));
    }
    let mut written = Vec::with_capacity(pairs.len());
    for &(key, value) in pairs {
        let key = write(pickle, key, left, depth + 1)?;
        written.push(json!([key, write(pickle, value, left, depth + 1)?]));
    }
    Ok(json!({"$map": written}))
}

fn spend(left: &mut usize, count: usize) -> Result<(), PickleFault> {
    *left = left.checked_sub(count).ok_or_else(|| {
        PickleFault::Broken(
            "its values, written out, are too many: one is named again and again".to_owned(),
        )
    })?;
    Ok(())
}

fn unfit(pickle: &DecodedPickle<'_>, name: GlobalMeaning) -> PickleFault {
    let shown = pickle.shown(name);
    PickleFault::Unfit(format!("a {shown}, which cannot be read here"))
}

/// Converts a NumPy scalar to a plain number; returns none for other dtypes and byte orders.
fn numpy_scalar(pickle: &DecodedPickle<'_>, arguments: PickleValue) -> Option<Json> {
    let &[dtype, content] = pickle.items(arguments)? else {
        return None;
    };
    let (dtype, state) = pickle.record(dtype, GlobalMeaning::NumpyDtype)?;
    let code = pickle.text(*pickle.items(dtype)?.first()?)?;
    let order = pickle.text(*pickle.items(state)?.get(1)?)?;
    let PickleNode::Bytes(content) = pickle.node(content)? else {
        return None;
    };
    let content: &[u8] = content;
    if !matches!(order, "<" | "|") || code.get(1..)?.parse() != Ok(content.len()) {
        return None;
    }
    let is_negative = code.starts_with('i') && content.last()? & 0x80 != 0;
    let start = if is_negative { -1_i128 } else { 0 };
    let fold = |number, &byte: &u8| number << 8 | i128::from(byte);
    match code {
        "b1" => Some(json!(content != [0])),
        "f4" => Some(float(f32::from_le_bytes(content.try_into().ok()?).into())),
        "f8" => Some(float(f64::from_le_bytes(content.try_into().ok()?))),
        "i1" | "i2" | "i4" | "i8" | "u1" | "u2" | "u4" | "u8" => {
            Some(integer(content.iter().rev().fold(start, fold)))
        }
        _ => None,
    }
}

fn integer(number: i128) -> Json {
    match i64::try_from(number) {
        Ok(number) if (-EXACT..=EXACT).contains(&number) => json!(number),
        _ => json!({"$int": number.to_string()}),
    }
}

fn float(number: f64) -> Json {
    match Number::from_f64(number) {
        Some(number) => Json::Number(number),
        None if number.is_nan() => json!({"$float": "nan"}),
        None if number > 0.0 => json!({"$float": "inf"}),
        None => json!({"$float": "-inf"}),
    }
}

/// Formats a long integer in decimal, by repeated division.
fn decimal(bytes: &[u8]) -> String {
    let is_negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut digits: Vec<u8> = Vec::new();
    let mut number: Vec<u8> = bytes.to_vec();
    if is_negative {
        // Two's complement: invert, add one.
        let mut carry = true;
        for byte in &mut number {
            let (sum, over) = (!*byte).overflowing_add(u8::from(carry));
            *byte = sum;
            carry = over;
        }
    }
    while number.iter().any(|&byte| byte != 0) {
        let mut rest = 0_u32;
        for byte in number.iter_mut().rev() {
            let current = rest << 8 | u32::from(*byte);
            *byte = (current / 10) as u8;
            rest = current % 10;
        }
        digits.push(b'0' + rest as u8);
    }
    if digits.is_empty() {
        digits.push(b'0');
    }
    if is_negative {
        digits.push(b'-');
    }
    digits
        .iter()
        .rev()
        .map(|&digit| char::from(digit))
        .collect()
}
