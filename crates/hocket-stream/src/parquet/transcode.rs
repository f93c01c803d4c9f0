//! A row group decoded to the bytes of an MDS shard.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};

use crate::error::{Result, StreamError};
use crate::parquet::column::{ColumnProblem, EncodedColumn, RowChoice, constant, encode};
use crate::parquet::leaf::LeafColumn;
use crate::parquet::sparse::SparseFile;
use crate::parquet::types::{Node, children};
use crate::shard::info::ShardInfo;
use crate::shard::row_group::{FOOTER_DIGEST, RowGroup, footer_digest};
use crate::shard::schema::Column;

/// Decodes a row group to the bytes of the MDS shard that `info` describes. `parts` are the contents of
/// [`RowGroup::reads`], in order, read from `origin`.
///
/// # Errors
/// [`StreamError::ShardCorrupt`] for bytes that are not the row group; [`StreamError::Config`] for values that
/// the columns' encodings cannot hold, such as nulls.
pub(crate) fn transcode(
    info: &ShardInfo,
    group: &RowGroup,
    origin: &str,
    parts: Vec<Bytes>,
) -> Result<Vec<u8>> {
    let corrupt = |expected: String, actual: String| StreamError::ShardCorrupt {
        shard: describe(group),
        object: origin.into(),
        expected,
        actual,
    };
    let footer = parts.first().cloned().unwrap_or_default();
    let wanted = info.data.raw.hashes.iter();
    let wanted = wanted
        .filter(|(name, _)| name == FOOTER_DIGEST)
        .map(|(_, hex)| hex);
    let actual = footer_digest(&footer);
    if let Some(wanted) = wanted.into_iter().find(|wanted| **wanted != actual) {
        return Err(corrupt(
            format!("a footer with the digest {wanted}, as when the data set was opened"),
            format!("one with {actual}"),
        ));
    }
    let decode = || {
        let file = Arc::new(SparseFile::new(group, parts));
        let metadata = ParquetMetaDataReader::decode_metadata(&footer)
            .map_err(|error| ColumnProblem::Corrupt(error.to_string()))?;
        let encoded = columns(&metadata, info, group, &file)?;
        join(&encoded, info.samples as usize)
    };
    // The decoder checks its input, but a panic of it must not end a thread that others wait for.
    let outcome = catch_unwind(AssertUnwindSafe(decode)).unwrap_or_else(|_| {
        Err(ColumnProblem::Corrupt(
            "bytes on which the decoder failed".into(),
        ))
    });
    outcome.map_err(|problem| match problem {
        ColumnProblem::Corrupt(actual) => corrupt("a readable row group".into(), actual),
        ColumnProblem::Unfit(what) => {
            StreamError::config(format!("{} of `{origin}`: {what}", name(group)))
        }
    })
}

fn name(group: &RowGroup) -> String {
    format!("row group {}", group.row_group)
}

fn describe(group: &RowGroup) -> String {
    format!("{} of {}", name(group), group.file)
}

/// Decodes the columns of `info` one after the other.
fn columns(
    metadata: &ParquetMetaData,
    info: &ShardInfo,
    group: &RowGroup,
    file: &Arc<SparseFile>,
) -> std::result::Result<Vec<EncodedColumn>, ColumnProblem> {
    let number = group.row_group as usize;
    let found = metadata.row_groups().get(number);
    let found = found.ok_or_else(|| ColumnProblem::Corrupt("fewer row groups".into()))?;
    let rows = RowChoice::parse(group.rows.as_deref(), found.num_rows(), info.samples)?;
    let nodes = children(metadata.file_metadata().schema());
    let find = |column: &Column| nodes.iter().find(|(name, _)| *name == column.name);
    let read = |column: &Column| {
        let Some((_, node)) = find(column) else {
            return constant(column, &group.constants, info.samples as usize);
        };
        let leaves = leaves(node, found, file)?;
        encode(column, node, leaves, &rows)
    };
    info.layout.schema.columns.iter().map(read).collect()
}

fn leaves(
    node: &Node,
    group: &parquet::file::metadata::RowGroupMetaData,
    file: &Arc<SparseFile>,
) -> std::result::Result<Vec<LeafColumn>, ColumnProblem> {
    let read = |number| {
        let leaf = LeafColumn::read(file.clone(), group, number);
        leaf.map_err(|error| ColumnProblem::Corrupt(error.to_string()))
    };
    node.leaves().map(read).collect()
}

/// Builds an MDS shard of `count` samples from its columns.
fn join(columns: &[EncodedColumn], count: usize) -> std::result::Result<Vec<u8>, ColumnProblem> {
    let num_ragged = columns
        .iter()
        .filter(|column| column.ends.is_some())
        .count();
    let values: usize = columns.iter().map(|column| column.data.len()).sum();
    let first = 8 + 4 * count;
    let total = first + 4 * count * num_ragged + values;
    if u32::try_from(total).is_err() {
        return Err(ColumnProblem::Unfit(format!(
            "its {count} rows take {total} bytes when decoded: expected fewer than 2^32; write smaller row groups, or convert it with `hocket-stream convert`"
        )));
    }
    let mut bytes = Vec::with_capacity(total);
    bytes.extend_from_slice(&(count as u32).to_le_bytes());
    let mut offset = first;
    bytes.extend_from_slice(&(offset as u32).to_le_bytes());
    for row in 0..count {
        offset += 4 * num_ragged;
        offset += columns
            .iter()
            .map(|column| column.range(row).len())
            .sum::<usize>();
        bytes.extend_from_slice(&(offset as u32).to_le_bytes());
    }
    for row in 0..count {
        for column in columns.iter().filter(|column| column.ends.is_some()) {
            bytes.extend_from_slice(&(column.range(row).len() as u32).to_le_bytes());
        }
        for column in columns {
            bytes.extend_from_slice(column.data.get(column.range(row)).unwrap_or_default());
        }
    }
    Ok(bytes)
}
