//! One shard's entry in `index.json`, parsed and validated.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Component, Path};

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::{Result, StreamError};
use crate::shard::codec::Compression;
use crate::shard::info::{FileInfo, INDEX_NAME, StoredFile};
use crate::shard::row_group::RowGroup;
use crate::shard::schema::{Column, Format, Schema};

/// Limit of a compressed file in bytes: twice that of a raw file.
const MOST_PACKED_BYTES: u64 = 1 << 33;

/// The format of row groups, in the index that is made of the footers of Parquet files.
const PARQUET: &str = "parquet";

/// An entry as stored in the file. Unknown keys are ignored.
#[derive(Deserialize)]
pub(crate) struct ShardEntry {
    format: String,
    version: u64,
    samples: u64,
    #[serde(default)]
    column_names: Vec<String>,
    #[serde(default)]
    column_encodings: Vec<String>,
    #[serde(default)]
    column_sizes: Vec<Option<u32>>,
    /// The columns of JSON shards: type by name.
    #[serde(default)]
    columns: BTreeMap<String, String>,
    separator: Option<String>,
    newline: Option<String>,
    compression: Option<String>,
    raw_data: Option<EntryFile>,
    zip_data: Option<EntryFile>,
    raw_meta: Option<EntryFile>,
    zip_meta: Option<EntryFile>,
    /// The row group of a Parquet file.
    row_group: Option<RowGroup>,
}

#[derive(Deserialize)]
struct EntryFile {
    basename: String,
    bytes: u64,
    #[serde(default)]
    hashes: HashMap<String, String>,
}

/// A problem in an entry; the caller adds the index's name.
pub(crate) enum EntryProblem {
    Corrupt(String),
    Unsupported(String),
}

impl EntryProblem {
    pub(crate) fn at(self, origin: &str) -> StreamError {
        match self {
            Self::Corrupt(reason) => StreamError::IndexCorrupt {
                origin: origin.into(),
                reason,
            },
            Self::Unsupported(what) => StreamError::config(format!("`{origin}`: {what}")),
        }
    }
}

type Checked<T> = std::result::Result<T, EntryProblem>;

/// A validated entry.
pub(crate) struct CheckedEntry {
    pub format: Format,
    pub schema: Schema,
    pub samples: u32,
    pub compression: Option<Compression>,
    pub data: StoredFile,
    pub meta: Option<StoredFile>,
    pub row_group: Option<RowGroup>,
}

impl ShardEntry {
    /// Validates shard `number`.
    pub(crate) fn check(self, number: usize) -> Checked<CheckedEntry> {
        let (format, columns) = self.columns(number)?;
        let schema = check_columns(columns, number)?;
        if self.version != 2 {
            return Err(EntryProblem::Corrupt(format!(
                "shard {number} has version {}, expected 2",
                self.version
            )));
        }
        let samples = u32::try_from(self.samples)
            .ok()
            .filter(|&samples| samples < u32::MAX)
            .ok_or_else(|| {
                EntryProblem::Corrupt(format!(
                    "shard {number} has {} samples, expected fewer than 2^32 - 1",
                    self.samples
                ))
            })?;
        let compression = self
            .compression
            .map(|text| Compression::parse(&text))
            .transpose()
            .map_err(|error| EntryProblem::Unsupported(format!("shard {number}: {error}")))?;
        if let Some(group) = &self.row_group {
            check_row_group(group, self.raw_data.as_ref(), number)?;
        } else if self.format == PARQUET {
            return Err(EntryProblem::Corrupt(format!(
                "shard {number} has no `row_group`"
            )));
        }
        let is_packed = compression.is_some();
        let is_text = format != Format::Mds;
        let data = check_pair(self.raw_data, self.zip_data, "data", is_packed, number)?;
        let data = StoredFile {
            holds_offsets: !is_text,
            ..data
        };
        let meta = is_text
            .then(|| check_pair(self.raw_meta, self.zip_meta, "meta", is_packed, number))
            .transpose()?
            .map(|meta| StoredFile {
                holds_offsets: true,
                ..meta
            });
        Ok(CheckedEntry {
            format,
            schema,
            samples,
            compression,
            data,
            meta,
            row_group: self.row_group,
        })
    }

    /// Returns the format, and the columns in the order of the shard.
    fn columns(&self, number: usize) -> Checked<(Format, Vec<Column>)> {
        let newline = self.newline.clone().unwrap_or_else(|| "\n".into());
        let fixed = match self.format.as_str() {
            // A row group is decoded to the bytes of an MDS shard.
            "mds" | PARQUET => return Ok((Format::Mds, self.mds_columns(number)?)),
            "json" => {
                let columns = text_columns(self.columns.iter(), number)?;
                return Ok((
                    Format::Json {
                        newline: check_mark("newline", newline, number)?,
                    },
                    columns,
                ));
            }
            "csv" => Some(","),
            "tsv" => Some("\t"),
            "xsv" => None,
            other => {
                return Err(EntryProblem::Unsupported(format!(
                    "shard {number} has format `{}`: expected `mds`, `json`, `csv`, `tsv` or `xsv`; convert it with MDSWriter",
                    other.escape_debug()
                )));
            }
        };
        let separator = fixed.map(str::to_owned).or_else(|| self.separator.clone());
        let format = Format::Xsv {
            separator: check_mark("separator", separator.unwrap_or_default(), number)?,
            newline: check_mark("newline", newline, number)?,
        };
        let (names, types) = (&self.column_names, &self.column_encodings);
        if names.len() != types.len() {
            return Err(EntryProblem::Corrupt(format!(
                "shard {number} has {} `column_names` and {} `column_encodings`, expected equal numbers",
                names.len(),
                types.len()
            )));
        }
        Ok((format, text_columns(names.iter().zip(types), number)?))
    }

    fn mds_columns(&self, number: usize) -> Checked<Vec<Column>> {
        let (names, encodings, sizes) = (
            &self.column_names,
            &self.column_encodings,
            &self.column_sizes,
        );
        if names.len() != encodings.len() || names.len() != sizes.len() {
            return Err(EntryProblem::Corrupt(format!(
                "shard {number} has {} `column_names`, {} `column_encodings` and {} `column_sizes`, expected equal numbers",
                names.len(),
                encodings.len(),
                sizes.len()
            )));
        }
        let columns = names.iter().zip(encodings).zip(sizes);
        // A size of 0 means "no fixed size" in the format's own reader.
        Ok(columns
            .map(|((name, encoding), width)| Column {
                name: name.clone(),
                encoding: encoding.clone(),
                width: width.filter(|&width| width > 0),
            })
            .collect())
    }
}

/// Checks the file name and the size of a row group.
fn check_row_group(group: &RowGroup, raw: Option<&EntryFile>, number: usize) -> Checked<()> {
    if !is_inside(&group.file) {
        return Err(EntryProblem::Corrupt(format!(
            "shard {number} has the file `{}`, expected plain folder and file names that stay inside the data set",
            group.file.escape_debug()
        )));
    }
    let bytes = raw.map_or(0, |raw| raw.bytes);
    if bytes > u64::from(u32::MAX) {
        return Err(EntryProblem::Unsupported(format!(
            "row group {} of `{}` has {bytes} bytes when decoded, expected fewer than 2^32; write smaller row groups, or convert the data with `hocket-stream convert`",
            group.row_group, group.file
        )));
    }
    Ok(())
}

/// Returns the columns of a text shard, with the encodings in which their values are returned.
fn text_columns<'a>(
    columns: impl Iterator<Item = (&'a String, &'a String)>,
    number: usize,
) -> Checked<Vec<Column>> {
    columns
        .map(|(name, kind)| {
            let (encoding, width) = match kind.as_str() {
                "str" => ("str", None),
                "int" => ("int", Some(8)),
                "float" => ("float64", Some(8)),
                other => {
                    return Err(EntryProblem::Unsupported(format!(
                        "shard {number} has column `{name}` of type `{}`: expected `str`, `int` or `float`, the types of a text shard",
                        other.escape_debug()
                    )));
                }
            };
            Ok(Column { name: name.clone(), encoding: encoding.into(), width })
        })
        .collect()
}

fn check_columns(columns: Vec<Column>, number: usize) -> Checked<Schema> {
    let mut names = HashSet::new();
    match columns.iter().find(|column| !names.insert(&column.name)) {
        Some(twice) => Err(EntryProblem::Corrupt(format!(
            "shard {number} has two columns named `{}`",
            twice.name
        ))),
        None if columns.is_empty() => Err(EntryProblem::Corrupt(format!(
            "shard {number} has 0 columns, expected at least one"
        ))),
        None => Ok(Schema { columns }),
    }
}

fn check_mark(name: &str, mark: String, number: usize) -> Checked<String> {
    if mark.is_empty() {
        return Err(EntryProblem::Corrupt(format!(
            "shard {number} has no `{name}`, expected at least one character"
        )));
    }
    Ok(mark)
}

/// Checks a file and its compressed form: either both are listed, or the file is not compressed.
fn check_pair(
    raw: Option<EntryFile>,
    zip: Option<EntryFile>,
    what: &str,
    is_packed: bool,
    number: usize,
) -> Checked<StoredFile> {
    let raw =
        raw.ok_or_else(|| EntryProblem::Corrupt(format!("shard {number} has no `raw_{what}`")))?;
    let raw = check_file(raw, number)?;
    if raw.bytes > u64::from(u32::MAX) {
        return Err(EntryProblem::Corrupt(format!(
            "shard {number} (`{}`) has {} bytes, expected fewer than 2^32, because offsets have 32 bits",
            raw.basename, raw.bytes
        )));
    }
    if zip.is_some() != is_packed {
        return Err(EntryProblem::Corrupt(format!(
            "shard {number} has {} compression and {} `zip_{what}`, expected both or neither",
            if is_packed { "a" } else { "no" },
            if is_packed { "no" } else { "a" }
        )));
    }
    let zip = zip.map(|zip| check_file(zip, number)).transpose()?;
    if let Some(zip) = zip.as_ref().filter(|zip| zip.bytes > MOST_PACKED_BYTES) {
        return Err(EntryProblem::Corrupt(format!(
            "shard {number} (`{}`) has {} bytes, expected at most {MOST_PACKED_BYTES}: no codec more than doubles the size of a shard",
            zip.basename, zip.bytes
        )));
    }
    Ok(StoredFile {
        raw,
        zip,
        holds_offsets: false,
    })
}

fn check_file(file: EntryFile, number: usize) -> Checked<FileInfo> {
    if !is_inside(&file.basename) {
        return Err(EntryProblem::Corrupt(format!(
            "shard {number} has the base name `{}`, expected plain folder and file names that stay inside the data set",
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

/// Returns whether a base name stays inside the data set: plain components, in a single spelling. Hidden names
/// are rejected too, because unfinished files use them.
fn is_inside(basename: &str) -> bool {
    let components: Vec<Component<'_>> = Path::new(basename).components().collect();
    let plain = components.iter().all(|part| matches!(part, Component::Normal(name) if !name.as_encoded_bytes().starts_with(b".")));
    plain
        && !components.is_empty()
        && basename.split('/').count() == components.len()
        && !basename.contains(['\\', '\0'])
        && Path::new(basename).file_name() != Some(INDEX_NAME.as_ref())
}

/// Passes the entries of an index to `take` one by one, so that only one of many shards is decoded at a time.
pub(crate) fn parse(
    data: &[u8],
    origin: &str,
    mut take: impl FnMut(ShardEntry) -> Result<()>,
) -> Result<()> {
    #[derive(Deserialize)]
    struct File<'a> {
        version: u64,
        #[serde(borrow)]
        shards: Vec<&'a RawValue>,
    }
    let corrupt = |reason: String| StreamError::IndexCorrupt {
        origin: origin.into(),
        reason,
    };
    let file: File<'_> =
        serde_json::from_slice(data).map_err(|error| corrupt(error.to_string()))?;
    if file.version != 2 {
        return Err(corrupt(format!(
            "its version is {}, expected 2",
            file.version
        )));
    }
    if u32::try_from(file.shards.len()).is_err() {
        return Err(corrupt(format!(
            "it lists {} shards, expected fewer than 2^32",
            file.shards.len()
        )));
    }
    for (number, text) in file.shards.into_iter().enumerate() {
        let entry = serde_json::from_str(text.get());
        take(entry.map_err(|error| corrupt(format!("shard {number}: {error}")))?)?;
    }
    Ok(())
}
