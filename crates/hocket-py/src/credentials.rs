//! Python bindings for credentials: stores request keys, and a Python thread looks them up.

use crate::errors::store_error;
use hocket_store::credentials::{self, AwsKeys, NoKeysReason};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::time::{Duration, SystemTime};

/// Adds this module's functions to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    credentials::attend();
    module.add_function(wrap_pyfunction!(credentials_claim, module)?)?;
    module.add_function(wrap_pyfunction!(credentials_used, module)?)?;
    module.add_function(wrap_pyfunction!(credentials_rest, module)?)?;
    module.add_function(wrap_pyfunction!(credentials_provide, module)?)?;
    module.add_function(wrap_pyfunction!(credentials_fail, module)?)
}

/// Starts a lookup in `hocket.native.credentials` for profiles that requests wait for. Cheap if there are none.
pub fn attend(py: Python<'_>) -> PyResult<()> {
    for profile in credentials::wanted() {
        py.import("hocket.native.credentials")?
            .call_method1("provide", (profile,))?;
    }
    Ok(())
}

#[pyfunction]
fn credentials_claim(profile: &str) -> bool {
    credentials::claim(profile)
}

#[pyfunction]
fn credentials_used(profile: &str) -> bool {
    credentials::is_used(profile)
}

#[pyfunction]
fn credentials_rest(py: Python<'_>, profile: &str, pause_s: f64) -> PyResult<bool> {
    let pause = Duration::try_from_secs_f64(pause_s).map_err(|_| {
        PyValueError::new_err(format!(
            "`pause_s` is {pause_s}; expected a number of seconds of at least 0"
        ))
    })?;
    py.detach(|| credentials::is_sought_within(profile, pause))
        .map_err(|error| store_error(py, &error))
}

#[pyfunction]
#[pyo3(signature = (profile, *, key_id, secret_key, token, expires_s))]
fn credentials_provide(
    profile: &str,
    key_id: String,
    secret_key: String,
    token: Option<String>,
    expires_s: Option<f64>,
) -> PyResult<()> {
    let moment = |seconds: f64| {
        let since = Duration::try_from_secs_f64(seconds).ok()?;
        SystemTime::UNIX_EPOCH.checked_add(since)
    };
    let expires = match expires_s {
        None => None,
        Some(seconds) => Some(moment(seconds).ok_or_else(|| {
            PyValueError::new_err(format!(
                "`expires_s` is {seconds}; expected seconds since 1970"
            ))
        })?),
    };
    let keys = AwsKeys {
        key_id,
        secret_key,
        token,
        expires,
    };
    credentials::provide(profile, keys);
    Ok(())
}

#[pyfunction]
#[pyo3(signature = (profile, reason, *, is_provider_missing = false))]
fn credentials_fail(profile: &str, reason: String, is_provider_missing: bool) {
    let missing = NoKeysReason {
        reason,
        is_provider_missing,
    };
    credentials::fail(profile, missing);
}
