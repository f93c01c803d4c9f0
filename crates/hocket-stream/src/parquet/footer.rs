//! What an index needs of a Parquet file: its columns and row groups, from the footer alone.

use std::panic::catch_unwind;

use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData};
use serde::Serialize;

use crate::parquet::types::{LeafKind, Shape, children};
use crate::shard::row_group::footer_digest;

/// The key of a file's own metadata that tells more of its columns.
const FEATURES_KEY: &str = "huggingface";

/// The summary of a file, which Python reads as JSON.
#[derive(Serialize)]
struct FileSummary {
    footer_bytes: u64,
    digest: String,
    etag: Option<String>,
    columns: Vec<ColumnSummary>,
    row_groups: Vec<GroupSummary>,
    metadata: Vec<(String, String)>,
}

#[derive(Serialize)]
struct ColumnSummary {
    name: String,
    /// Encodings that can hold its values, the usual one first.
    encodings: Vec<String>,
    /// The type within it that no encoding holds.
    unsupported: Option<&'static str>,
    /// The first leaf column, and the end of them.
    leaves: (usize, usize),
    is_file: bool,
    is_list: bool,
    /// Whether it has no type, since all its values are null.
    is_null: bool,
}

#[derive(Serialize)]
struct GroupSummary {
    rows: i64,
    /// Of each leaf column: start and length in the file, decoded bytes, and nulls if they are known.
    leaves: Vec<(u64, u64, i64, Option<u64>)>,
}

/// Returns the summary of a file as JSON, from its footer and its entity tag. The error says what the footer is.
///
/// # Errors
/// For bytes that are no footer.
pub fn summarize(footer: &[u8], etag: Option<&str>) -> std::result::Result<String, String> {
    let decoded = catch_unwind(|| ParquetMetaDataReader::decode_metadata(footer));
    let decoded = decoded.map_err(|_| "one on which the decoder failed".to_owned())?;
    let metadata = decoded.map_err(|error| error.to_string())?;
    let summary = FileSummary {
        footer_bytes: footer.len() as u64,
        digest: footer_digest(footer),
        etag: etag.map(str::to_owned),
        columns: columns(&metadata),
        row_groups: metadata.row_groups().iter().map(group).collect(),
        metadata: own_metadata(&metadata),
    };
    serde_json::to_string(&summary).map_err(|error| error.to_string())
}

fn columns(metadata: &ParquetMetaData) -> Vec<ColumnSummary> {
    let nodes = children(metadata.file_metadata().schema());
    let columns = nodes.into_iter().map(|(name, node)| {
        let leaves = node.leaves();
        let (encodings, unsupported) = match node.encodings() {
            Ok(encodings) => (encodings, None),
            Err(kind) => (Vec::new(), Some(kind)),
        };
        ColumnSummary {
            name,
            encodings,
            unsupported,
            leaves: (leaves.start, leaves.end),
            is_file: node.file().is_some(),
            is_list: node.list_number().is_some(),
            is_null: matches!(node.shape, Shape::Leaf(LeafKind::Null)),
        }
    });
    columns.collect()
}

fn group(group: &RowGroupMetaData) -> GroupSummary {
    let leaves = group.columns().iter().map(|chunk| {
        let start = chunk
            .dictionary_page_offset()
            .unwrap_or(chunk.data_page_offset());
        let nulls = chunk
            .statistics()
            .and_then(|statistics| statistics.null_count_opt());
        let is_required = chunk.column_descr().max_def_level() == 0;
        (
            start.max(0) as u64,
            chunk.compressed_size().max(0) as u64,
            chunk.uncompressed_size().max(0),
            nulls.or(is_required.then_some(0)),
        )
    });
    GroupSummary {
        rows: group.num_rows(),
        leaves: leaves.collect(),
    }
}

fn own_metadata(metadata: &ParquetMetaData) -> Vec<(String, String)> {
    let pairs = metadata.file_metadata().key_value_metadata();
    let pairs = pairs.into_iter().flatten();
    pairs
        .filter(|pair| pair.key == FEATURES_KEY)
        .filter_map(|pair| Some((pair.key.clone(), pair.value.clone()?)))
        .collect()
}
