//! `index.json`, schema version 2: the contents of a data set, validated before any shard is opened.

mod entry;
mod packed;
pub mod version;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3Default;

use crate::error::{Result, StreamError};
use crate::index::packed::{ShardList, ShardListBuilder};
use crate::shard::info::ShardInfo;
use crate::shard::schema::{Column, Format, Layout, Schema};

/// A parsed and validated index. Immutable and without locks, so safe to share between threads and across
/// forks.
#[derive(Clone, Debug)]
pub struct Index {
    shards: ShardList,
    schema: Arc<Schema>,
    /// Positions of the columns that all shards have.
    shared: HashSet<usize>,
    /// Names of the columns that are `int` in some shards and `int64` in all others.
    long: HashSet<String>,
    /// `starts[i]` is the number of samples before shard `i` in storage order; one more entry than shards.
    starts: Arc<[u64]>,
    fingerprint: String,
}

/// The distinct layouts found so far, and the union of their columns.
#[derive(Default)]
struct KnownLayouts {
    known: HashMap<(Format, Schema), Arc<Layout>>,
    places: HashMap<Column, usize>,
    columns: Vec<Column>,
}

impl KnownLayouts {
    fn of(&mut self, format: Format, schema: Schema) -> Arc<Layout> {
        let key = (format, schema);
        if let Some(layout) = self.known.get(&key) {
            return layout.clone();
        }
        let columns = key.1.columns.iter();
        let places = columns
            .map(|column| {
                *self.places.entry(column.clone()).or_insert_with(|| {
                    self.columns.push(column.clone());
                    self.columns.len() - 1
                })
            })
            .collect();
        let layout = Arc::new(Layout {
            format: key.0.clone(),
            schema: key.1.clone(),
            places,
        });
        self.known.insert(key, layout.clone());
        layout
    }
}

impl Index {
    /// Parses an index. `origin` is its URI or path, for messages.
    ///
    /// # Errors
    /// [`StreamError::IndexCorrupt`] for an invalid index, including base names outside the data set's folder;
    /// [`StreamError::Config`] for a valid index with an unsupported feature (another shard format, another
    /// compression).
    pub fn parse(data: &[u8], origin: &str) -> Result<Self> {
        let mut shards = ShardListBuilder::default();
        let mut starts = vec![0];
        let mut layouts = KnownLayouts::default();
        let mut total = 0u64;
        entry::parse(data, origin, |entry| {
            let number = starts.len() - 1;
            let parts = entry.check(number).map_err(|finding| finding.at(origin))?;
            total += u64::from(parts.samples);
            starts.push(total);
            let packed = shards.push(ShardInfo {
                layout: layouts.of(parts.format, parts.schema),
                data: parts.data,
                meta: parts.meta,
                compression: parts.compression,
                samples: parts.samples,
                row_group: parts.row_group,
            });
            packed.map_err(|error| StreamError::IndexCorrupt {
                origin: origin.into(),
                reason: format!("shard {number}: {error}"),
            })
        })?;
        let shards = shards.finish();
        let schema = Schema {
            columns: layouts.columns,
        };
        let mut shared: HashSet<usize> = (0..schema.columns.len()).collect();
        let mut long = long_columns(&schema);
        for layout in layouts.known.values() {
            let has: HashSet<&usize> = layout.places.iter().collect();
            shared.retain(|place| has.contains(place));
            let columns = &layout.schema.columns;
            long.retain(|name| columns.iter().any(|column| column.name == *name));
        }
        let is_mixed = shared.len() < schema.columns.len();
        let fingerprint = fingerprint(&schema, &shards, is_mixed);
        Ok(Self {
            shards,
            schema: Arc::new(schema),
            shared,
            long,
            starts: starts.into(),
            fingerprint,
        })
    }

    /// Returns the number of shards.
    pub fn num_shards(&self) -> usize {
        self.shards.len()
    }

    /// Returns the shard of this number in storage order; none past the last.
    pub fn shard(&self, number: usize) -> Option<ShardInfo> {
        self.shards.get(number)
    }

    /// Returns the shards in storage order.
    pub fn shards(&self) -> impl Iterator<Item = ShardInfo> {
        (0..self.num_shards()).filter_map(|number| self.shard(number))
    }

    /// Returns every column that any shard has, in order of first appearance. A name appears several times if
    /// shards differ in its encoding.
    pub fn schema(&self) -> &Arc<Schema> {
        &self.schema
    }

    /// Returns whether some shard lacks one of these columns.
    pub fn is_mixed(&self) -> bool {
        self.shared.len() < self.schema.columns.len()
    }

    /// Returns the names of columns that some shard lacks or has in another encoding, possibly with duplicates.
    /// `int` and `int64` count as one encoding, of integers of 64 bits.
    pub fn mixed_columns(&self) -> impl Iterator<Item = &str> {
        let columns = self.schema.columns.iter().enumerate();
        columns
            .filter(|(place, column)| {
                !self.shared.contains(place) && !self.long.contains(&column.name)
            })
            .map(|(_, column)| column.name.as_str())
    }

    /// Returns the number of samples before each shard, and after the last, in storage order.
    pub fn starts(&self) -> &Arc<[u64]> {
        &self.starts
    }

    /// Returns the number of samples in the data set.
    pub fn num_samples(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Returns 32 hexadecimal digits over the columns and every shard's samples, sizes and digests, in order.
    /// File names are not included, so a data set that was moved or merged keeps its fingerprint.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }
}

/// Returns the names of the columns whose encodings are `int` and `int64`.
fn long_columns(schema: &Schema) -> HashSet<String> {
    let mut encodings: HashMap<&str, Vec<&str>> = HashMap::new();
    for column in &schema.columns {
        let known = encodings.entry(&column.name).or_default();
        known.push(&column.encoding);
    }
    let is_long = |known: &[&str]| {
        known.len() == 2 && known.iter().all(|one| matches!(*one, "int" | "int64"))
    };
    let long = encodings.into_iter().filter(|(_, known)| is_long(known));
    long.map(|(name, _)| name.to_owned()).collect()
}

fn fingerprint(schema: &Schema, shards: &ShardList, is_mixed: bool) -> String {
    let mut hasher = Xxh3Default::new();
    let mut text = |value: &str| {
        hasher.update(&(value.len() as u64).to_le_bytes());
        hasher.update(value.as_bytes());
    };
    for column in &schema.columns {
        text(&column.name);
        text(&column.encoding);
    }
    for shard in (0..shards.len()).filter_map(|number| shards.get(number)) {
        if is_mixed {
            text(&format!("{:?}", shard.layout.places));
        }
        for file in shard
            .files()
            .flat_map(|file| [Some(&file.raw), file.zip.as_ref()])
            .flatten()
        {
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
    fn samples_are_counted_over_empty_and_merged_shards() {
        let index = parse(vec![
            shard("0/shard.00000.mds", 0, 100),
            shard("a/b/1/shard.00000.mds", 7, 100),
        ])
        .unwrap();
        assert_eq!(index.num_samples(), 7);
        assert_eq!(&index.starts()[..], [0, 0, 7]);
    }

    #[test]
    fn names_outside_the_folder_are_an_error() {
        for name in [
            "../x.mds",
            "/etc/passwd",
            "a/../b",
            "a/b/../../../c.mds",
            "",
            ".",
            "a//b",
            "./a",
            "a/",
            ".hidden",
            "a\\b",
            "index.json",
            "x/index.json",
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
    fn errors_name_the_invalid_field() {
        let cases: [(&str, &str, &str); 9] = [
            ("/version", "3", "version 3"),
            (
                "/format",
                "\"arrow\"",
                "`arrow`: expected `mds`, `json`, `csv`",
            ),
            ("/format", "\"parquet\"", "no `row_group`"),
            ("/format", "\"xsv\"", "no `separator`"),
            ("/column_sizes", "[0, 0]", "2 `column_sizes`"),
            ("/samples", "4294967295", "4294967295 samples"),
            ("/column_names", "[]", "0 `column_names`"),
            ("/compression", "\"zstd\"", "no `zip_data`"),
            ("/compression", "\"lz4\"", "`lz4`"),
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
        let mut packed = shard("a.mds", 1, 1);
        packed["compression"] = "zstd".into();
        packed["zip_data"] =
            serde_json::json!({"basename": "a.mds.zstd", "bytes": 1u64 << 60, "hashes": {}});
        let message = parse(vec![packed]).unwrap_err().to_string();
        assert!(message.contains("1152921504606846976 bytes"), "{message}");
    }

    #[test]
    fn shards_may_differ_in_columns_and_compression() {
        let mut other = shard("b.mds", 3, 100);
        other["column_names"] = serde_json::json!(["b", "a"]);
        other["column_encodings"] = serde_json::json!(["str", "int"]);
        other["column_sizes"] = serde_json::json!([null, 8]);
        other["compression"] = "gz:1".into();
        other["zip_data"] = serde_json::json!({"basename": "b.mds.gz", "bytes": 50, "hashes": {}});
        let index = parse(vec![shard("a.mds", 2, 100), other, shard("c.mds", 2, 100)]).unwrap();
        let names: Vec<&str> = index
            .schema()
            .columns
            .iter()
            .map(|c| c.name.as_str())
            .collect();
        assert_eq!(names, ["a", "b"]);
        assert!(index.is_mixed());
        let [first, second, third] = [0, 1, 2].map(|number| index.shard(number).unwrap());
        assert!(index.shard(3).is_none());
        assert_eq!(second.layout.places, [1, 0]);
        assert!(Arc::ptr_eq(&first.layout, &third.layout));
        assert!(first.compression.is_none() && second.compression.is_some());
    }

    #[test]
    fn int_and_int64_are_one_encoding_if_every_shard_has_one_of_them() {
        let of = |name: &str, encoding: &str| {
            let mut entry = shard(name, 2, 100);
            entry["column_encodings"] = serde_json::json!([encoding]);
            entry
        };
        let mixed = |shards| {
            let index = parse(shards).unwrap();
            assert!(index.is_mixed());
            index.mixed_columns().map(str::to_owned).collect::<Vec<_>>()
        };
        let both = || vec![of("a.mds", "int"), of("b.mds", "int64")];
        assert!(mixed(both()).is_empty());
        let mut other = of("c.mds", "int");
        other["column_names"] = serde_json::json!(["b"]);
        assert_eq!(mixed([both(), vec![other]].concat()), ["a", "a", "b"]);
        assert_eq!(
            mixed([both(), vec![of("c.mds", "uint64")]].concat()),
            ["a"; 3]
        );
    }

    #[test]
    fn text_shards_have_a_second_file_and_columns_of_three_types() {
        let file = |name: &str| serde_json::json!({"basename": name, "bytes": 10, "hashes": {}});
        let json = serde_json::json!({
            "columns": {"x": "int", "y": "str", "z": "float"}, "compression": null, "format": "json", "hashes": [],
            "newline": "\n", "raw_data": file("s.json"), "raw_meta": file("s.json.meta"), "samples": 1,
            "size_limit": 1, "version": 2, "zip_data": null, "zip_meta": null,
        });
        let index = parse(vec![json.clone()]).unwrap();
        let columns: Vec<_> = index
            .schema()
            .columns
            .iter()
            .map(|c| (c.encoding.as_str(), c.width))
            .collect();
        assert_eq!(
            columns,
            [("int", Some(8)), ("str", None), ("float64", Some(8))]
        );
        assert!(index.shard(0).unwrap().meta.as_ref().unwrap().holds_offsets);
        let mut bad = json.clone();
        bad["columns"]["x"] = "ndarray".into();
        assert!(
            parse(vec![bad])
                .unwrap_err()
                .to_string()
                .contains("`ndarray`")
        );
        let mut bad = json;
        bad["raw_meta"] = serde_json::Value::Null;
        assert!(
            parse(vec![bad])
                .unwrap_err()
                .to_string()
                .contains("no `raw_meta`")
        );
    }

    #[test]
    fn the_fingerprint_depends_on_the_data_and_not_on_names() {
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
        fn arbitrary_bytes_as_an_index_never_panic(data: Vec<u8>) {
            let _ = Index::parse(&data, "x");
        }
    }
}
