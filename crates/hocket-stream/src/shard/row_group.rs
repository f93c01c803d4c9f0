//! The place of a row group: its file, and the byte ranges to read.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// The name in the index of the digest of a file's footer.
pub const FOOTER_DIGEST: &str = "parquet_footer";

/// Bytes at the end of a file: the size of the footer, and a mark.
pub(crate) const TRAILER_BYTES: u64 = 8;

/// A row group of a Parquet file, which is read as a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowGroup {
    /// The file's path inside the data set.
    pub file: String,
    /// The file's size in bytes.
    pub file_bytes: u64,
    /// The size of the footer in bytes, without its trailer.
    pub footer_bytes: u64,
    /// The number of the row group in its file.
    pub row_group: u32,
    /// The start and the length of the byte ranges that hold the wanted columns.
    pub ranges: Vec<(u64, u64)>,
    /// The entity tag that the file had when its footer was read, if the store has them.
    pub etag: Option<String>,
    /// Columns that have one value in the whole file, with that value as JSON.
    pub constants: Vec<(String, String)>,
    /// The rows that are read, as a bit for each row from the highest one of each byte, in hexadecimal digits;
    /// `None` for all rows.
    #[serde(default)]
    pub rows: Option<String>,
}

impl RowGroup {
    /// Returns the byte ranges to read: the footer, then those of the columns.
    pub(crate) fn reads(&self) -> Vec<std::ops::Range<u64>> {
        let end = self.file_bytes.saturating_sub(TRAILER_BYTES);
        let footer = end.saturating_sub(self.footer_bytes)..end;
        let columns = self.ranges.iter();
        let columns = columns.map(|&(start, len)| start..start.saturating_add(len));
        std::iter::once(footer).chain(columns).collect()
    }
}

/// Returns the digest of a footer as hexadecimal digits.
pub(crate) fn footer_digest(footer: &[u8]) -> String {
    format!("{:016x}", xxh3_64(footer))
}
