//! Waiting for the I/O threads with the interpreter lock released, and with an ear for Ctrl-C.

use crate::credentials;
use hocket_store::{StoreError, runtime};
use pyo3::prelude::*;
use std::cell::RefCell;
use std::future::Future;

/// What a thread that waits does now and then: it runs Python's signal handlers, and gets credentials searched for.
pub fn look(py: Python<'_>) -> PyResult<()> {
    credentials::attend(py)?;
    py.check_signals()
}

/// Runs `future` on the I/O threads and waits for it without the interpreter lock. A signal handler that raises
/// (Ctrl-C's does) ends the wait within 100 ms, with the exception that it raised; on other threads than the main
/// one Python runs no handlers, and the wait goes on. `raise` turns the crate's error into Python's.
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
