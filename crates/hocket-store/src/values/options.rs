//! Connection, retry and limit options of a store.

use crate::error::{Result, StoreError};
use crate::values::settings::{check_endpoint, check_region};
use std::time::Duration;

/// The options of a [`Store`](crate::Store). They hold plain values, so they can be sent to other processes
/// with the URI.
#[derive(Debug, Clone, PartialEq)]
pub struct StoreOptions {
    /// Endpoint of the service. `None`: the environment's (`AWS_ENDPOINT_URL_S3`, `STORAGE_EMULATOR_HOST`, …),
    /// then the service's default.
    pub endpoint: Option<String>,
    /// Region (S3 and OCI); `None`: the environment's or the profile's, then `us-east-1`.
    pub region: Option<String>,
    /// Whether the bucket is in the path of an S3 URL instead of in its host name. `None`: in the path, except
    /// on AWS itself.
    pub path_style: Option<bool>,
    /// Whether requests are unsigned, for public buckets. Equivalent to `AWS_SKIP_SIGNATURE` and its
    /// counterparts.
    pub anonymous: bool,
    /// Whether the requester pays for requests to an S3 bucket.
    pub requester_pays: bool,
    /// Bytes of one ranged GET when an object is larger than that.
    pub part_bytes: u64,
    /// Concurrent requests of this process on this bucket with these options, over all operations.
    pub max_requests: usize,
    /// Limit of bytes in flight in this process over all stores; no transfer starts beyond it.
    pub budget_bytes: u64,
    /// Seconds until a response begins, plus one second for each MiB that the request carries. The body gets
    /// one more second for each MiB.
    pub timeout_s: f64,
    /// Seconds for all attempts of one request together, plus one second for each MiB once data has started to
    /// flow.
    pub deadline_s: f64,
    /// Attempts after the first.
    pub max_retries: usize,
    /// Shortest and longest pause before a retry, in milliseconds; the pause doubles in between.
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
    /// Checks that every value is usable.
    ///
    /// # Errors
    /// [`StoreError::Config`], naming the field, its value and the bound that it violates.
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
        if let Some(endpoint) = &self.endpoint {
            check_endpoint("endpoint", endpoint)?;
        }
        if let Some(region) = &self.region {
            check_region("region", region)?;
        }
        Ok(())
    }

    /// Returns the time limit until the response to a request of `bytes` begins; it grows with the size, so
    /// that a slow connection is not taken for a dead one.
    pub(crate) fn timeout(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(self.timeout_s + seconds(bytes))
    }

    /// Returns the time limit of all attempts of one request that transfers `bytes`.
    pub(crate) fn deadline(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(self.deadline_s + seconds(bytes))
    }

    /// Returns the connection timeout. It is short, because latency to a store is never that high.
    pub(crate) fn connect_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_s.min(5.0))
    }
}

/// Returns the seconds that `bytes` may take on a slow connection.
pub(crate) fn seconds(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
