//! Python bindings of hocket-store.

use crate::errors::store_error;
use crate::wait::wait;
use bytes::Bytes;
use hocket_store::{CounterSnapshot, PutMode, StoreOptions};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyMemoryView, PyTuple};
use std::future::Future;
use std::path::PathBuf;

/// Adds this module's functions and classes to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ObjectMeta>()?;
    module.add_class::<Store>()?;
    module.add_function(wrap_pyfunction!(counters, module)?)
}

/// Waits for a store operation.
fn run<T, F>(py: Python<'_>, verb: F) -> PyResult<T>
where
    T: Send + 'static,
    F: Future<Output = hocket_store::Result<T>> + Send + 'static,
{
    wait(py, verb, store_error)
}

/// The metadata of one object: `key`, `size` in bytes, `etag`, and `modified_ms` since 1970 (UTC).
#[pyclass(module = "hocket.native", frozen, eq, get_all)]
#[derive(Clone, PartialEq)]
pub struct ObjectMeta {
    key: String,
    size: u64,
    etag: Option<String>,
    modified_ms: i64,
}

#[pymethods]
impl ObjectMeta {
    #[new]
    #[pyo3(signature = (key, size, etag, modified_ms))]
    fn new(key: String, size: u64, etag: Option<String>, modified_ms: i64) -> Self {
        Self {
            key,
            size,
            etag,
            modified_ms,
        }
    }

    fn __repr__(&self) -> String {
        let etag = self
            .etag
            .as_ref()
            .map_or("None".to_owned(), |etag| format!("{etag:?}"));
        format!(
            "ObjectMeta(key={:?}, size={}, etag={etag}, modified_ms={})",
            self.key, self.size, self.modified_ms
        )
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        (&self.key, self.size, &self.etag, self.modified_ms)
            .into_pyobject(py)?
            .hash()
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let meta = slf.get();
        let arguments =
            (&meta.key, meta.size, &meta.etag, meta.modified_ms).into_pyobject(slf.py())?;
        Ok((slf.get_type().into_any(), arguments))
    }
}

impl From<hocket_store::ObjectMeta> for ObjectMeta {
    fn from(meta: hocket_store::ObjectMeta) -> Self {
        Self {
            key: meta.key,
            size: meta.size,
            etag: meta.etag,
            modified_ms: meta.modified_ms,
        }
    }
}

/// Returns the counts of all stores of this process.
#[pyfunction]
fn counters(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let named = counts_to_dict(py, hocket_store::counts())?;
    let (now, most) = hocket_store::bytes_in_flight();
    named.set_item("bytes_in_flight", now)?;
    named.set_item("most_bytes_in_flight", most)?;
    Ok(named)
}

fn counts_to_dict(py: Python<'_>, counts: CounterSnapshot) -> PyResult<Bound<'_, PyDict>> {
    let named = PyDict::new(py);
    named.set_item("requests", counts.requests)?;
    named.set_item("retries", counts.retries)?;
    named.set_item("bytes_received", counts.bytes_received)?;
    named.set_item("bytes_sent", counts.bytes_sent)?;
    Ok(named)
}

/// An object store given by a URI: `s3://bucket/prefix` and the other schemes, a local directory, or
/// `memory://name`.
#[pyclass(module = "hocket.native", frozen)]
pub struct Store {
    inner: hocket_store::Store,
}

impl Store {
    /// Returns the Rust handle, for other parts of this extension.
    pub(crate) fn handle(&self) -> hocket_store::Store {
        self.inner.clone()
    }
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (uri, *, endpoint=None, region=None, path_style=None, anonymous=false, requester_pays=false,
                        part_bytes=None, max_requests=None, budget_bytes=None, timeout_s=None, deadline_s=None,
                        max_retries=None, backoff_ms=None, **unknown),
           text_signature = "(uri, *, endpoint=None, region=None, path_style=None, anonymous=False, \
                             requester_pays=False, part_bytes=None, max_requests=None, budget_bytes=None, \
                             timeout_s=None, deadline_s=None, max_retries=None, backoff_ms=None)")]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        uri: PathBuf,
        endpoint: Option<String>,
        region: Option<String>,
        path_style: Option<bool>,
        anonymous: bool,
        requester_pays: bool,
        part_bytes: Option<u64>,
        max_requests: Option<usize>,
        budget_bytes: Option<u64>,
        timeout_s: Option<f64>,
        deadline_s: Option<f64>,
        max_retries: Option<usize>,
        backoff_ms: Option<(u64, u64)>,
        unknown: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        if let Some(names) = unknown {
            py.import("hocket.native.arguments")?
                .call_method1("refuse_unknown", (py.get_type::<Self>(), names))?;
        }
        let default = StoreOptions::default();
        let options = StoreOptions {
            endpoint,
            region,
            path_style,
            anonymous,
            requester_pays,
            part_bytes: part_bytes.unwrap_or(default.part_bytes),
            max_requests: max_requests.unwrap_or(default.max_requests),
            budget_bytes: budget_bytes.unwrap_or(default.budget_bytes),
            timeout_s: timeout_s.unwrap_or(default.timeout_s),
            deadline_s: deadline_s.unwrap_or(default.deadline_s),
            max_retries: max_retries.unwrap_or(default.max_retries),
            backoff_ms: backoff_ms.unwrap_or(default.backoff_ms),
        };
        let uri = uri
            .to_str()
            .ok_or_else(|| PyTypeError::new_err("`uri` must be a string that UTF-8 can encode"))?;
        match hocket_store::Store::open(uri, options) {
            Ok(inner) => Ok(Self { inner }),
            Err(error) => Err(store_error(py, &error)),
        }
    }

    #[getter]
    fn uri(&self) -> &str {
        self.inner.uri()
    }

    fn pinned_uri(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let store = self.inner.clone();
        run(py, async move { store.pinned_uri().await })
    }

    #[pyo3(signature = (key, *, start=None, end=None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        key: String,
        start: Option<u64>,
        end: Option<u64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let store = self.inner.clone();
        let data = run(py, async move {
            match (start, end) {
                (None, None) => store.get(&key).await,
                (start, Some(end)) => store.get_range(&key, start.unwrap_or(0)..end).await,
                (Some(start), None) => {
                    let end = store.head(&key).await?.size;
                    store.get_range(&key, start..end.max(start)).await
                }
            }
        })?;
        Ok(PyBytes::new(py, &data))
    }

    fn head(&self, py: Python<'_>, key: String) -> PyResult<ObjectMeta> {
        let store = self.inner.clone();
        run(py, async move { store.head(&key).await }).map(ObjectMeta::from)
    }

    #[pyo3(signature = (key, data, *, if_absent=false, if_match=None))]
    fn put(
        &self,
        py: Python<'_>,
        key: String,
        data: &Bound<'_, PyAny>,
        if_absent: bool,
        if_match: Option<String>,
    ) -> PyResult<Option<String>> {
        let mode = match (if_absent, if_match) {
            (false, None) => PutMode::Overwrite,
            (true, None) => PutMode::Create,
            (false, Some(etag)) => PutMode::Match(etag),
            (true, Some(_)) => {
                return Err(PyTypeError::new_err(
                    "pass `if_absent` or `if_match`, not both",
                ));
            }
        };
        let (store, data) = (self.inner.clone(), buffer(data)?);
        // Holds a reference until the end, so that the object is released here, under the interpreter lock, and
        // not on an I/O thread.
        let _kept = data.clone();
        run(py, async move { store.put(&key, data, mode).await })
    }

    fn upload(&self, py: Python<'_>, key: String, path: PathBuf) -> PyResult<ObjectMeta> {
        let store = self.inner.clone();
        run(py, async move { store.upload_file(&key, &path).await }).map(ObjectMeta::from)
    }

    fn download(&self, py: Python<'_>, key: String, path: PathBuf) -> PyResult<ObjectMeta> {
        let store = self.inner.clone();
        run(py, async move { store.download(&key, &path, None).await }).map(ObjectMeta::from)
    }

    #[pyo3(signature = (prefix = ""))]
    fn list(&self, py: Python<'_>, prefix: &str) -> PyResult<Vec<ObjectMeta>> {
        let (store, prefix) = (self.inner.clone(), prefix.to_owned());
        let objects = run(py, async move { store.list(&prefix).await })?;
        Ok(objects.into_iter().map(ObjectMeta::from).collect())
    }

    #[pyo3(signature = (prefix = ""))]
    fn list_dirs(&self, py: Python<'_>, prefix: &str) -> PyResult<(Vec<String>, Vec<ObjectMeta>)> {
        let (store, prefix) = (self.inner.clone(), prefix.to_owned());
        let listing = run(py, async move { store.list_dirs(&prefix).await })?;
        Ok((
            listing.dirs,
            listing.objects.into_iter().map(ObjectMeta::from).collect(),
        ))
    }

    fn delete(&self, py: Python<'_>, key: String) -> PyResult<()> {
        let store = self.inner.clone();
        run(py, async move { store.delete(&key).await })
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        counts_to_dict(py, self.inner.counts())
    }

    fn __repr__(&self) -> String {
        format!("Store({:?})", self.inner.uri())
    }

    fn __getnewargs_ex__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let (options, named) = (self.inner.options(), PyDict::new(py));
        named.set_item("endpoint", &options.endpoint)?;
        named.set_item("region", &options.region)?;
        named.set_item("path_style", options.path_style)?;
        named.set_item("anonymous", options.anonymous)?;
        named.set_item("requester_pays", options.requester_pays)?;
        named.set_item("part_bytes", options.part_bytes)?;
        named.set_item("max_requests", options.max_requests)?;
        named.set_item("budget_bytes", options.budget_bytes)?;
        named.set_item("timeout_s", options.timeout_s)?;
        named.set_item("deadline_s", options.deadline_s)?;
        named.set_item("max_retries", options.max_retries)?;
        named.set_item("backoff_ms", options.backoff_ms)?;
        Ok((PyTuple::new(py, [self.inner.uri()])?, named))
    }
}

/// Returns the bytes of any buffer: shared for a `bytes` object, copied otherwise.
fn buffer(data: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    let owner: PyBackedBytes = match data.cast::<PyBytes>() {
        Ok(bytes) => bytes.clone().into(),
        Err(_) => PyMemoryView::from(data)?
            .call_method0("tobytes")?
            .cast_into::<PyBytes>()?
            .into(),
    };
    Ok(Bytes::from_owner(owner))
}
