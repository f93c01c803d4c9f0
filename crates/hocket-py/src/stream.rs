//! Python bindings of hocket-stream.

use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hocket_store::StoreOptions;
use hocket_stream::cache::remote::DatasetRemote;
use hocket_stream::cache::{self, Cache, CacheOptions, footers, load_index, load_kept_index};
use hocket_stream::reader::batch::{BatchColumn, ColumnData};
use hocket_stream::reader::lookup;
use hocket_stream::reader::sources::DatasetSources;
use hocket_stream::reader::{Reader, ReaderOptions};
use hocket_stream::shard::buffers::Buffer;
use hocket_stream::shard::hash;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView};

use crate::order::EpochOrder;
use crate::shard_index::{ShardIndex, raise};
use crate::wait::{listen, poll};

/// Limit of one wait before Python's signals are checked.
const PATIENCE: Duration = Duration::from_millis(50);

fn open_remote(
    py: Python<'_>,
    uri: Option<&str>,
    deadline_s: f64,
) -> PyResult<Option<DatasetRemote>> {
    let options = StoreOptions {
        deadline_s,
        ..StoreOptions::default()
    };
    uri.map(|uri| raise(py, DatasetRemote::open(uri, options)))
        .transpose()
}

/// Memory filled by Rust and then owned by Python, which accesses it through a writable `memoryview`.
#[pyclass(frozen, module = "hocket.native._native")]
pub struct ByteBlock {
    bytes: ColumnStorage,
}

enum ColumnStorage {
    Bytes(Buffer),
    Words(Vec<u64>),
}

#[pymethods]
impl ByteBlock {
    /// # Safety
    /// Must be called by the interpreter with a `view` to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let (start, len) = slf.get().extent();
        // SAFETY: Rust neither moves, grows nor reads the vector again while `slf` lives, and the filled view
        // holds a reference to it; concurrent writes are the responsibility of Python code, as with a
        // bytearray.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                start.cast(),
                len as ffi::Py_ssize_t,
                0,
                flags,
            )
        };
        if filled == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}

impl ByteBlock {
    /// Returns the address and the number of the bytes.
    fn extent(&self) -> (*mut u8, usize) {
        match &self.bytes {
            ColumnStorage::Bytes(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
            ColumnStorage::Words(words) => (words.as_ptr().cast_mut().cast(), 8 * words.len()),
        }
    }
}

/// The local shards of a data set. Belongs to one process; a forked child creates its own.
#[pyclass(frozen, module = "hocket.native._native")]
pub struct ShardCache {
    cache: Arc<Cache>,
}

#[pymethods]
impl ShardCache {
    #[new]
    #[pyo3(signature = (index, local, remote, *, written_ms, deadline_s, keep_zip, keep_shards, download_retry, validate_hash, limit))]
    #[expect(clippy::too_many_arguments, reason = "keywords of one Python call")]
    fn new(
        py: Python<'_>,
        index: &ShardIndex,
        local: PathBuf,
        remote: Option<&str>,
        written_ms: i64,
        deadline_s: f64,
        keep_zip: bool,
        keep_shards: bool,
        download_retry: u32,
        validate_hash: Option<String>,
        limit: Option<&CacheLimit>,
    ) -> PyResult<Self> {
        let remote = open_remote(py, remote, deadline_s)?;
        let options = CacheOptions {
            local,
            keep_zip,
            keep_shards,
            download_retry,
            validate_hash,
            wait: Duration::try_from_secs_f64(deadline_s).unwrap_or(Duration::MAX),
        };
        let cache = raise(py, Cache::new(index.index.clone(), remote, options))?;
        let mut cache = cache.written(written_ms);
        if let Some(limit) = limit {
            cache = cache.limited(limit.limit.clone());
        }
        Ok(Self {
            cache: Arc::new(cache),
        })
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.cache.counts();
        let named = PyDict::new(py);
        named.set_item("cache_hits", counts.hits)?;
        named.set_item("fetches", counts.fetches)?;
        named.set_item("fetched_bytes", counts.fetched_bytes)?;
        named.set_item("passed", counts.passed)?;
        named.set_item("requests", counts.requests)?;
        named.set_item("retries", counts.retries)?;
        Ok(named)
    }

    fn take_notices(&self) -> Vec<String> {
        self.cache.take_notices()
    }
}

/// A rank's part of a batch: the batch number, the number of samples that count on this rank, the number that
/// count over all ranks, and the columns.
type PyBatch = (u64, u64, u64, Vec<PyColumn>);

/// A column: its bytes; the offsets of its values (`uint64`, one more than values) if they differ in size; the
/// samples that have a value (`uint64`) if some do not.
type PyColumn = (
    Py<PyMemoryView>,
    Option<Py<PyMemoryView>>,
    Option<Py<PyMemoryView>>,
);

/// The batches of one epoch, prefetched by threads that end with the reader.
#[pyclass(frozen, module = "hocket.native._native")]
pub struct BatchReader {
    reader: Mutex<Option<Reader>>,
}

#[pymethods]
impl BatchReader {
    #[new]
    #[pyo3(signature = (caches, order, following, *, rank, world_size, first, stride, prefetch_bytes, prefetch_batches, fetch_threads))]
    #[expect(clippy::too_many_arguments, reason = "keywords of one Python call")]
    fn new(
        py: Python<'_>,
        caches: Vec<PyRef<'_, ShardCache>>,
        order: &EpochOrder,
        following: Option<&EpochOrder>,
        rank: u64,
        world_size: u64,
        first: u64,
        stride: u64,
        prefetch_bytes: u64,
        prefetch_batches: usize,
        fetch_threads: usize,
    ) -> PyResult<Self> {
        let options = ReaderOptions {
            rank,
            world: world_size,
            first,
            stride,
            prefetch_bytes,
            prefetch_batches,
            fetch_threads,
        };
        let following = following.map(|order| order.order.clone());
        let reader = sources(&caches).and_then(|sources| {
            Reader::start(Arc::new(sources), order.order.clone(), following, options)
        });
        Ok(Self {
            reader: Mutex::new(Some(raise(py, reader)?)),
        })
    }

    fn next(&self, py: Python<'_>) -> PyResult<Option<PyBatch>> {
        let answer = poll(py, || {
            let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
            let answer = reader.as_mut().map(|reader| reader.next(PATIENCE));
            match answer {
                None => Some(Ok(None)),
                Some(Ok(batch)) => Some(Ok(batch)),
                Some(Err(error)) => error.map(Err),
            }
        })?;
        let Some(batch) = raise(py, answer)? else {
            return Ok(None);
        };
        let columns = batch.columns.into_iter().map(|column| wrap(py, column));
        let columns = columns.collect::<PyResult<_>>()?;
        Ok(Some((
            batch.number,
            batch.share.local,
            batch.share.global,
            columns,
        )))
    }

    fn queued(&self) -> usize {
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        reader.as_ref().map_or(0, Reader::queued)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            drop(
                self.reader
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take(),
            )
        });
    }
}

fn sources(caches: &[PyRef<'_, ShardCache>]) -> hocket_stream::Result<DatasetSources> {
    DatasetSources::new(caches.iter().map(|cache| cache.cache.clone()).collect())
}

#[pyfunction]
fn look_up(
    py: Python<'_>,
    caches: Vec<PyRef<'_, ShardCache>>,
    order: &EpochOrder,
) -> PyResult<Option<Vec<PyColumn>>> {
    let sources = raise(py, sources(&caches))?;
    let order = &order.order;
    let found = listen(py, |interrupted| {
        let mut locations = Vec::new();
        order.locate(0, 0..order.batch_len(0), &mut locations);
        lookup::look_up(&sources, &locations, interrupted)
    })?;
    let found = raise(py, found)?;
    found
        .map(|columns| columns.into_iter().map(|column| wrap(py, column)).collect())
        .transpose()
}

fn wrap(py: Python<'_>, column: BatchColumn) -> PyResult<PyColumn> {
    let view = |bytes| -> PyResult<Py<PyMemoryView>> {
        let block = Bound::new(py, ByteBlock { bytes })?;
        Ok(PyMemoryView::from(block.as_any())?.unbind())
    };
    let (data, offsets) = match column.data {
        ColumnData::Fixed(data) => (data, None),
        ColumnData::Ragged { data, offsets } => (data, Some(offsets)),
    };
    Ok((
        view(ColumnStorage::Bytes(data))?,
        offsets
            .map(|words| view(ColumnStorage::Words(words)))
            .transpose()?,
        column
            .rows
            .map(|words| view(ColumnStorage::Words(words)))
            .transpose()?,
    ))
}

#[pyfunction]
#[pyo3(signature = (local, remote, *, deadline_s))]
fn load_shard_index(
    py: Python<'_>,
    local: PathBuf,
    remote: Option<&str>,
    deadline_s: f64,
) -> PyResult<(Vec<u8>, i64)> {
    let remote = open_remote(py, remote, deadline_s)?;
    let loaded = listen(py, |interrupted| {
        load_index(&local, remote.as_ref(), interrupted)
    })?;
    raise(py, loaded)
}

#[pyfunction]
#[pyo3(signature = (local, remote, *, deadline_s))]
fn load_kept_shard_index(
    py: Python<'_>,
    local: PathBuf,
    remote: &str,
    deadline_s: f64,
) -> PyResult<Option<(Vec<u8>, i64)>> {
    let Some(remote) = open_remote(py, Some(remote), deadline_s)? else {
        return Ok(None);
    };
    raise(py, py.detach(|| load_kept_index(&local, &remote)))
}

#[pyfunction]
#[pyo3(signature = (uri, files, *, deadline_s))]
fn parquet_footers(
    py: Python<'_>,
    uri: &str,
    files: Vec<(String, u64)>,
    deadline_s: f64,
) -> PyResult<Vec<String>> {
    let options = StoreOptions {
        deadline_s,
        max_requests: footers::READ_AT_ONCE,
        ..StoreOptions::default()
    };
    let remote = raise(py, DatasetRemote::open(uri, options))?;
    let found = listen(py, |interrupted| {
        footers::summarize(&remote, &files, interrupted)
    })?;
    raise(py, found)
}

#[pyfunction]
fn hash_names() -> Vec<&'static str> {
    hash::NAMES.iter().map(|(name, _)| *name).collect()
}

/// A limit on the total bytes of several cache folders.
#[pyclass(frozen, module = "hocket.native._native")]
pub struct CacheLimit {
    pub(crate) limit: Arc<cache::CacheLimit>,
}

#[pymethods]
impl CacheLimit {
    #[new]
    fn new(
        py: Python<'_>,
        num_bytes: u64,
        folders: Vec<(PathBuf, PyRef<'_, ShardIndex>)>,
    ) -> PyResult<Self> {
        let folders = folders
            .into_iter()
            .map(|(path, index)| (path, index.index.clone()))
            .collect();
        let limit = py.detach(|| cache::CacheLimit::new(num_bytes, folders));
        Ok(Self {
            limit: Arc::new(raise(py, limit)?),
        })
    }

    #[getter]
    fn num_bytes(&self) -> u64 {
        self.limit.bytes()
    }

    #[getter]
    fn num_evicted(&self) -> u64 {
        self.limit.evicted()
    }
}

/// Adds this module's functions and classes to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ShardIndex>()?;
    module.add_class::<ShardCache>()?;
    module.add_class::<BatchReader>()?;
    module.add_class::<CacheLimit>()?;
    module.add_function(wrap_pyfunction!(load_shard_index, module)?)?;
    module.add_function(wrap_pyfunction!(load_kept_shard_index, module)?)?;
    module.add_function(wrap_pyfunction!(parquet_footers, module)?)?;
    module.add_function(wrap_pyfunction!(look_up, module)?)?;
    module.add_function(wrap_pyfunction!(hash_names, module)?)
}
