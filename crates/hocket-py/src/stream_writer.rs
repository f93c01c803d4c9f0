//! Python bindings for writing shards.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hocket_stream::StreamError;
use hocket_stream::shard::codec::Compression;
use hocket_stream::shard::hash::Algorithm;
use hocket_stream::shard::info::FileInfo;
use hocket_stream::shard::raw_file;
use hocket_stream::writer::{self, WriterOptions, WrittenFile};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::errors::stream_error;
use crate::samples::SampleBuffer;
use crate::store::Store;
use crate::wait::poll;

/// Limit of one wait before Python's signals are checked.
const PATIENCE: Duration = Duration::from_millis(50);

/// The index's record of a file: base name, size, digests by name.
type PyFile = (String, u64, BTreeMap<String, String>);

/// A file, and its compressed form if that was written.
type PyWritten = (PyFile, Option<PyFile>);

/// A shard writer that compresses, hashes and stores in threads, which end with it.
#[pyclass(frozen, module = "hocket.native._native")]
pub struct ShardWriter {
    writer: Mutex<Option<writer::ShardWriter>>,
}

impl ShardWriter {
    /// Calls `step` without the interpreter lock until it returns a result, and checks signals in between.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        mut step: impl FnMut(&mut writer::ShardWriter) -> hocket_stream::Result<Option<T>> + Send,
    ) -> PyResult<T> {
        let outcome = poll(py, || {
            let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let writer = writer.as_mut().ok_or(StreamError::Closed);
            writer.and_then(&mut step).transpose()
        })?;
        outcome.map_err(|error| stream_error(py, &error))
    }
}

#[pymethods]
impl ShardWriter {
    #[new]
    #[pyo3(signature = (*, local, remote, compression, hashes, only_new, threads))]
    fn new(
        py: Python<'_>,
        local: Option<PathBuf>,
        remote: Option<&Store>,
        compression: Option<&str>,
        hashes: Vec<String>,
        only_new: bool,
        threads: usize,
    ) -> PyResult<Self> {
        let start = || {
            let hashes = hashes.into_iter().map(|name| {
                let algorithm = Algorithm::parse(&name)?;
                Ok((name, algorithm))
            });
            writer::ShardWriter::start(WriterOptions {
                local,
                remote: remote.map(Store::handle),
                compression: compression.map(Compression::parse).transpose()?,
                hashes: hashes.collect::<hocket_stream::Result<_>>()?,
                only_new,
                threads,
            })
        };
        let writer = start().map_err(|error| stream_error(py, &error))?;
        Ok(Self {
            writer: Mutex::new(Some(writer)),
        })
    }

    #[pyo3(signature = (basename, config, samples, *, keep=0, header=None))]
    fn submit(
        &self,
        py: Python<'_>,
        basename: String,
        config: PyBackedBytes,
        mut samples: PyRefMut<'_, SampleBuffer>,
        keep: usize,
        header: Option<PyBackedBytes>,
    ) -> PyResult<()> {
        let samples = samples.samples.take(keep);
        let assembled = match &header {
            None => raw_file::assemble(basename, &config, samples).map(|file| vec![file]),
            Some(header) => raw_file::assemble_text(basename, &config, header, samples)
                .map(|(data, meta)| vec![data, meta]),
        };
        let mut shard = Some(assembled.map_err(|error| stream_error(py, &error))?);
        self.wait(py, |writer| {
            shard = writer.submit(shard.take().unwrap_or_default(), PATIENCE)?;
            Ok(shard.is_none().then_some(()))
        })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<Vec<Vec<PyWritten>>> {
        let shards = self.wait(py, |writer| writer.finish(PATIENCE))?;
        self.close(py);
        let describe = |files: Vec<WrittenFile>| {
            let files = files.into_iter();
            files
                .map(|file| (pair(file.raw), file.zip.map(pair)))
                .collect()
        };
        Ok(shards.into_iter().map(describe).collect())
    }

    #[getter]
    fn num_written(&self) -> usize {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.as_ref().map_or(0, writer::ShardWriter::num_written)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            drop(
                self.writer
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take(),
            )
        });
    }
}

fn pair(file: FileInfo) -> PyFile {
    (file.basename, file.bytes, file.hashes.into_iter().collect())
}

/// Adds this module's classes to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<SampleBuffer>()?;
    module.add_class::<ShardWriter>()
}
