//! Waits for the I/O threads with the interpreter lock released, interruptible by Ctrl-C.

use crate::credentials;
use hocket_store::{StoreError, runtime};
use pyo3::prelude::*;
use std::cell::RefCell;
use std::future::Future;

/// Runs the periodic work of a waiting thread: Python's signal handlers, and lookups of credentials.
pub fn look(py: Python<'_>) -> PyResult<()> {
    credentials::attend(py)?;
    py.check_signals()
}

/// Runs `future` on the I/O threads and waits for it without the interpreter lock. A signal handler that raises
/// (as Ctrl-C's does) ends the wait within 100 ms with its exception. Python runs handlers only on the main
/// thread; on other threads the wait continues. `raise` converts the crate's error to a Python exception.
pub fn wait<T, E, F>(py: Python<'_>, future: F, raise: fn(Python<'_>, &E) -> PyErr) -> PyResult<T>
where
    T: Send + 'static,
    E: From<StoreError> + Send + 'static,
    F: Future<Output = Result<T, E>> + Send + 'static,
{
    let (outcome, signal) = py.detach(|| {
        let signal = RefCell::new(None);
        let interrupted = || {
            *signal.borrow_mut() = Python::attach(look).err();
            signal.borrow().is_some()
        };
        let outcome = runtime::wait(future, &interrupted);
        (outcome, signal.into_inner())
    });
    match (outcome, signal) {
        (_, Some(signal)) => Err(signal),
        (Ok(Ok(value)), None) => Ok(value),
        (Ok(Err(error)), None) => Err(raise(py, &error)),
        (Err(error), None) => Err(raise(py, &E::from(error))),
    }
}
