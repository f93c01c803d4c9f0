//! hocket-ckpt as Python sees it.

use pyo3::prelude::*;

/// Adds this module's functions and classes to the extension.
pub fn register(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
