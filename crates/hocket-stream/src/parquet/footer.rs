//! What an index needs of a Parquet file: its columns and row groups, from the footer alone.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use hocket_store::execution::TICK;
use hocket_store::{Interrupted, thread_refused};
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData};
use serde::Serialize;

use crate::cache::remote::{self, DatasetRemote};
use crate::error::{Result, StreamError};
use crate::parquet::types::children;
use crate::parquet::{TRAILER_BYTES, footer_digest};

/// The end of a file that is read first; most footers are within it.
const GUESS_BYTES: u64 = 64 << 10;

/// Number of footers that are read at once: each is one or two small requests.
const READ_AT_ONCE: usize = 64;

const MARK: &[u8] = b"PAR1";
const ENCRYPTED_MARK: &[u8] = b"PARE";

/// Keys of a file's own metadata that tell more of its columns.
const METADATA_KEYS: [&str; 2] = ["huggingface", "ARROW:schema"];

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
}

#[derive(Serialize)]
struct GroupSummary {
    rows: i64,
    /// Of each leaf column: start and length in the file, decoded bytes, and nulls if they are known.
    leaves: Vec<(u64, u64, i64, Option<u64>)>,
}

/// Reads the footers of files, given with their sizes, and returns their summaries as JSON, in order.
///
/// # Errors
/// [`StreamError::ShardCorrupt`] for a file that is no Parquet; [`StreamError::ShardNotFound`]; the store's own
/// errors; [`StreamError::Closed`] once `interrupted` returns true.
pub fn summarize(
    remote: &DatasetRemote,
    files: &[(String, u64)],
    interrupted: Interrupted<'_>,
) -> Result<Vec<String>> {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let done: Mutex<Vec<Option<Result<String>>>> = Mutex::new(files.iter().map(|_| None).collect());
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some((key, bytes)) = files.get(number).filter(|_| !stop.load(Ordering::Relaxed))
            else {
                return;
            };
            let read = read(remote, key, *bytes, &|| stop.load(Ordering::Relaxed));
            stop.fetch_or(read.is_err(), Ordering::Relaxed);
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(place) = done.get_mut(number) {
                *place = Some(read);
            }
        }
    };
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for number in 0..READ_AT_ONCE.min(files.len()) {
            let builder = std::thread::Builder::new().name(format!("hocket-footer-{number}"));
            match builder.spawn_scoped(scope, work) {
                Ok(thread) => threads.push(thread),
                // The system grants no more threads; those that exist read all footers.
                Err(_) if number > 0 => break,
                Err(error) => {
                    return Err(StreamError::Io {
                        path: "hocket-footer".into(),
                        reason: thread_refused(&error),
                    });
                }
            }
        }
        while threads.iter().any(|thread| !thread.is_finished()) {
            if interrupted() {
                stop.store(true, Ordering::Relaxed);
                return Err(StreamError::Closed);
            }
            std::thread::sleep(TICK / 25);
        }
        Ok(())
    })?;
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut found = Vec::with_capacity(done.len());
    let mut closed = false;
    for summary in done {
        match summary {
            Some(Err(StreamError::Closed)) | None => closed = true,
            Some(other) => found.push(other?),
        }
    }
    if closed {
        Err(StreamError::Closed)
    } else {
        Ok(found)
    }
}

fn read(
    remote: &DatasetRemote,
    key: &str,
    file_bytes: u64,
    interrupted: Interrupted<'_>,
) -> Result<String> {
    let object = remote.object(key);
    let corrupt = |expected: &str, actual: String| StreamError::ShardCorrupt {
        shard: key.into(),
        object: object.uri(),
        expected: expected.into(),
        actual,
    };
    let get = |start: u64, end: u64| -> Result<Bytes> {
        let parts = remote::get_ranges(&object, std::slice::from_ref(&(start..end)), interrupted)?;
        let parts = parts.ok_or_else(|| StreamError::ShardNotFound {
            shard: key.into(),
            uri: object.uri(),
        })?;
        Ok(parts.into_iter().next().unwrap_or_default())
    };
    if file_bytes < TRAILER_BYTES {
        return Err(corrupt("a Parquet file", format!("{file_bytes} bytes")));
    }
    let guess = file_bytes.min(GUESS_BYTES);
    let tail = get(file_bytes - guess, file_bytes)?;
    let (before, trailer) = tail.split_at(tail.len().saturating_sub(TRAILER_BYTES as usize));
    let Some((size, mark)) = trailer
        .split_first_chunk::<4>()
        .filter(|(_, mark)| *mark == MARK)
    else {
        let is_encrypted = trailer.ends_with(ENCRYPTED_MARK);
        let actual = if is_encrypted {
            "an encrypted footer"
        } else {
            "another end"
        };
        return Err(corrupt(
            "a Parquet file that ends with `PAR1`",
            actual.into(),
        ));
    };
    debug_assert_eq!(mark, MARK);
    let footer_bytes = u64::from(u32::from_le_bytes(*size));
    let start = file_bytes.checked_sub(TRAILER_BYTES + footer_bytes);
    let start = start.ok_or_else(|| {
        corrupt(
            "a footer inside the file",
            format!("a footer of {footer_bytes} bytes"),
        )
    })?;
    let footer = match before.len().checked_sub(footer_bytes as usize) {
        Some(begin) => Bytes::copy_from_slice(before.get(begin..).unwrap_or_default()),
        None => get(start, file_bytes - TRAILER_BYTES)?,
    };
    let decoded = std::panic::catch_unwind(|| ParquetMetaDataReader::decode_metadata(&footer));
    let metadata = match decoded {
        Ok(Ok(metadata)) => metadata,
        Ok(Err(error)) => return Err(corrupt("a readable footer", error.to_string())),
        Err(_) => {
            return Err(corrupt(
                "a readable footer",
                "one on which the decoder failed".into(),
            ));
        }
    };
    let summary = FileSummary {
        footer_bytes,
        digest: footer_digest(&footer),
        etag: object.etag().map(str::to_owned),
        columns: columns(&metadata),
        row_groups: metadata.row_groups().iter().map(group).collect(),
        metadata: own_metadata(&metadata),
    };
    serde_json::to_string(&summary).map_err(|error| StreamError::config(error.to_string()))
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
        .filter(|pair| METADATA_KEYS.contains(&pair.key.as_str()))
        .filter_map(|pair| Some((pair.key.clone(), pair.value.clone()?)))
        .collect()
}
