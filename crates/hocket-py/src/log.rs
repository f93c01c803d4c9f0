//! The log of the Rust crates, passed on to Python's `logging`.

use hocket_store::log::{self, LogEvent};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

/// Events passed on at a time: a handler of Python's that makes requests may cause others.
const MOST_AT_ONCE: usize = 2000;

/// Keeps events from now on, and adds this module's function to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    log::keep_events();
    module.add_function(wrap_pyfunction!(flush_log, module)?)
}

/// Passes the events that are kept on to `logging`. Cheap if there are none.
///
/// # Errors
/// An exception that is no `Exception`, such as that of Ctrl-C; all others are reported and dropped, since the call
/// at hand has nothing to do with them.
pub fn attend(py: Python<'_>) -> PyResult<()> {
    for _ in 0..MOST_AT_ONCE {
        let Some(event) = log::take_event() else {
            break;
        };
        match write(py, &event) {
            Err(error) if error.is_instance_of::<PyException>(py) => {
                error.write_unraisable(py, None);
            }
            outcome => outcome?,
        }
    }
    Ok(())
}

fn write(py: Python<'_>, event: &LogEvent) -> PyResult<()> {
    let level = match event.level {
        tracing::Level::ERROR => 40,
        tracing::Level::WARN => 30,
        tracing::Level::INFO => 20,
        _ => 10,
    };
    let crate_name = event.target.split("::").next().unwrap_or_default();
    let area = crate_name.strip_prefix("hocket_").unwrap_or(crate_name);
    let logger = py
        .import("logging")?
        .call_method1("getLogger", (format!("hocket.native.{area}"),))?;
    logger.call_method1("log", (level, &event.text))?;
    Ok(())
}

#[pyfunction]
fn flush_log(py: Python<'_>) -> PyResult<()> {
    attend(py)
}
