//! `index.json`, schema version 2: what a data set consists of, checked before anything is opened.

use std::collections::HashMap;
use std::path::{Component, Path};
use std::sync::Arc;

use serde::Deserialize;
use xxhash_rust::xxh3::Xxh3Default;

use crate::error::{Result, StreamError};
use crate::schema::{Column, Schema};

/// The file's name in a data set's folder.
pub const INDEX_NAME: &str = "index.json";

/// One file of a shard, raw or compressed.
#[derive(Clone, Debug)]
pub struct FileInfo {
    /// Relative to the data set; at most one folder deep, never outside it.
    pub basename: String,
    /// Its size.
    pub bytes: u64,
    /// Digests by algorithm name, as the index lists them.
    pub hashes: Vec<(String, String)>,
}

/// One shard.
#[derive(Clone, Debug)]
pub struct ShardInfo {
    /// The uncompressed file; stored as such only where `zip` is `None`.
    pub raw: FileInfo,
    /// The compressed file, where there is one; only `zstd` is read so far.
    pub zip: Option<FileInfo>,
    /// How many samples it holds; a shard may be empty.
    pub samples: u32,
}

/// A parsed and checked index. Immutable and without locks, so safe to share and to fork.
#[derive(Clone, Debug)]
pub struct Index {
    shards: Vec<ShardInfo>,
    schema: Arc<Schema>,
    /// `starts[i]` samples lie before shard `i` in storage order; one more entry than shards.
    starts: Arc<[u64]>,
    fingerprint: String,
}

#[derive(Deserialize)]
struct RawIndex {
    version: u64,
    shards: Vec<RawShard>,
}

#[derive(Deserialize)]
struct RawShard {
    format: String,
    version: u64,
    #[serde(default)]
    column_names: Vec<String>,
    #[serde(default)]
    column_encodings: Vec<String>,
    #[serde(default)]
    column_sizes: Vec<Option<u32>>,
    #[serde(default)]
    compression: Option<String>,
    samples: u64,
    #[serde(default)]
    raw_data: Option<RawFile>,
    #[serde(default)]
    zip_data: Option<RawFile>,
}

#[derive(Deserialize)]
struct RawFile {
    basename: String,
    bytes: u64,
    #[serde(default)]
    hashes: HashMap<String, String>,
}

impl Index {
    /// Reads an index. `origin` is its URI or path, for messages.
    ///
    /// # Errors
    /// [`StreamError::IndexCorrupt`] for bytes that are no valid index, among them base names that
    /// would leave the data set's folder; [`StreamError::Config`] for valid ones that use what is not
    /// supported (another shard format, another compression, shards that differ in columns).
    pub fn parse(data: &[u8], origin: &str) -> Result<Self> {
        let corrupt = |reason: String| StreamError::IndexCorrupt {
            origin: origin.into(),
            reason,
        };
        let raw: RawIndex =
            serde_json::from_slice(data).map_err(|error| corrupt(error.to_string()))?;
        if raw.version != 2 {
            return Err(corrupt(format!(
                "its version is {}, expected 2",
                raw.version
            )));
        }
        let mut shards = Vec::with_capacity(raw.shards.len());
        let mut starts = Vec::with_capacity(raw.shards.len() + 1);
        let mut schema: Option<Arc<Schema>> = None;
        let mut total = 0u64;
        starts.push(0);
        for (number, shard) in raw.shards.into_iter().enumerate() {
            let shard_schema = check_columns(&shard, number).map_err(|e| e.at(origin))?;
            match &schema {
                None => schema = Some(Arc::new(shard_schema)),
                Some(first) if **first != shard_schema => {
                    return Err(StreamError::config(format!(
                        "shard {number} of `{origin}` has other columns than shard 0: expected the same names, encodings and sizes in all shards of one data set; read the parts as data sets of their own"
                    )));
                }
                Some(_) => {}
            }
            let info = check_shard(shard, number).map_err(|e| e.at(origin))?;
            total += u64::from(info.samples);
            starts.push(total);
            shards.push(info);
        }
        if u32::try_from(shards.len()).is_err() {
            return Err(corrupt(format!(
                "it lists {} shards, expected fewer than 2^32",
                shards.len()
            )));
        }
        let schema = schema.unwrap_or_else(|| {
            Arc::new(Schema {
                columns: Vec::new(),
            })
        });
        let fingerprint = fingerprint(&schema, &shards);
        Ok(Self {
            shards,
            schema,
            starts: starts.into(),
            fingerprint,
        })
    }

    /// The shards in storage order.
    pub fn shards(&self) -> &[ShardInfo] {
        &self.shards
    }

    /// The columns, the same for every shard.
    pub fn schema(&self) -> &Arc<Schema> {
        &self.schema
    }

    /// How many samples lie before each shard, and after the last, in storage order.
    pub fn starts(&self) -> &Arc<[u64]> {
        &self.starts
    }

    /// How many samples the data set holds.
    pub fn num_samples(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// 32 hexadecimal digits over columns, and every shard's samples, sizes and digests, in order.
    /// Names of files do not count: a data set that was moved or merged is the same.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }
}

/// A finding about one shard, before it is known which index it belongs to.
enum Finding {
    Corrupt(String),
    Unsupported(String),
}

impl Finding {
    fn at(self, origin: &str) -> StreamError {
        match self {
            Self::Corrupt(reason) => StreamError::IndexCorrupt {
                origin: origin.into(),
                reason,
            },
            Self::Unsupported(what) => StreamError::config(format!("`{origin}`: {what}")),
        }
    }
}

fn check_columns(shard: &RawShard, number: usize) -> std::result::Result<Schema, Finding> {
    if shard.format != "mds" {
        return Err(Finding::Unsupported(format!(
            "shard {number} has format `{}`: expected `mds`; convert it with MDSWriter",
            shard.format
        )));
    }
    let (names, encodings, sizes) = (
        &shard.column_names,
        &shard.column_encodings,
        &shard.column_sizes,
    );
    if names.len() != encodings.len() || names.len() != sizes.len() || names.is_empty() {
        return Err(Finding::Corrupt(format!(
            "shard {number} has {} `column_names`, {} `column_encodings` and {} `column_sizes`, expected as many of each and at least one",
            names.len(),
            encodings.len(),
            sizes.len()
        )));
    }
    let columns: Vec<Column> = names
        .iter()
        .zip(encodings)
        .zip(sizes)
        // A size of 0 means "no fixed size" to the format's own reader.
        .map(|((name, encoding), width)| Column {
            name: name.clone(),
            encoding: encoding.clone(),
            width: width.filter(|&width| width > 0),
        })
        .collect();
    for (place, column) in columns.iter().enumerate() {
        if columns[..place]
            .iter()
            .any(|other| other.name == column.name)
        {
            return Err(Finding::Corrupt(format!(
                "shard {number} has two columns named `{}`",
                column.name
            )));
        }
    }
    Ok(Schema { columns })
}

fn check_shard(shard: RawShard, number: usize) -> std::result::Result<ShardInfo, Finding> {
    if shard.version != 2 {
        return Err(Finding::Corrupt(format!(
            "shard {number} has version {}, expected 2",
            shard.version
        )));
    }
    let samples = u32::try_from(shard.samples)
        .ok()
        .filter(|&samples| samples < u32::MAX)
        .ok_or_else(|| {
            Finding::Corrupt(format!(
                "shard {number} has {} samples, expected fewer than 2^32 - 1",
                shard.samples
            ))
        })?;
    let raw = shard
        .raw_data
        .ok_or_else(|| Finding::Corrupt(format!("shard {number} has no `raw_data`")))?;
    let raw = check_file(raw, number)?;
    if raw.bytes > u64::from(u32::MAX) {
        return Err(Finding::Corrupt(format!(
            "shard {number} (`{}`) has {} bytes, expected fewer than 2^32: its offsets cannot reach further",
            raw.basename, raw.bytes
        )));
    }
    let zip = match (shard.zip_data, shard.compression) {
        (None, None) => None,
        (Some(zip), Some(compression)) => {
            let name = compression.split(':').next().unwrap_or_default();
            if name != "zstd" {
                return Err(Finding::Unsupported(format!(
                    "shard {number} has compression `{compression}`: expected none or `zstd`; write the data set again with one of them"
                )));
            }
            Some(check_file(zip, number)?)
        }
        (zip, compression) => {
            return Err(Finding::Corrupt(format!(
                "shard {number} has compression {compression:?} and {} `zip_data`, expected both or neither",
                if zip.is_some() { "a" } else { "no" }
            )));
        }
    };
    Ok(ShardInfo { raw, zip, samples })
}

fn check_file(file: RawFile, number: usize) -> std::result::Result<FileInfo, Finding> {
    if !is_inside(&file.basename) {
        return Err(Finding::Corrupt(format!(
            "shard {number} has the base name `{}`, expected a plain file name, at most one folder deep and inside the data set",
            file.basename.escape_debug()
        )));
    }
    let mut hashes: Vec<(String, String)> = file.hashes.into_iter().collect();
    hashes.sort();
    Ok(FileInfo {
        basename: file.basename,
        bytes: file.bytes,
        hashes,
    })
}

/// Whether a base name stays in the data set: one or two plain components, spelt one way only.
/// Hidden names are refused too: they are those of files in the making.
fn is_inside(basename: &str) -> bool {
    let path = Path::new(basename);
    let components: Vec<Component<'_>> = path.components().collect();
    let plain = components.iter().all(|part| matches!(part, Component::Normal(name) if !name.as_encoded_bytes().starts_with(b".")));
    let spelt: Vec<&str> = basename.split('/').collect();
    plain
        && (1..=2).contains(&components.len())
        && spelt.len() == components.len()
        && !basename.contains(['\\', '\0'])
        && basename != INDEX_NAME
}

fn fingerprint(schema: &Schema, shards: &[ShardInfo]) -> String {
    let mut hasher = Xxh3Default::new();
    let mut text = |value: &str| {
        hasher.update(&(value.len() as u64).to_le_bytes());
        hasher.update(value.as_bytes());
    };
    for column in &schema.columns {
        text(&column.name);
        text(&column.encoding);
    }
    for shard in shards {
        for file in [Some(&shard.raw), shard.zip.as_ref()].into_iter().flatten() {
            text(&format!("{} {}", shard.samples, file.bytes));
            for (name, digest) in &file.hashes {
                text(name);
                text(digest);
            }
        }
    }
    format!("{:032x}", hasher.digest128())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use proptest::prelude::*;

    fn shard(basename: &str, samples: u64, bytes: u64) -> serde_json::Value {
        serde_json::json!({
            "column_encodings": ["int"], "column_names": ["a"], "column_sizes": [8], "compression": null,
            "format": "mds", "hashes": [], "samples": samples, "size_limit": 1, "version": 2,
            "raw_data": {"basename": basename, "bytes": bytes, "hashes": {}}, "zip_data": null,
        })
    }

    fn parse(shards: Vec<serde_json::Value>) -> Result<Index> {
        let text = serde_json::json!({"version": 2, "shards": shards}).to_string();
        Index::parse(text.as_bytes(), "there/index.json")
    }

    #[test]
    fn counts_samples_and_takes_empty_and_merged_shards() {
        let index = parse(vec![
            shard("0/shard.00000.mds", 0, 100),
            shard("1/shard.00000.mds", 7, 100),
        ])
        .unwrap();
        assert_eq!(index.num_samples(), 7);
        assert_eq!(&index.starts()[..], [0, 0, 7]);
    }

    #[test]
    fn refuses_names_that_leave_the_folder() {
        for name in [
            "../x.mds",
            "/etc/passwd",
            "a/../b",
            "a/b/c.mds",
            "",
            ".",
            "a//b",
            "./a",
            "a/",
            ".hidden",
            "a\\b",
            "index.json",
            "x/.y",
        ] {
            let error = parse(vec![shard(name, 1, 1)]).unwrap_err();
            assert!(
                matches!(error, StreamError::IndexCorrupt { .. }),
                "{name}: {error}"
            );
        }
    }

    #[test]
    fn names_what_is_wrong() {
        let cases: [(&str, &str, &str); 5] = [
            ("/version", "3", "version 3"),
            ("/format", "\"json\"", "`json`"),
            ("/samples", "4294967295", "4294967295 samples"),
            ("/column_names", "[]", "0 `column_names`"),
            ("/compression", "\"zstd\"", "no `zip_data`"),
        ];
        for (pointer, value, expected) in cases {
            let mut one = shard("a.mds", 1, 1);
            *one.pointer_mut(pointer).unwrap() = serde_json::from_str(value).unwrap();
            let message = parse(vec![one]).unwrap_err().to_string();
            assert!(
                message.contains(expected) && message.contains("there/index.json"),
                "{message}"
            );
        }
        let message = parse(vec![shard("a.mds", 1, 1 << 32)])
            .unwrap_err()
            .to_string();
        assert!(message.contains("4294967296"), "{message}");
    }

    #[test]
    fn the_fingerprint_follows_the_data_and_not_its_names() {
        let one = parse(vec![shard("a.mds", 1, 10)]).unwrap();
        assert_eq!(
            one.fingerprint(),
            parse(vec![shard("b/a.mds", 1, 10)]).unwrap().fingerprint()
        );
        assert_ne!(
            one.fingerprint(),
            parse(vec![shard("a.mds", 1, 11)]).unwrap().fingerprint()
        );
        assert_ne!(
            one.fingerprint(),
            parse(vec![shard("a.mds", 2, 10)]).unwrap().fingerprint()
        );
    }

    proptest! {
        #[test]
        fn never_panics(data: Vec<u8>) {
            let _ = Index::parse(&data, "x");
        }
    }
}
