//! The shards and files that an index lists.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::shard::codec::Compression;
use crate::shard::row_group::RowGroup;
use crate::shard::schema::Layout;

/// The name of the index in a data set's folder.
pub const INDEX_NAME: &str = "index.json";

/// One file of a shard, raw or compressed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FileInfo {
    /// Relative path inside the data set; in a merged index it contains folders.
    pub basename: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Digests by algorithm name, as the index lists them.
    pub hashes: Vec<(String, String)>,
}

/// A file as it is read, and its compressed form if it is stored compressed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StoredFile {
    /// The uncompressed file; stored only if `zip` is `None`.
    pub raw: FileInfo,
    /// The compressed file, if there is one.
    pub zip: Option<FileInfo>,
    /// Whether this file contains the offsets of the shard's samples.
    pub holds_offsets: bool,
}

/// One shard.
#[derive(Clone, Debug)]
pub struct ShardInfo {
    /// The samples.
    pub data: StoredFile,
    /// The offsets of a text shard's samples.
    pub meta: Option<StoredFile>,
    /// The compression of its files, if any.
    pub compression: Option<Compression>,
    /// Format and columns; shards with the same layout share one.
    pub layout: Arc<Layout>,
    /// Number of samples; may be 0.
    pub samples: u32,
    /// The row group that it is decoded from, if it is one of a Parquet file. The size of its file is then an estimate.
    pub row_group: Option<RowGroup>,
}

impl ShardInfo {
    /// Returns the shard's files.
    pub fn files(&self) -> impl Iterator<Item = &StoredFile> {
        [Some(&self.data), self.meta.as_ref()].into_iter().flatten()
    }
}
