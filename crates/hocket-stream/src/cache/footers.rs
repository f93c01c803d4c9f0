//! The footers of Parquet files, read in parallel.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use hocket_store::execution::TICK;
use hocket_store::{Interrupted, thread_refused};

use crate::cache::remote::{self, DatasetRemote};
use crate::error::{Result, StreamError};
use crate::parquet::footer;
use crate::shard::row_group::TRAILER_BYTES;

/// The end of a file that is read first; most footers are within it.
const GUESS_BYTES: u64 = 64 << 10;

/// Number of footers that are read at once: each is one or two small requests. The remote has to allow as many.
pub const READ_AT_ONCE: usize = 64;

const MARK: &[u8] = b"PAR1";
const ENCRYPTED_MARK: &[u8] = b"PARE";

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
    footer::summarize(&footer, object.etag()).map_err(|found| corrupt("a readable footer", found))
}
