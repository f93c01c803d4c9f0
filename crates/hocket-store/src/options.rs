//! How a store is reached and how hard it is tried.

use crate::error::{Result, StoreError};
use std::time::Duration;

/// Options of a [`Store`](crate::Store). Plain numbers: they travel with the URI to other processes.
#[derive(Debug, Clone, PartialEq)]
pub struct StoreOptions {
    /// Address of the service; `None`: the environment's (`AWS_ENDPOINT_URL_S3`, `STORAGE_EMULATOR_HOST`, …), then
    /// the service's own.
    pub endpoint: Option<String>,
    /// Region (S3 and OCI); `None`: the environment's or the profile's, then `us-east-1`.
    pub region: Option<String>,
    /// Whether the bucket stands in the path of an S3 address (else in its host name); `None`: in the path, except on
    /// AWS itself.
    pub path_style: Option<bool>,
    /// Requests are not signed: for public buckets. `AWS_SKIP_SIGNATURE` and its like say the same.
    pub anonymous: bool,
    /// The requester of an S3 bucket pays.
    pub requester_pays: bool,
    /// Bytes of one ranged GET of a larger object.
    pub part_bytes: u64,
    /// Requests in flight at once, over all verbs of this process on this bucket with these options.
    pub max_requests: usize,
    /// No transfer starts while the process has this many bytes in flight, over all stores.
    pub budget_bytes: u64,
    /// Seconds until an answer begins, plus a second for each MiB that the request carries; the answer's own bytes
    /// get a second for each MiB more.
    pub timeout_s: f64,
    /// Seconds that all tries of one request may take together, plus a second for each MiB once bytes
    /// were on their way.
    pub deadline_s: f64,
    /// Tries after the first one.
    pub max_retries: usize,
    /// Shortest and longest pause before a retry, in milliseconds; the pause doubles between them.
    pub backoff_ms: (u64, u64),
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            endpoint: None,
            region: None,
            path_style: None,
            anonymous: false,
            requester_pays: false,
            part_bytes: 8 << 20,
            max_requests: 16,
            budget_bytes: 256 << 20,
            timeout_s: 30.0,
            deadline_s: 120.0,
            max_retries: 10,
            backoff_ms: (100, 10_000),
        }
    }
}

impl StoreOptions {
    /// Refuses values that no transfer can work with.
    ///
    /// # Errors
    /// [`StoreError::Config`], naming the field, its value and the least or greatest that works.
    pub fn validate(&self) -> Result<()> {
        let at_least = |name: &str, value: u64, least: u64| {
            (value >= least).then_some(()).ok_or_else(|| {
                StoreError::config(format!("`{name}` is {value}; it must be at least {least}"))
            })
        };
        at_least("part_bytes", self.part_bytes, 4096)?;
        at_least("max_requests", self.max_requests as u64, 1)?;
        at_least("budget_bytes", self.budget_bytes, 1 << 20)?;
        for (name, value) in [
            ("timeout_s", self.timeout_s),
            ("deadline_s", self.deadline_s),
        ] {
            if !(value > 0.0 && value <= 1e6) {
                return Err(StoreError::config(format!(
                    "`{name}` is {value}; it must be above 0 and at most 1e6 seconds"
                )));
            }
        }
        let (low, high) = self.backoff_ms;
        if low > high {
            return Err(StoreError::config(format!(
                "`backoff_ms` is ({low}, {high}); the first must not exceed the second"
            )));
        }
        if let Some(endpoint) = &self.endpoint
            && !(endpoint.starts_with("http://") || endpoint.starts_with("https://"))
        {
            return Err(StoreError::config(format!(
                "`endpoint` is `{endpoint}`; it must start with `http://` or `https://`"
            )));
        }
        Ok(())
    }

    /// Seconds until the answer to a request that carries `bytes`: a slow line is not a dead one.
    pub(crate) fn timeout(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(self.timeout_s + seconds(bytes))
    }

    /// Seconds for all tries of one request that moves `bytes`.
    pub(crate) fn deadline(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(self.deadline_s + seconds(bytes))
    }

    /// Seconds to connect: no store is that far away.
    pub(crate) fn connect_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_s.min(5.0))
    }
}

/// What `bytes` may take on a slow line.
pub(crate) fn seconds(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
