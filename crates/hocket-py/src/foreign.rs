//! Python bindings for foreign checkpoints and for files written in pieces.

use std::sync::Mutex;

use hocket_ckpt::foreign;
use hocket_ckpt::{CallerMemory, CheckpointPlace, CkptError, StreamOptions, StreamWriter};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyDict;

use crate::ckpt::{call, encoding, file_to_dict};

/// Adds this module's functions and classes to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(foreign_verify_zips, module)?)?;
    module.add_function(wrap_pyfunction!(foreign_lax_rules, module)?)?;
    module.add_function(wrap_pyfunction!(crc32, module)?)?;
    module.add_class::<CkptStreamWriter>()
}

/// Zip, member, offset, bytes, problem.
type BadRow = (usize, String, u64, u64, String);

#[pyfunction]
fn foreign_verify_zips(
    py: Python<'_>,
    root: &str,
    path: &str,
    zips: Vec<(u64, u64, bool)>,
) -> PyResult<Vec<BadRow>> {
    let bad = call(py, |interrupted| {
        foreign::verify_zips(&CheckpointPlace::open(root)?, path, &zips, interrupted)
    })?;
    let rows = bad
        .into_iter()
        .map(|one| (one.zip, one.member, one.offset, one.length, one.problem));
    Ok(rows.collect())
}

#[pyfunction]
fn foreign_lax_rules(py: Python<'_>, root: &str, path: &str) -> PyResult<Vec<String>> {
    call(py, |interrupted| {
        foreign::lax_rules(&CheckpointPlace::open(root)?, path, interrupted)
    })
}

#[pyfunction]
#[pyo3(signature = (address, num_bytes, value = 0))]
fn crc32(py: Python<'_>, address: usize, num_bytes: usize, value: u32) -> u32 {
    // SAFETY: the caller keeps the memory alive and unchanged during the call, as the stub requires.
    let memory = unsafe { CallerMemory::new(address, num_bytes) };
    py.detach(|| foreign::crc32(memory.as_slice(), value))
}

/// A file written sequentially, in pieces.
#[pyclass(module = "hocket.native._native", frozen)]
pub struct CkptStreamWriter {
    writer: Mutex<Option<StreamWriter>>,
    /// Whether the file existed already.
    #[pyo3(get)]
    found: bool,
}

impl CkptStreamWriter {
    fn take(&self) -> PyResult<StreamWriter> {
        let taken = self.writer.lock().ok().and_then(|mut writer| writer.take());
        taken.ok_or_else(|| PyValueError::new_err("the file is finished, abandoned, or in use"))
    }

    fn append(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<()> {
        let mut writer = self.take()?;
        let writer = call(py, |interrupted| {
            writer.write(bytes, interrupted)?;
            Ok::<_, CkptError>(writer)
        })?;
        if let Ok(mut slot) = self.writer.lock() {
            *slot = Some(writer);
        }
        Ok(())
    }
}

#[pymethods]
impl CkptStreamWriter {
    #[new]
    #[pyo3(signature = (uri, path, *, size, data_start = None, compression = None, replaces = false))]
    fn new(
        py: Python<'_>,
        uri: &str,
        path: &str,
        size: u64,
        data_start: Option<u64>,
        compression: Option<(i32, bool)>,
        replaces: bool,
    ) -> PyResult<Self> {
        let options = StreamOptions {
            data_start,
            encoding: encoding(compression),
            replaces,
        };
        let writer = call(py, |interrupted| {
            StreamWriter::create(
                &CheckpointPlace::open(uri)?,
                path,
                size,
                options,
                interrupted,
            )
        })?;
        Ok(Self {
            found: writer.is_found(),
            writer: Mutex::new(Some(writer)),
        })
    }

    fn write(&self, py: Python<'_>, data: PyBackedBytes) -> PyResult<()> {
        self.append(py, &data)
    }

    fn write_from(&self, py: Python<'_>, address: usize, num_bytes: usize) -> PyResult<()> {
        // SAFETY: the caller keeps the memory alive and unchanged during the call, as the stub requires.
        let memory = unsafe { CallerMemory::new(address, num_bytes) };
        self.append(py, memory.as_slice())
    }

    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let writer = self.take()?;
        let done = call(py, |interrupted| writer.finish(interrupted))?;
        done.file.map(|file| file_to_dict(py, file)).transpose()
    }

    fn close(&self) {
        let _ = self.take();
    }
}
