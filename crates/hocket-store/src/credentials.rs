//! AWS keys that somebody outside finds and renews: Python's boto3, on a thread of its own.
//!
//! The environment's own keys need none of this. Where there are none, a request *wants* keys of its profile and waits
//! here. A thread that waits for such a request sees it in [`wanted`] and *claims* the profile; from then on somebody
//! gives keys, again and again before they expire and as long as they are used, or says why there are none. A store may
//! call keys expired before their time: clocks differ, and for keys of an instance role boto3 tells a later time than
//! the true one. Then they are sought at once, and the request is made once more. All of it is in the process's table: a
//! forked child has wanted and claimed nothing, and starts anew.

use crate::error::StoreError;
use crate::process::{self, with_table};
use object_store::aws::AwsCredential;
use object_store::{CredentialProvider, Error};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;

/// A request waits this long for keys that are being looked for.
const PATIENCE: Duration = Duration::from_secs(25);

/// A request is not begun with keys that expire this soon.
const MARGIN: Duration = Duration::from_millis(250);

/// Whether there is anybody to look at [`wanted`].
static IS_ATTENDED: AtomicBool = AtomicBool::new(false);

/// The profiles of this process; the empty name is boto3's default chain.
pub(crate) type Profiles = HashMap<String, Profile>;

/// A profile that was wanted.
pub(crate) struct Profile {
    region: Option<String>,
    /// Whether requests took keys since this was last asked.
    is_used: bool,
    /// Whether somebody renews the keys.
    is_served: bool,
    keys: watch::Sender<State>,
}

#[derive(Clone)]
enum State {
    Wanted,
    Sought,
    Known {
        keys: Arc<AwsCredential>,
        expires: Option<SystemTime>,
        since: Instant,
    },
    Failed(String),
}

/// Keys of one profile.
pub struct Keys {
    /// The access key's id.
    pub key_id: String,
    /// The secret that belongs to it.
    pub secret_key: String,
    /// The token of temporary keys.
    pub token: Option<String>,
    /// When they cease to be good.
    pub expires: Option<SystemTime>,
}

/// Promises that somebody looks at [`wanted`] while requests wait. Without it they fail at once.
pub fn attend() {
    IS_ATTENDED.store(true, Ordering::Relaxed);
}

/// The profiles that requests wait for and nobody has claimed.
pub fn wanted() -> Vec<String> {
    with_table(|table| {
        let is_wanted =
            |(_, profile): &(&String, &Profile)| matches!(*profile.keys.borrow(), State::Wanted);
        let wanted = table.profiles.iter().filter(is_wanted);
        wanted.map(|(name, _)| name.clone()).collect()
    })
}

/// Takes it on oneself to provide keys for a wanted `profile`; false where somebody else was quicker.
pub fn claim(profile: &str) -> bool {
    with_table(|table| {
        let Some(known) = table.profiles.get_mut(profile) else {
            return false;
        };
        let is_wanted = matches!(*known.keys.borrow(), State::Wanted);
        if is_wanted {
            known.is_served = true;
            known.keys.send_replace(State::Sought);
        }
        is_wanted
    })
}

/// Whether requests took keys of `profile` since this was last asked, or seek others now. If not, the claim ends here:
/// keys that have expired will be wanted again when a request needs them.
pub fn is_used(profile: &str) -> bool {
    with_table(|table| {
        let Some(known) = table.profiles.get_mut(profile) else {
            return false;
        };
        let is_sought = matches!(*known.keys.borrow(), State::Sought);
        known.is_served = std::mem::take(&mut known.is_used) || is_sought;
        known.is_served
    })
}

/// Gives `profile` these keys, for all requests that begin from now on, and its region where it says one.
pub fn provide(profile: &str, keys: Keys, region: Option<String>) {
    let expires = keys.expires;
    let keys = AwsCredential {
        key_id: keys.key_id,
        secret_key: keys.secret_key,
        token: keys.token,
    };
    with_table(|table| {
        if let Some(known) = table.profiles.get_mut(profile) {
            known.region = region;
            known.keys.send_replace(State::Known {
                keys: Arc::new(keys),
                expires,
                since: Instant::now(),
            });
        }
    });
}

/// Blocks for `pause`, or until the keys that were given are sought before their time; says which it was. For whoever
/// has claimed the profile, between two of its searches.
///
/// # Errors
/// `Io` where the process's I/O threads cannot be started.
pub fn is_sought_within(profile: &str, pause: Duration) -> Result<bool, StoreError> {
    let keys = with_table(|table| Some(table.profiles.get(profile)?.keys.subscribe()));
    let Some(mut keys) = keys else {
        return Ok(false);
    };
    let sought = async move {
        keys.wait_for(|state| matches!(state, State::Sought))
            .await
            .is_ok()
    };
    let waiting = async move { tokio::time::timeout(pause, sought).await };
    Ok(process::runtime()?.block_on(waiting).unwrap_or(false))
}

/// Says why there are no keys for `profile`. The next request wants them anew.
pub fn fail(profile: &str, reason: String) {
    with_table(|table| {
        if let Some(known) = table.profiles.get_mut(profile) {
            known.is_served = false;
            known.keys.send_replace(State::Failed(reason));
        }
    });
}

/// The region of a profile whose keys are known, where it says one.
pub(crate) fn region(profile: &str) -> Option<String> {
    with_table(|table| table.profiles.get(profile)?.region.clone())
}

/// Wants keys for `profile`, and waits until good ones are there or somebody says that there are none.
pub(crate) async fn keys(profile: &str) -> Result<Arc<AwsCredential>, String> {
    if !IS_ATTENDED.load(Ordering::Relaxed) {
        return Err("nobody looks for credentials in this process".to_owned());
    }
    let mut keys = want(profile);
    let wait = async {
        loop {
            let state = keys.borrow_and_update().clone();
            match state {
                State::Known { keys, expires, .. } if is_good(expires) => return Ok(keys),
                State::Failed(reason) => return Err(reason),
                _ => {}
            }
            if keys.changed().await.is_err() {
                return Err("the search for credentials has ended".to_owned());
            }
        }
    };
    let waited_s = PATIENCE.as_secs();
    let late = |_| Err(format!("no good keys were found within {waited_s} s"));
    tokio::time::timeout(PATIENCE, wait)
        .await
        .unwrap_or_else(late)
}

/// Whether a request that `began` then, and whose keys the store called expired, will find others when it is made again.
/// Those that it had are given up, if they are the newest and ever expire.
pub(crate) fn are_others_coming(profile: &str, began: Instant) -> bool {
    with_table(|table| {
        let Some(known) = table.profiles.get_mut(profile) else {
            return false;
        };
        let is_newest = match &*known.keys.borrow() {
            State::Known { since, .. } if *since > began => false,
            State::Known { expires: None, .. } | State::Failed(_) => return false,
            State::Known { .. } => true,
            State::Wanted | State::Sought => false,
        };
        if is_newest {
            let next = if known.is_served {
                State::Sought
            } else {
                State::Wanted
            };
            known.keys.send_replace(next);
        }
        true
    })
}

fn want(profile: &str) -> watch::Receiver<State> {
    with_table(|table| {
        let known = table.profiles.entry(profile.to_owned());
        let known = known.or_insert_with(|| Profile {
            region: None,
            is_used: false,
            is_served: false,
            keys: watch::Sender::new(State::Wanted),
        });
        known.is_used = true;
        let is_over = match &*known.keys.borrow() {
            State::Failed(_) => true,
            State::Known { expires, .. } => !known.is_served && !is_good(*expires),
            State::Wanted | State::Sought => false,
        };
        if is_over {
            known.keys.send_replace(State::Wanted);
        }
        known.keys.subscribe()
    })
}

/// Gives a client the keys of one profile, whichever are good when it asks.
#[derive(Debug)]
pub(crate) struct Provided {
    pub(crate) profile: String,
}

#[async_trait::async_trait]
impl CredentialProvider for Provided {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let missing = |reason: String| Error::Unauthenticated {
            path: String::new(),
            source: reason.into(),
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

    fn some(name: &str, life: Duration) -> Keys {
        Keys {
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
    async fn a_request_waits_for_good_keys_and_gets_the_newest() {
        attend();
        let waiting = tokio::spawn(keys("newest"));
        until_wanted("newest").await;
        assert!(claim("newest") && !claim("newest"));
        provide("newest", some("stale", Duration::ZERO), None);
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!waiting.is_finished());
        let region_of = Some("eu-1".to_owned());
        provide("newest", some("fresh", Duration::from_secs(60)), region_of);
        assert_eq!(waiting.await.unwrap().unwrap().key_id, "fresh");
        assert_eq!(region("newest").as_deref(), Some("eu-1"));
        assert_eq!(keys("newest").await.unwrap().key_id, "fresh");
    }

    #[tokio::test]
    async fn keys_that_nobody_uses_are_renewed_no_more_and_wanted_again() {
        attend();
        let waiting = tokio::spawn(keys("idle"));
        until_wanted("idle").await;
        assert!(claim("idle"));
        provide(
            "idle",
            some("first", MARGIN + Duration::from_millis(50)),
            None,
        );
        waiting.await.unwrap().unwrap();
        assert!(is_used("idle") && !is_used("idle"));
        tokio::time::sleep(Duration::from_millis(60)).await;
        assert!(!claim("idle"), "nobody waits");
        let waiting = tokio::spawn(keys("idle"));
        until_wanted("idle").await;
        assert!(claim("idle"));
        provide("idle", some("second", Duration::from_secs(9)), None);
        assert_eq!(waiting.await.unwrap().unwrap().key_id, "second");
    }

    #[tokio::test]
    async fn keys_that_a_store_calls_expired_are_sought_at_once() {
        attend();
        let waiting = tokio::spawn(keys("expired"));
        until_wanted("expired").await;
        assert!(claim("expired"));
        provide("expired", some("first", Duration::from_secs(900)), None);
        waiting.await.unwrap().unwrap();
        let began = Instant::now();
        let resting = std::thread::spawn(|| is_sought_within("expired", Duration::from_secs(60)));
        assert!(are_others_coming("expired", began));
        assert!(resting.join().unwrap().unwrap());
        let waiting = tokio::spawn(keys("expired"));
        provide("expired", some("second", Duration::from_secs(900)), None);
        assert_eq!(waiting.await.unwrap().unwrap().key_id, "second");
        assert!(are_others_coming("expired", began), "they are there");
        assert_eq!(keys("expired").await.unwrap().key_id, "second");
        let for_ever = Keys {
            expires: None,
            ..some("for ever", Duration::ZERO)
        };
        provide("expired", for_ever, None);
        assert!(!are_others_coming("expired", Instant::now()));
    }

    #[tokio::test]
    async fn keys_that_are_sought_as_their_claim_would_end_are_still_brought() {
        attend();
        let waiting = tokio::spawn(keys("late"));
        until_wanted("late").await;
        assert!(claim("late"));
        provide("late", some("first", Duration::from_secs(900)), None);
        waiting.await.unwrap().unwrap();
        let began = Instant::now();
        assert!(is_used("late"));
        assert!(are_others_coming("late", began));
        assert!(is_used("late"), "or the request waits for nobody");
    }

    #[tokio::test]
    async fn a_failed_search_is_told_and_begun_again_by_the_next_request() {
        attend();
        for _ in 0..2 {
            let waiting = tokio::spawn(keys("failed"));
            until_wanted("failed").await;
            assert!(claim("failed"));
            fail("failed", "no such profile".into());
            assert_eq!(waiting.await.unwrap().unwrap_err(), "no such profile");
        }
        assert!(!wanted().contains(&"failed".to_owned()));
    }
}
