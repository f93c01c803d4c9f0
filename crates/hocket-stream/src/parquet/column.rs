//! The values of one column of a row group in their MDS encoding.

use std::ops::Range;

use crate::parquet::assemble::{Leaves, append_json};
use crate::parquet::leaf::LeafColumn;
use crate::parquet::scalar::{append_float64, append_int64, append_number, append_text};
use crate::parquet::types::{LeafKind, Node, Shape};
use crate::shard::samples::{NumberKind, NumberType, StoredForm, append_shape};
use crate::shard::schema::Column;

/// A reason why a row group cannot be decoded.
pub(crate) enum ColumnProblem {
    /// The bytes are not what the footer says: the text is what they are.
    Corrupt(String),
    /// The values do not fit the encoding: the text says what to do.
    Unfit(String),
}

/// The rows of a row group that are read.
pub(crate) struct RowChoice {
    /// A bit for each row, from the highest one of each byte; `None` for all rows.
    bits: Option<Vec<u8>>,
    total: usize,
    len: usize,
}

impl RowChoice {
    /// Chooses `samples` of `total` rows, by the digits of [`RowGroup::rows`](crate::shard::row_group::RowGroup).
    pub(crate) fn parse(
        digits: Option<&str>,
        total: i64,
        samples: u32,
    ) -> Result<Self, ColumnProblem> {
        let (total, len) = (total.max(0) as usize, samples as usize);
        let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bits = digits.map(|digits| digits.as_bytes().chunks(2).map(pair).collect());
        let choice = Self {
            bits: bits.map(Option::unwrap_or_default),
            total,
            len,
        };
        let count = match &choice.bits {
            Some(bits) if bits.len() == total.div_ceil(8) => {
                (0..total).filter(|&row| choice.contains(row)).count()
            }
            Some(_) => 0,
            None => total,
        };
        if count != len {
            let actual = format!("{count} of {total} rows to read, expected {len}");
            return Err(ColumnProblem::Corrupt(actual));
        }
        Ok(choice)
    }

    fn contains(&self, row: usize) -> bool {
        let byte = |bits: &Vec<u8>| bits.get(row / 8).copied().unwrap_or_default();
        let bits = self.bits.as_ref().map(byte);
        bits.is_none_or(|byte| byte >> (7 - row % 8) & 1 == 1)
    }
}

/// The encoded values of a column, concatenated.
pub(crate) struct EncodedColumn {
    pub(crate) data: Vec<u8>,
    /// The end of each value; `None` if all have `width` bytes.
    pub(crate) ends: Option<Vec<usize>>,
    width: usize,
}

impl EncodedColumn {
    /// Returns the extent of a row's value.
    pub(crate) fn range(&self, row: usize) -> Range<usize> {
        match &self.ends {
            None => row * self.width..(row + 1) * self.width,
            Some(ends) => {
                let end = |row: usize| ends.get(row).copied().unwrap_or_default();
                row.checked_sub(1).map_or(0, end)..end(row)
            }
        }
    }
}

/// How a row's value is encoded.
enum Writer<'a> {
    Number(NumberType),
    Int64(NumberType),
    Float64,
    Text(&'a LeafKind),
    Json,
    /// The bytes within a file as `datasets` stores it.
    File(&'a Node),
    Files(&'a Node, &'a Node, (i16, i16)),
    Array(NumberType, Option<Vec<usize>>),
}

/// Encodes the values of `node` for a column of the data set.
pub(crate) fn encode(
    column: &Column,
    node: &Node,
    leaves: Vec<LeafColumn>,
    rows: &RowChoice,
) -> Result<EncodedColumn, ColumnProblem> {
    let writer = writer(column, node).ok_or_else(|| {
        ColumnProblem::Unfit(format!(
            "column `{}` cannot be read as `{}`: expected one of {:?}",
            column.name,
            column.encoding,
            node.encodings().unwrap_or_default()
        ))
    })?;
    let null = |row: usize| {
        ColumnProblem::Unfit(format!(
            "row {row} has no value in column `{0}`, which is read as `{1}`: expected one in every row; give `encodings={{\"{0}\": \"json\"}}`, or leave the column out",
            column.name, column.encoding
        ))
    };
    let in_rows = |row: usize, found: String| {
        ColumnProblem::Corrupt(format!("in row {row}, column `{}`: {found}", column.name))
    };
    let is_json = matches!(writer, Writer::Json);
    if let [leaf] = leaves.as_slice()
        && !is_json
        && leaf.rep().is_none()
        && rows.bits.is_none()
        && let Some(row) = leaf.first_null()
    {
        return Err(null(row));
    }
    let mut leaves = Leaves::new(leaves, node.first);
    let (mut data, mut ends) = (Vec::new(), Vec::with_capacity(rows.len));
    for row in 0..rows.total {
        if !rows.contains(row) {
            leaves.pass(node).map_err(|found| in_rows(row, found))?;
            continue;
        }
        if !is_json && leaves.is_null(node).map_err(|found| in_rows(row, found))? {
            return Err(null(row));
        }
        let written = append(&writer, node, &mut leaves, &mut data);
        if !written.map_err(|found| in_rows(row, found))? {
            return Err(null(row));
        }
        if let Some(width) = column.width
            && data.len() != (ends.len() + 1) * width as usize
        {
            let last = ends.last().copied().unwrap_or_default();
            return Err(ColumnProblem::Unfit(format!(
                "row {row} has {} bytes in column `{}`: expected {width}, as `{}` has",
                data.len() - last,
                column.name,
                column.encoding
            )));
        }
        ends.push(data.len());
    }
    if !leaves.is_at_end() {
        let found = format!("more values than rows in column `{}`", column.name);
        return Err(ColumnProblem::Corrupt(found));
    }
    let width = column.width.map_or(0, |width| width as usize);
    let ends = column.width.is_none().then_some(ends);
    Ok(EncodedColumn { data, ends, width })
}

/// Returns how values of `node` get the encoding of a column; none if they cannot have it.
fn writer<'a>(column: &Column, node: &'a Node) -> Option<Writer<'a>> {
    if column.encoding == "json" {
        return node.encodings().is_ok().then_some(Writer::Json);
    }
    let form = StoredForm::parse(&column.encoding);
    match (&node.shape, form) {
        (Shape::Leaf(LeafKind::Number(own)), StoredForm::Number(wanted)) => {
            let is_own = *own == wanted && column.encoding != "int";
            Some(match wanted.kind {
                _ if is_own => Writer::Number(*own),
                NumberKind::Float => Writer::Float64,
                NumberKind::Signed | NumberKind::Unsigned => Writer::Int64(*own),
            })
        }
        (Shape::Leaf(kind @ LeafKind::Decimal(_)), _) if column.encoding == "str_decimal" => {
            Some(Writer::Text(kind))
        }
        (Shape::Leaf(kind @ LeafKind::Binary), StoredForm::Bytes | StoredForm::Image) => {
            Some(Writer::Text(kind))
        }
        (
            Shape::Leaf(LeafKind::Binary | LeafKind::Bool | LeafKind::Null | LeafKind::Decimal(_)),
            StoredForm::Text,
        ) => None,
        (Shape::Leaf(kind), StoredForm::Text) => Some(Writer::Text(kind)),
        (Shape::Struct(_), StoredForm::Bytes | StoredForm::Image) => node.file().map(Writer::File),
        (
            Shape::List {
                element,
                empty_below,
                rep,
            },
            _,
        ) if column.encoding.starts_with("list[") => {
            let bytes = element.file()?;
            Some(Writer::Files(element, bytes, (*empty_below, *rep)))
        }
        (Shape::List { .. }, StoredForm::Array { number, shape }) => {
            let own = node.list_number()?;
            (number == Some(own)).then_some(Writer::Array(own, shape))
        }
        _ => None,
    }
}

/// Appends the next value; returns whether there is one.
fn append(
    writer: &Writer<'_>,
    node: &Node,
    leaves: &mut Leaves,
    out: &mut Vec<u8>,
) -> Result<bool, String> {
    match writer {
        Writer::Json => append_json(node, leaves, out)?,
        Writer::Number(number) => {
            let leaf = leaves.get(node.first)?;
            let at = leaf.take();
            append_number(&leaf.values, at, *number, out)?;
        }
        Writer::Int64(number) => {
            let leaf = leaves.get(node.first)?;
            let at = leaf.take();
            append_int64(&leaf.values, at, *number, out)?;
        }
        Writer::Float64 => {
            let leaf = leaves.get(node.first)?;
            let at = leaf.take();
            append_float64(&leaf.values, at, out)?;
        }
        Writer::Text(kind) => {
            let leaf = leaves.get(node.first)?;
            let at = leaf.take();
            append_text(kind, &leaf.values, at, false, out)?;
        }
        Writer::File(bytes) => return append_file(node, bytes, leaves, out),
        Writer::Files(element, bytes, levels) => {
            let (mut sizes, mut files, mut is_whole) = (Vec::new(), Vec::new(), true);
            leaves.each(node, element, *levels, |leaves, _| {
                let before = files.len();
                is_whole &= !leaves.is_null(element)?;
                if !is_whole {
                    return leaves.skip(element);
                }
                is_whole &= append_file(element, bytes, leaves, &mut files)?;
                sizes.push((files.len() - before) as u32);
                Ok(())
            })?;
            let words = [0, sizes.len() as u32].into_iter().chain(sizes);
            words.for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
            out.extend_from_slice(&files);
            return Ok(is_whole);
        }
        Writer::Array(number, shape) => {
            let mut values = Vec::new();
            if !append_numbers(node, leaves, *number, &mut values)? {
                return Ok(false);
            }
            // The caller compares the bytes with those that a shape takes.
            if shape.is_none() {
                // As `append_shape`, which has no place for an empty array.
                match values.len() / number.bytes {
                    0 => out.extend_from_slice(&[1 << 2, 0]),
                    len => append_shape(&[len], out).ok_or("an array that is too long")?,
                }
            }
            out.append(&mut values);
        }
    }
    Ok(true)
}

/// Appends the bytes of a file, whose other leaf is its name; returns whether it has them.
fn append_file(
    node: &Node,
    bytes: &Node,
    leaves: &mut Leaves,
    out: &mut Vec<u8>,
) -> Result<bool, String> {
    let is_null = leaves.is_null(bytes)?;
    for number in node.leaves() {
        let leaf = leaves.get(number)?;
        let is_there = leaf.is_value();
        if !is_there {
            leaf.skip();
            continue;
        }
        let at = leaf.take();
        if number == bytes.first {
            append_text(&LeafKind::Binary, &leaf.values, at, false, out)?;
        }
    }
    Ok(!is_null)
}

/// Appends the numbers of nested lists; returns whether none of them is null.
fn append_numbers(
    node: &Node,
    leaves: &mut Leaves,
    number: NumberType,
    out: &mut Vec<u8>,
) -> Result<bool, String> {
    if leaves.is_null(node)? {
        leaves.skip(node)?;
        return Ok(false);
    }
    let Shape::List {
        element,
        empty_below,
        rep,
    } = &node.shape
    else {
        let leaf = leaves.get(node.first)?;
        let at = leaf.take();
        append_number(&leaf.values, at, number, out)?;
        return Ok(true);
    };
    let mut is_whole = true;
    leaves.each(node, element, (*empty_below, *rep), |leaves, _| {
        is_whole &= append_numbers(element, leaves, number, out)?;
        Ok(())
    })?;
    Ok(is_whole)
}

/// Returns a column that has one value in the whole file.
pub(crate) fn constant(
    column: &Column,
    constants: &[(String, String)],
    count: usize,
) -> Result<EncodedColumn, ColumnProblem> {
    let found = constants.iter().find(|(name, _)| *name == column.name);
    let (_, json) =
        found.ok_or_else(|| ColumnProblem::Corrupt(format!("no column `{}`", column.name)))?;
    let value: serde_json::Value = serde_json::from_str(json)
        .map_err(|error| ColumnProblem::Corrupt(format!("column `{}`: {error}", column.name)))?;
    let bytes = match (column.encoding.as_str(), value) {
        ("json", _) => Some(json.clone().into_bytes()),
        ("str", serde_json::Value::String(text)) => Some(text.into_bytes()),
        ("int", serde_json::Value::Number(number)) => {
            number.as_i64().map(|number| number.to_le_bytes().to_vec())
        }
        _ => None,
    };
    let bytes = bytes.ok_or_else(|| {
        ColumnProblem::Unfit(format!(
            "column `{}` is {json}, from the name of a folder, and cannot be read as `{}`: expected `int`, `str` or `json`",
            column.name, column.encoding
        ))
    })?;
    let width = column.width.map_or(0, |width| width as usize);
    let ends = column.width.is_none();
    Ok(EncodedColumn {
        data: bytes.repeat(count),
        ends: ends.then(|| (1..=count).map(|row| row * bytes.len()).collect()),
        width,
    })
}
