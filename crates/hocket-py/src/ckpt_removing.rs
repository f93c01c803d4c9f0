//! Python bindings for the removal of checkpoints and of the garbage of unfinished saves.

use std::time::Duration;

use hocket_ckpt::{CheckpointPlace, GarbageFile, LeftoverKind};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::ckpt::call;

/// Adds this module's functions to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(ckpt_delete, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_delete_files, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_gc, module)?)?;
    Ok(())
}

#[pyfunction]
#[pyo3(signature = (uri, name, *, save_id = None, dry_run = false))]
fn ckpt_delete(
    py: Python<'_>,
    uri: &str,
    name: &str,
    save_id: Option<&str>,
    dry_run: bool,
) -> PyResult<()> {
    call(py, |interrupted| {
        let place = CheckpointPlace::open(uri)?;
        hocket_ckpt::delete(&place, name, save_id, dry_run, interrupted)
    })
}

#[pyfunction]
fn ckpt_delete_files(py: Python<'_>, uri: &str, paths: Vec<String>) -> PyResult<()> {
    call(py, |interrupted| {
        hocket_ckpt::delete_files(&CheckpointPlace::open(uri)?, &paths, interrupted)
    })
}

#[pyfunction]
#[pyo3(signature = (uri, *, min_age_s, dry_run = false))]
fn ckpt_gc<'py>(
    py: Python<'py>,
    uri: &str,
    min_age_s: f64,
    dry_run: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let Ok(min_age) = Duration::try_from_secs_f64(min_age_s) else {
        return Err(PyValueError::new_err(format!(
            "`min_age_s` is {min_age_s}; expected a number of seconds of at least 0"
        )));
    };
    let collected = call(py, |interrupted| {
        hocket_ckpt::gc(&CheckpointPlace::open(uri)?, min_age, dry_run, interrupted)
    })?;
    let garbage = collected
        .garbage
        .into_iter()
        .map(|one| garbage_to_dict(py, one))
        .collect::<PyResult<Vec<_>>>()?;
    let dict = PyDict::new(py);
    dict.set_item("garbage", garbage)?;
    dict.set_item("skipped", collected.skipped)?;
    Ok(dict)
}

fn garbage_to_dict(py: Python<'_>, garbage: GarbageFile) -> PyResult<Bound<'_, PyDict>> {
    let waste = match garbage.waste {
        LeftoverKind::File => "file",
        LeftoverKind::Upload => "upload",
        LeftoverKind::Manifest => "manifest",
        LeftoverKind::Probe => "probe",
        LeftoverKind::Unfinished => "unfinished",
    };
    let dict = PyDict::new(py);
    dict.set_item("name", garbage.name)?;
    dict.set_item("path", garbage.path)?;
    dict.set_item("waste", waste)?;
    dict.set_item("bytes", garbage.bytes)?;
    dict.set_item("age_s", garbage.age.as_secs_f64())?;
    Ok(dict)
}
