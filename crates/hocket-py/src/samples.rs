//! Samples from Python values whose memory layout equals their stored form.

use hocket_stream::shard::samples::{NumberKind, NumberType, Samples, StoredForm, append_shape};
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyFloat, PyInt, PyString, PyType};

struct SampleColumn {
    name: Py<PyString>,
    stored: StoredForm,
    /// Bytes of every value, or `None` if they differ.
    width: Option<usize>,
}

/// The samples of a shard that is being written.
#[pyclass(module = "hocket.native._native")]
pub struct SampleBuffer {
    columns: Vec<SampleColumn>,
    /// `numpy.ndarray`.
    array: Py<PyType>,
    pub samples: Samples,
}

#[pymethods]
impl SampleBuffer {
    #[new]
    #[pyo3(signature = (columns, *, capacity_bytes=0))]
    fn new(
        py: Python<'_>,
        columns: Vec<(Py<PyString>, String, Option<usize>)>,
        capacity_bytes: usize,
    ) -> PyResult<Self> {
        let array = py.import("numpy")?.getattr("ndarray")?.cast_into()?;
        let columns = columns
            .into_iter()
            .map(|(name, encoding, width)| SampleColumn {
                name,
                stored: StoredForm::parse(&encoding),
                width,
            });
        Ok(Self {
            columns: columns.collect(),
            array: array.unbind(),
            samples: Samples::with_capacity(capacity_bytes),
        })
    }

    fn push(&mut self, py: Python<'_>, sample: &Bound<'_, PyAny>) -> Option<usize> {
        let sample = sample.cast_exact::<PyDict>().ok()?;
        let (columns, array) = (&self.columns, self.array.bind(py));
        self.samples.push(|out| {
            let mut size_at = out.len();
            let num_sizes = columns
                .iter()
                .filter(|column| column.width.is_none())
                .count();
            out.resize(size_at + 4 * num_sizes, 0);
            for column in columns {
                let start = out.len();
                let value = sample.get_item(column.name.bind(py)).ok()??;
                append(&value, &column.stored, array, out)?;
                let size = out.len() - start;
                match column.width {
                    Some(width) if width != size => return None,
                    Some(_) => {}
                    None => {
                        let size = u32::try_from(size).ok()?.to_le_bytes();
                        out.get_mut(size_at..size_at + 4)?.copy_from_slice(&size);
                        size_at += 4;
                    }
                }
            }
            Some(())
        })
    }

    fn push_bytes(&mut self, encoded: &[u8]) -> usize {
        let added = self.samples.push(|out| {
            out.extend_from_slice(encoded);
            Some(())
        });
        added.unwrap_or_default()
    }

    fn __len__(&self) -> usize {
        self.samples.len()
    }
}

/// Appends a value's bytes; returns none if encoding them takes more than a copy.
fn append(
    value: &Bound<'_, PyAny>,
    stored: &StoredForm,
    array: &Bound<'_, PyType>,
    out: &mut Vec<u8>,
) -> Option<()> {
    if let Ok(bytes) = value.cast::<PyBytes>() {
        stored.is_encoded(bytes.as_bytes()).then_some(())?;
        out.extend_from_slice(bytes.as_bytes());
        return Some(());
    }
    match stored {
        StoredForm::Text => {
            let text = value.cast::<PyString>().ok()?;
            out.extend_from_slice(text.to_str().ok()?.as_bytes());
            Some(())
        }
        StoredForm::Number(number) if number.kind == NumberKind::Float => {
            number.append_float(value.cast_exact::<PyFloat>().ok()?.extract().ok()?, out)
        }
        StoredForm::Number(number) => {
            let value = value.cast_exact::<PyInt>().ok()?;
            match value.extract::<i64>() {
                Ok(value) => number.append_int(value.into(), out),
                Err(_) => number.append_int(value.extract::<u64>().ok()?.into(), out),
            }
        }
        StoredForm::Array { number, shape } => {
            // Other objects have buffers too, but are not arrays.
            value.get_type().is(array).then_some(())?;
            append_array(value, *number, shape.as_deref(), out)
        }
        StoredForm::Bytes | StoredForm::Image | StoredForm::Otherwise => None,
    }
}

fn append_array(
    value: &Bound<'_, PyAny>,
    expected: Option<NumberType>,
    shape: Option<&[usize]>,
    out: &mut Vec<u8>,
) -> Option<()> {
    let buffer = PyUntypedBuffer::get(value).ok()?;
    let number = number(&buffer)?;
    if expected.is_some_and(|expected| expected != number) || !buffer.is_c_contiguous() {
        return None;
    }
    match shape {
        Some(shape) if shape != buffer.shape() => return None,
        Some(_) => {}
        None => {
            out.extend(expected.is_none().then(|| number.id()));
            append_shape(buffer.shape(), out)?;
        }
    }
    // SAFETY: a C-contiguous buffer has `len_bytes` bytes at `buf_ptr`, which stay valid as long as `buffer`
    // lives; the interpreter lock keeps Python from writing to it during the copy.
    let values = unsafe {
        std::slice::from_raw_parts(
            buffer.buf_ptr().cast::<u8>().cast_const(),
            buffer.len_bytes(),
        )
    };
    out.extend_from_slice(values);
    Some(())
}

/// Returns the number type of an array in native byte order.
fn number(buffer: &PyUntypedBuffer) -> Option<NumberType> {
    // The format is a single letter; a foreign byte order would have a prefix.
    let [_] = buffer.format().to_bytes() else {
        return None;
    };
    let (kind, bytes) = match ElementType::from_format(buffer.format()) {
        ElementType::SignedInteger { bytes } => (NumberKind::Signed, bytes),
        ElementType::UnsignedInteger { bytes } => (NumberKind::Unsigned, bytes),
        ElementType::Float { bytes } => (NumberKind::Float, bytes),
        ElementType::Bool | ElementType::Unknown => return None,
    };
    Some(NumberType { kind, bytes })
}
