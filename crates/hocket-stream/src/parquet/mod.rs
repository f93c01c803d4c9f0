//! Parquet files read in place: a row group is a shard, decoded to the bytes of an MDS shard.
//!
//! [`footer`] summarises a file without reading its rows, for the index that is made of all files. A shard of that
//! index names its [`RowGroup`](crate::shard::row_group::RowGroup); the cache fetches the byte ranges of its columns, and
//! `transcode` decodes them.
//!
//! | module | contents |
//! |---|---|
//! | [`footer`] | what the index needs of a file: columns, row groups, digest |
//! | `transcode` | a row group as the bytes of an MDS shard |
//! | `types` | the tree of a column's types, and the encodings that can hold it |
//! | `leaf` | the values and levels of one leaf column |
//! | `scalar` | single values as bytes and as text |
//! | `assemble` | nested values as JSON |
//! | `column` | the values of one column in their MDS encoding |
//! | `sparse` | a file of which only some ranges are in memory |

mod assemble;
mod column;
pub mod footer;
mod leaf;
mod scalar;
mod sparse;
#[cfg(test)]
mod tests;
pub(crate) mod transcode;
mod types;
