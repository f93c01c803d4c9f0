//! AWS keys that are looked up and renewed outside this crate: by Python's boto3, on a provider thread.
//!
//! Keys in the environment bypass this module. Without them, a request registers its profile as *wanted* and
//! waits here. The provider thread polls [`wanted`] and *claims* the profile; from then on it supplies keys,
//! renews them before they expire for as long as requests use them, or reports why there are none. A store may
//! reject keys as expired before their stated time: clocks differ, and for the keys of an instance role boto3
//! reports a later expiry than the true one. Keys without a stated expiry may have been rotated in their file.
//! The provider then looks up new keys at once, and the request is repeated once. All of this state lives in the
//! process table, so a forked child starts without wanted or claimed profiles.

use crate::error::StoreError;
use crate::process::{runtime, table};
use crate::values::settings::check_text;
use object_store::aws::AwsCredential;
use object_store::{CredentialProvider, Error};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;

/// The time limit of a request's wait for a lookup of keys.
const PATIENCE: Duration = Duration::from_secs(25);

/// Keys that expire within this time are not used for a new request.
const MARGIN: Duration = Duration::from_millis(250);

/// Whether a provider polls [`wanted`].
static IS_ATTENDED: AtomicBool = AtomicBool::new(false);

/// The profiles of this process by name; the empty name is boto3's default chain.
type Profiles = HashMap<String, AwsProfile>;

/// The state of a profile that was requested.
struct AwsProfile {
    /// Whether requests have used the keys since the last [`is_used`].
    is_used: bool,
    /// Whether a provider has claimed the profile and renews its keys.
    is_served: bool,
    keys: watch::Sender<KeyState>,
}

#[derive(Clone)]
enum KeyState {
    Wanted,
    Sought,
    Known {
        keys: Arc<AwsCredential>,
        expires: Option<SystemTime>,
        since: Instant,
    },
    Failed(NoKeysReason),
}

/// The reason why there are no keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoKeysReason {
    /// The reason, for a message.
    pub reason: String,
    /// Whether the library that looks up keys is not installed, so that only the client's own sources are left.
    pub is_provider_missing: bool,
}

impl From<String> for NoKeysReason {
    fn from(reason: String) -> Self {
        Self {
            reason,
            is_provider_missing: false,
        }
    }
}

/// The keys of one profile.
pub struct AwsKeys {
    /// The access key id.
    pub key_id: String,
    /// The secret access key.
    pub secret_key: String,
    /// The session token of temporary keys.
    pub token: Option<String>,
    /// The time at which the keys expire.
    pub expires: Option<SystemTime>,
}

/// Declares that a provider polls [`wanted`]. Without this call, requests that need keys fail at once.
pub fn attend() {
    IS_ATTENDED.store(true, Ordering::Relaxed);
}

/// Returns the profiles that requests wait for and that no provider has claimed.
pub fn wanted() -> Vec<String> {
    table::with(|profiles: &mut Profiles| {
        let is_wanted = |(_, profile): &(&String, &AwsProfile)| {
            matches!(*profile.keys.borrow(), KeyState::Wanted)
        };
        let wanted = profiles.iter().filter(is_wanted);
        wanted.map(|(name, _)| name.clone()).collect()
    })
}

/// Claims a wanted `profile` for the caller, who must then provide its keys. Returns false if it is already
/// claimed.
pub fn claim(profile: &str) -> bool {
    table::with(|profiles: &mut Profiles| {
        let Some(known) = profiles.get_mut(profile) else {
            return false;
        };
        let is_wanted = matches!(*known.keys.borrow(), KeyState::Wanted);
        if is_wanted {
            known.is_served = true;
            known.keys.send_replace(KeyState::Sought);
        }
        is_wanted
    })
}

/// Returns whether requests have used the keys of `profile` since the last call, or are waiting for new ones.
/// If not, the claim ends: a request that later finds expired keys marks the profile as wanted again.
pub fn is_used(profile: &str) -> bool {
    table::with(|profiles: &mut Profiles| {
        let Some(known) = profiles.get_mut(profile) else {
            return false;
        };
        let is_sought = matches!(*known.keys.borrow(), KeyState::Sought);
        known.is_served = std::mem::take(&mut known.is_used) || is_sought;
        known.is_served
    })
}

/// Sets the keys of `profile` for all requests that start from now on.
pub fn provide(profile: &str, keys: AwsKeys) {
    let texts = [
        ("aws_access_key_id", &keys.key_id),
        ("aws_secret_access_key", &keys.secret_key),
    ];
    let token = keys.token.iter().map(|token| ("aws_session_token", token));
    for (name, text) in texts.into_iter().chain(token) {
        if let Err(error) = check_text(name, text) {
            return fail(profile, error.to_string().into());
        }
    }
    let expires = keys.expires;
    let keys = AwsCredential {
        key_id: keys.key_id,
        secret_key: keys.secret_key,
        token: keys.token,
    };
    table::with(|profiles: &mut Profiles| {
        if let Some(known) = profiles.get_mut(profile) {
            // Keys without an expiry are not renewed by the provider, which ends its claim.
            known.is_served = expires.is_some();
            known.keys.send_replace(KeyState::Known {
                keys: Arc::new(keys),
                expires,
                since: Instant::now(),
            });
        }
    });
}

/// Blocks for `pause`, or until a request needs other keys because the store rejected the given ones; returns
/// true in the second case. The provider calls it between two lookups.
///
/// # Errors
/// `Io` if the process's I/O threads cannot be started.
pub fn is_sought_within(profile: &str, pause: Duration) -> Result<bool, StoreError> {
    let keys = table::with(|profiles: &mut Profiles| Some(profiles.get(profile)?.keys.subscribe()));
    let Some(mut keys) = keys else {
        return Ok(false);
    };
    let sought = async move {
        keys.wait_for(|state| matches!(state, KeyState::Sought))
            .await
            .is_ok()
    };
    let waiting = async move { tokio::time::timeout(pause, sought).await };
    Ok(runtime::current()?.block_on(waiting).unwrap_or(false))
}

/// Reports why there are no keys for `profile`. The next request marks the profile as wanted again.
pub fn fail(profile: &str, missing: NoKeysReason) {
    table::with(|profiles: &mut Profiles| {
        if let Some(known) = profiles.get_mut(profile) {
            known.is_served = false;
            known.keys.send_replace(KeyState::Failed(missing));
        }
    });
}

/// Requests keys for `profile` and waits until valid ones arrive or the lookup fails.
pub(crate) async fn keys(profile: &str) -> Result<Arc<AwsCredential>, NoKeysReason> {
    if !IS_ATTENDED.load(Ordering::Relaxed) {
        let reason = "no thread fetches credentials in this process".to_owned();
        return Err(reason.into());
    }
    let mut keys = want(profile);
    let wait = async {
        loop {
            let state = keys.borrow_and_update().clone();
            match state {
                KeyState::Known { keys, expires, .. } if is_good(expires) => return Ok(keys),
                KeyState::Failed(missing) => return Err(missing),
                _ => {}
            }
            if keys.changed().await.is_err() {
                return Err("the thread that fetches credentials has ended"
                    .to_owned()
                    .into());
            }
        }
    };
    let waited_s = PATIENCE.as_secs();
    let late = |_| Err(format!("no valid keys were found within {waited_s} s").into());
    tokio::time::timeout(PATIENCE, wait)
        .await
        .unwrap_or_else(late)
}

/// Returns whether a repeated request will get keys of a new lookup, for a request that started at `began` and
/// was rejected with expired keys. Drops the current keys if they are the rejected ones.
pub(crate) fn are_others_coming(profile: &str, began: Instant) -> bool {
    table::with(|profiles: &mut Profiles| {
        let Some(known) = profiles.get_mut(profile) else {
            return false;
        };
        let is_newest = match &*known.keys.borrow() {
            KeyState::Known { since, .. } if *since > began => false,
            KeyState::Failed(_) => return false,
            KeyState::Known { .. } => true,
            KeyState::Wanted | KeyState::Sought => false,
        };
        if is_newest {
            let next = if known.is_served {
                KeyState::Sought
            } else {
                KeyState::Wanted
            };
            known.keys.send_replace(next);
        }
        true
    })
}

fn want(profile: &str) -> watch::Receiver<KeyState> {
    table::with(|profiles: &mut Profiles| {
        let known = profiles.entry(profile.to_owned());
        let known = known.or_insert_with(|| AwsProfile {
            is_used: false,
            is_served: false,
            keys: watch::Sender::new(KeyState::Wanted),
        });
        known.is_used = true;
        let is_over = match &*known.keys.borrow() {
            KeyState::Failed(_) => true,
            KeyState::Known { expires, .. } => !known.is_served && !is_good(*expires),
            KeyState::Wanted | KeyState::Sought => false,
        };
        if is_over {
            known.keys.send_replace(KeyState::Wanted);
        }
        known.keys.subscribe()
    })
}

/// A credential provider that returns the current keys of one profile.
#[derive(Debug)]
pub(crate) struct KeyProvider {
    pub(crate) profile: String,
}

#[async_trait::async_trait]
impl CredentialProvider for KeyProvider {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let missing = |missing: NoKeysReason| Error::Unauthenticated {
            path: String::new(),
            source: missing.reason.into(),
        };
        keys(&self.profile).await.map_err(missing)
    }
}

fn is_good(expires: Option<SystemTime>) -> bool {
    expires.is_none_or(|expires| expires > SystemTime::now() + MARGIN)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use std::sync::Once;

    /// Calls [`attend`]. The process stays attended, so the first call checks the refusal before it.
    fn attend_first() {
        static FIRST: Once = Once::new();
        FIRST.call_once(|| {
            let refused = futures::FutureExt::now_or_never(keys("unattended")).unwrap();
            assert!(refused.unwrap_err().reason.contains("no thread fetches"));
            attend();
        });
    }

    fn some(name: &str, life: Duration) -> AwsKeys {
        AwsKeys {
            key_id: name.into(),
            secret_key: "s".into(),
            token: None,
            expires: Some(SystemTime::now() + life),
        }
    }

    async fn until_wanted(profile: &str) {
        while !wanted().iter().any(|name| name == profile) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_request_waits_for_valid_keys_and_gets_the_newest() {
        attend_first();
        let waiting = tokio::spawn(keys("newest"));
        until_wanted("newest").await;
        assert!(claim("newest") && !claim("newest"));
        provide("newest", some("stale", Duration::ZERO));
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!waiting.is_finished());
        provide("newest", some("fresh", Duration::from_secs(60)));
        assert_eq!(waiting.await.unwrap().unwrap().key_id, "fresh");
        assert_eq!(keys("newest").await.unwrap().key_id, "fresh");
    }

    #[tokio::test]
    async fn unused_keys_are_not_renewed_until_the_next_request() {
        attend_first();
        let waiting = tokio::spawn(keys("idle"));
        until_wanted("idle").await;
        assert!(claim("idle"));
        provide("idle", some("first", MARGIN + Duration::from_millis(50)));
        waiting.await.unwrap().unwrap();
        assert!(is_used("idle") && !is_used("idle"));
        tokio::time::sleep(Duration::from_millis(60)).await;
        assert!(!claim("idle"), "nobody waits");
        let waiting = tokio::spawn(keys("idle"));
        until_wanted("idle").await;
        assert!(claim("idle"));
        provide("idle", some("second", Duration::from_secs(9)));
        assert_eq!(waiting.await.unwrap().unwrap().key_id, "second");
    }

    #[tokio::test]
    async fn keys_that_a_store_rejects_as_expired_are_renewed_at_once() {
        attend_first();
        let waiting = tokio::spawn(keys("expired"));
        until_wanted("expired").await;
        assert!(claim("expired"));
        provide("expired", some("first", Duration::from_secs(900)));
        waiting.await.unwrap().unwrap();
        let began = Instant::now();
        let resting = std::thread::spawn(|| is_sought_within("expired", Duration::from_secs(60)));
        assert!(are_others_coming("expired", began));
        assert!(resting.join().unwrap().unwrap());
        let waiting = tokio::spawn(keys("expired"));
        provide("expired", some("second", Duration::from_secs(900)));
        assert_eq!(waiting.await.unwrap().unwrap().key_id, "second");
        assert!(are_others_coming("expired", began), "they are there");
        assert_eq!(keys("expired").await.unwrap().key_id, "second");
    }

    #[tokio::test]
    async fn keys_without_an_expiry_are_renewed_when_a_store_rejects_them() {
        attend_first();
        let waiting = tokio::spawn(keys("rotated"));
        until_wanted("rotated").await;
        assert!(claim("rotated"));
        let lasting = |name| AwsKeys {
            expires: None,
            ..some(name, Duration::ZERO)
        };
        provide("rotated", lasting("first"));
        assert_eq!(waiting.await.unwrap().unwrap().key_id, "first");
        assert!(are_others_coming("rotated", Instant::now()));
        let waiting = tokio::spawn(keys("rotated"));
        until_wanted("rotated").await;
        assert!(claim("rotated"), "its provider has ended");
        provide("rotated", lasting("second"));
        assert_eq!(waiting.await.unwrap().unwrap().key_id, "second");
    }

    #[tokio::test]
    async fn keys_requested_while_their_claim_ends_are_still_provided() {
        attend_first();
        let waiting = tokio::spawn(keys("late"));
        until_wanted("late").await;
        assert!(claim("late"));
        provide("late", some("first", Duration::from_secs(900)));
        waiting.await.unwrap().unwrap();
        let began = Instant::now();
        assert!(is_used("late"));
        assert!(are_others_coming("late", began));
        assert!(is_used("late"), "or the request waits for nobody");
    }

    #[tokio::test]
    async fn a_failed_search_is_reported_and_repeated_by_the_next_request() {
        attend_first();
        for _ in 0..2 {
            let waiting = tokio::spawn(keys("failed"));
            until_wanted("failed").await;
            assert!(claim("failed"));
            let missing = NoKeysReason::from("no such profile".to_owned());
            fail("failed", missing.clone());
            assert_eq!(waiting.await.unwrap().unwrap_err(), missing);
        }
        assert!(!wanted().contains(&"failed".to_owned()));
    }
}
