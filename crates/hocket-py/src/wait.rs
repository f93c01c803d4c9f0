//! Waits for the I/O threads with the interpreter lock released, interruptible by Ctrl-C.

use crate::{credentials, log};
use hocket_store::{Interrupted, StoreError, runtime};
use pyo3::prelude::*;
use std::future::Future;
use std::sync::{Mutex, PoisonError};

/// Runs the periodic work of a waiting thread: Python's signal handlers, lookups of credentials, and the log.
fn look(py: Python<'_>) -> PyResult<()> {
    credentials::attend(py)?;
    log::attend(py)?;
    py.check_signals()
}

/// Runs `act` without the interpreter lock. `act` calls its argument while it waits; a signal handler that raises
/// (as Ctrl-C's does) makes that return true, and its exception is raised here, whatever the outcome of `act`.
/// Python runs handlers only on the main thread; on other threads the wait continues.
pub fn listen<T: Send>(
    py: Python<'_>,
    act: impl FnOnce(Interrupted<'_>) -> T + Send,
) -> PyResult<T> {
    let raised = Mutex::new(None);
    let outcome = py.detach(|| {
        let keep = |error| *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        act(&|| Python::attach(look).map_err(keep).is_err())
    });
    let raised = raised.into_inner().unwrap_or_else(PoisonError::into_inner);
    raised.map_or(Ok(()), Err)?;
    log::attend(py)?;
    Ok(outcome)
}

/// Calls `step`, which waits for a short time, without the interpreter lock until it returns a value. Signal
/// handlers run in between.
pub fn poll<T: Send>(py: Python<'_>, mut step: impl FnMut() -> Option<T> + Send) -> PyResult<T> {
    loop {
        if let Some(value) = py.detach(&mut step) {
            log::attend(py)?;
            return Ok(value);
        }
        look(py)?;
    }
}

/// Runs `future` on the I/O threads and waits for it as [`listen`] does; ended by a signal within 100 ms. `raise`
/// converts the crate's error to a Python exception.
pub fn wait<T, E, F>(py: Python<'_>, future: F, raise: fn(Python<'_>, &E) -> PyErr) -> PyResult<T>
where
    T: Send + 'static,
    E: From<StoreError> + Send + 'static,
    F: Future<Output = Result<T, E>> + Send + 'static,
{
    match listen(py, |interrupted| runtime::wait(future, interrupted))? {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(raise(py, &error)),
        Err(error) => Err(raise(py, &E::from(error))),
    }
}
