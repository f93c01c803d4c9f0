//! The retry policy: how often a request is repeated, how long, and the final error message.
//!
//! This is the only layer that retries; the client below makes one request and reports its outcome. Each part
//! of an operation therefore makes at most `max_retries + 1` requests.

use crate::client::StoreClient;
use crate::client::credentials;
use crate::client::http::{LastRequest, observe};
use crate::error::StoreError;
use crate::process::caught::caught;
use crate::remote::failed_attempt::{FailedAttempt, classify, describe, describe_cause};
use crate::values::handle::StoreHandle;
use crate::values::options::seconds;
use std::future::Future;
use std::time::{Duration, Instant};

/// A request that takes this much longer than its bytes on a slow connection is logged.
const SLOW: Duration = Duration::from_secs(2);

/// The object bytes that one request transfers, by direction.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TransferBytes {
    None,
    /// In the response.
    Down(u64),
    /// In the request.
    Up(u64),
}

/// The attempts of one request.
#[derive(Debug)]
pub(crate) struct RetryState<'a> {
    handle: &'a StoreHandle,
    uri: String,
    load: TransferBytes,
    started: Option<Instant>,
    attempts: u32,
    landed: bool,
    /// Whether data has started to flow; only then can a slow connection explain the duration.
    flowed: bool,
    /// Whether the request has already been repeated with renewed keys.
    renewed: bool,
    /// The pause that the last response asked for.
    asked_pause: Option<Duration>,
}

impl<'a> RetryState<'a> {
    /// Prepares the attempts of a request for `key` of the store `handle`.
    pub(crate) fn new(handle: &'a StoreHandle, key: &str, load: TransferBytes) -> Self {
        Self {
            handle,
            uri: handle.object_uri(key),
            load,
            started: None,
            attempts: 0,
            landed: false,
            flowed: false,
            renewed: false,
            asked_pause: None,
        }
    }

    /// Returns whether an earlier attempt may have taken effect although its response was lost.
    pub(crate) fn may_have_landed(&self) -> bool {
        self.landed
    }

    /// Makes one attempt as soon as `remote` has a permit for it, with the request's timeout or the remaining
    /// deadline as the limit, whichever is shorter.
    pub(crate) async fn attempt<T>(
        &mut self,
        remote: &StoreClient,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, FailedAttempt> {
        let _room = remote.room().await;
        // The clock starts after the wait for a permit, which is not the store's delay.
        let elapsed = self.started.get_or_insert_with(Instant::now).elapsed();
        let up = match self.load {
            TransferBytes::Up(bytes) => bytes,
            TransferBytes::None | TransferBytes::Down(_) => 0,
        };
        let options = self.handle.options();
        let left = options
            .deadline(up)
            .max(self.deadline())
            .saturating_sub(elapsed);
        let first = options.timeout(up).min(left);
        let ends = elapsed + first;
        self.attempts += 1;
        let is_again = self.attempts > 1;
        remote.count(self.handle, |counters| counters.request(up, is_again));
        let began = Instant::now();
        let (outcome, seen) = observe(first, |seen| self.rest(ends, seen), caught(request)).await;
        self.asked_pause = seen.pause;
        let fault = match outcome {
            Ok(Ok(Ok(value))) => {
                self.note_if_slow(began.elapsed(), &seen);
                return Ok(value);
            }
            Ok(Err(panic)) => FailedAttempt::Final(self.unusable(&panic)),
            Ok(Ok(Err(error))) if self.finds_other_keys(&error, &seen, remote, began) => {
                FailedAttempt::Again {
                    reason: describe(&error, &seen),
                    landed: false,
                }
            }
            Ok(Ok(Err(error))) => classify(&self.uri, &error, &seen, remote),
            Err(_) => FailedAttempt::Again {
                reason: format!(
                    "no complete answer within {:.1} s",
                    began.elapsed().as_secs_f64()
                ),
                landed: true,
            },
        };
        self.landed |= matches!(fault, FailedAttempt::Again { landed: true, .. });
        let flows = match seen.status {
            Some(status) => (200..300).contains(&status),
            None => up > 0 && seen.sent,
        };
        if flows {
            self.load = self.load_of(&seen);
            self.flowed = true;
        }
        Err(fault)
    }

    /// Returns the error of a request that the client cannot make. It panics on settings that fit into no request.
    fn unusable(&self, panic: &str) -> StoreError {
        let names = (self.handle.env().iter()).map(|(name, _)| format!("`{name}`"));
        let names = names.collect::<Vec<_>>().join(", ");
        StoreError::config(format!(
            "`{}`: no request can be made with the settings of the store: {panic}. Check the options, the variables \
             ({names}) and the files that they name",
            self.uri
        ))
    }

    /// Logs a request that took longer than usual.
    fn note_if_slow(&self, took: Duration, seen: &LastRequest) {
        let bytes = match self.load_of(seen) {
            TransferBytes::Down(bytes) | TransferBytes::Up(bytes) => bytes,
            TransferBytes::None => 0,
        };
        if took > SLOW + Duration::from_secs_f64(seconds(bytes)) {
            tracing::info!(
                "`{}`: a request for {bytes} bytes took {:.1} s",
                self.uri,
                took.as_secs_f64()
            );
        }
    }

    /// Returns the bytes to transfer, updated with the response's length from the first response on.
    fn load_of(&self, seen: &LastRequest) -> TransferBytes {
        match (self.load, seen.bytes) {
            (TransferBytes::Down(asked), Some(bytes)) if !self.flowed => {
                TransferBytes::Down(asked.min(bytes))
            }
            (load, _) => load,
        }
    }

    /// Returns how long a response that has begun may take after `ends`, the limit for its beginning.
    fn rest(&self, ends: Duration, seen: &LastRequest) -> Duration {
        let TransferBytes::Down(bytes) = self.load_of(seen) else {
            return Duration::ZERO;
        };
        let left = self.handle.options().deadline(bytes).saturating_sub(ends);
        Duration::from_secs_f64(seconds(bytes)).min(left)
    }

    /// Returns whether the store rejected the keys as expired and new ones are available or on their way; at
    /// most once per request.
    fn finds_other_keys(
        &mut self,
        error: &object_store::Error,
        seen: &LastRequest,
        remote: &StoreClient,
        began: Instant,
    ) -> bool {
        let message = describe_cause(error, seen);
        // The response to a HEAD has no body, only the status 400.
        let is_expired = message == "HTTP 400"
            || ["ExpiredToken", "TokenRefreshRequired"]
                .iter()
                .any(|code| message.contains(code));
        match &remote.profile {
            Some(profile) if is_expired && !self.renewed => {
                self.renewed = true;
                credentials::are_others_coming(profile, began)
            }
            _ => false,
        }
    }

    /// Waits before the next attempt, or returns the final error if there is none.
    pub(crate) async fn pause(&mut self, fault: FailedAttempt) -> Result<(), StoreError> {
        let reason = match fault {
            FailedAttempt::Final(error) => return Err(error),
            FailedAttempt::Precondition => {
                return Err(StoreError::io(
                    &self.uri,
                    "the store answered HTTP 412 to a request without a condition",
                ));
            }
            FailedAttempt::Range(reason) => return Err(StoreError::io(&self.uri, reason)),
            FailedAttempt::Again { reason, .. } => reason,
        };
        // Clients that were told the same pause spread over the time of the usual one after it.
        let pause = self.asked_pause.unwrap_or_default() + self.backoff();
        let is_late = self.elapsed() + pause >= self.deadline();
        if let Some(asked) = self.asked_pause.filter(|_| is_late) {
            return Err(self.give_up(format!(
                "{reason}; the server asks for a pause of {} s, which ends beyond the limit of {} s for all attempts: try \
                 again after it, or raise the limit (`deadline_s`; `download_timeout` of a data set)",
                asked.as_secs(),
                self.deadline().as_secs()
            )));
        }
        if is_late || self.attempts as usize > self.handle.options().max_retries {
            return Err(self.give_up(reason));
        }
        tracing::info!(
            "`{}`: attempt {} failed: {reason}; the next follows in {:.2} s",
            self.uri,
            self.attempts,
            pause.as_secs_f64()
        );
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// Builds the error of an operation that stops retrying here.
    pub(crate) fn give_up(&self, reason: impl Into<String>) -> StoreError {
        StoreError::Transient {
            uri: self.uri.clone(),
            attempts: self.attempts,
            elapsed: self.elapsed(),
            reason: reason.into(),
        }
    }

    fn elapsed(&self) -> Duration {
        self.started
            .map_or(Duration::ZERO, |started| started.elapsed())
    }

    /// Returns the time limit of all attempts together.
    fn deadline(&self) -> Duration {
        let bytes = match self.load {
            TransferBytes::Down(bytes) | TransferBytes::Up(bytes) if self.flowed => bytes,
            _ => 0,
        };
        self.handle.options().deadline(bytes)
    }

    /// Returns the pause: it doubles from the shortest to the longest, and half of it is random, so that
    /// clients that failed together do not retry together.
    fn backoff(&self) -> Duration {
        let (low, high) = self.handle.options().backoff_ms;
        let doublings = self.attempts.saturating_sub(1).min(32);
        let whole = low.saturating_mul(1 << doublings).min(high);
        Duration::from_micros(whole * 500 + fastrand::u64(0..=whole * 500))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use crate::values::options::StoreOptions;

    fn seen(status: u16) -> LastRequest {
        LastRequest {
            status: Some(status),
            sent: true,
            ..LastRequest::default()
        }
    }

    #[test]
    fn the_deadline_grows_with_the_bytes_only_once_bytes_flow() {
        let options = StoreOptions {
            deadline_s: 3.0,
            ..StoreOptions::default()
        };
        let handle = StoreHandle::open("s3://b", options).unwrap();
        let mut tries = RetryState::new(&handle, "k", TransferBytes::Down(8 << 20));
        assert_eq!(tries.deadline().as_secs(), 3);
        tries.flowed = true;
        assert_eq!(tries.deadline().as_secs(), 11);
    }

    #[test]
    fn a_started_response_gets_time_for_its_own_bytes_only() {
        let options = StoreOptions {
            deadline_s: 3.0,
            ..StoreOptions::default()
        };
        let handle = StoreHandle::open("http://h", options).unwrap();
        let mut tries = RetryState::new(&handle, "k", TransferBytes::Down(8 << 20));
        let answer = |bytes| LastRequest { bytes, ..seen(206) };
        let rest = |tries: &RetryState<'_>, ends: u64, bytes| {
            let rest = tries.rest(Duration::from_secs(ends), &answer(bytes));
            rest.as_secs_f64()
        };
        for (ends, bytes, expected) in [
            (3, None, 8.0),
            (3, Some(1 << 19), 0.5),
            (3, Some(1 << 40), 8.0),
            (1, Some(1 << 20), 1.0),
        ] {
            assert_eq!(rest(&tries, ends, bytes), expected, "{ends} {bytes:?}");
        }
        // A later response carries only the missing bytes; the deadline stays that of the whole object.
        tries.load = tries.load_of(&answer(Some(4 << 20)));
        tries.flowed = true;
        assert_eq!(rest(&tries, 5, Some(1 << 20)), 2.0);
        assert_eq!(rest(&tries, 7, Some(1 << 20)), 0.0);
    }

    #[test]
    fn pauses_double_with_jitter_up_to_the_maximum() {
        let options = StoreOptions {
            backoff_ms: (100, 1_000),
            ..StoreOptions::default()
        };
        let handle = StoreHandle::open("s3://b", options).unwrap();
        let mut tries = RetryState::new(&handle, "k", TransferBytes::None);
        for (attempts, whole) in [(1, 100), (2, 200), (3, 400), (5, 1_000), (60, 1_000)] {
            tries.attempts = attempts;
            let pauses: Vec<u128> = (0..50).map(|_| tries.backoff().as_millis()).collect();
            assert!(
                pauses
                    .iter()
                    .all(|pause| (whole / 2..=whole).contains(pause)),
                "{pauses:?}"
            );
            assert!(pauses.iter().any(|pause| *pause != pauses[0]));
        }
    }
}
