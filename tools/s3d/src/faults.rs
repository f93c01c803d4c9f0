//! Fault injection: rules that select the requests to fail, and counts that make a run repeatable.
//!
//! A rule is a line of `key=value` pairs, `kind=slowdown,rate=0.05,op=GetObject,key=*/data/*`. Whether it hits
//! its n-th matching request depends only on a hash of (seed, position of the rule, n): the same seed hits the
//! same numbers, independent of the content and the timing of the requests.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use serde::{Deserialize, Serialize};

use crate::operation::Target;
use crate::rule::{Kind, Rule};

/// All settings, at the start and while the server runs.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Rules, one per line.
    pub faults: Vec<String>,
    /// The seed that determines which matching requests a rule hits.
    pub seed: u64,
    /// Latency added to every request.
    pub latency_ms: u64,
    /// Bandwidth of every connection in each direction, in bytes per second; 0 is unlimited.
    pub bandwidth: u64,
}

/// The effects on one request.
#[derive(Debug, Default, PartialEq)]
pub struct Fate {
    /// Delay before the request is processed.
    pub delay: Duration,
    /// Bandwidth of its connection in bytes per second; 0 is unlimited.
    pub bandwidth: u64,
    /// The fault that replaces a successful response.
    pub fault: Option<Kind>,
}

/// The counts so far.
#[derive(Debug, Default, Serialize)]
pub struct Stats {
    /// Requests by operation.
    pub requests: BTreeMap<&'static str, u64>,
    /// Responses by status, as they were before a fault changed them.
    pub answers: BTreeMap<u16, u64>,
    /// Faults by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Counts by rule, in the order of the rules.
    pub rules: Vec<RuleStats>,
    /// Connections accepted.
    pub connections: u64,
    /// Requests in progress.
    pub in_flight: u64,
    /// The highest number of requests in progress so far.
    pub most_in_flight: u64,
    /// Bytes received from clients, including request headers.
    pub bytes_received: u64,
    /// Bytes sent to clients, including response headers.
    pub bytes_sent: u64,
}

/// The counts of one rule.
#[derive(Clone, Debug, Serialize)]
pub struct RuleStats {
    /// The rule as it was given.
    pub rule: String,
    /// Requests that match its operations and keys.
    pub matched: u64,
    /// Matching requests that it hit.
    pub injected: u64,
}

/// The rules and the counts.
#[derive(Default)]
pub struct Faults {
    state: Mutex<State>,
    in_flight: AtomicU64,
    /// See [`Stats`].
    pub connections: AtomicU64,
    most_in_flight: AtomicU64,
    /// See [`Stats`].
    pub bytes_received: AtomicU64,
    /// See [`Stats`].
    pub bytes_sent: AtomicU64,
}

#[derive(Default)]
struct State {
    rules: Vec<(Rule, RuleStats)>,
    seed: u64,
    latency_ms: u64,
    bandwidth: u64,
    requests: BTreeMap<&'static str, u64>,
    answers: BTreeMap<u16, u64>,
    faults: BTreeMap<&'static str, u64>,
}

impl Faults {
    /// Replaces all rules; their counts start at zero.
    ///
    /// # Errors
    /// A line is not a valid rule: the message names it and what was expected. Nothing changes in this case.
    pub fn set(&self, settings: Settings) -> Result<(), String> {
        let mut rules = Vec::with_capacity(settings.faults.len());
        for line in settings.faults {
            let rule = line
                .parse::<Rule>()
                .map_err(|error| format!("fault `{line}`: {error}"))?;
            rules.push((
                rule,
                RuleStats {
                    rule: line,
                    matched: 0,
                    injected: 0,
                },
            ));
        }
        let mut state = self.state();
        state.rules = rules;
        state.seed = settings.seed;
        state.latency_ms = settings.latency_ms;
        state.bandwidth = settings.bandwidth;
        Ok(())
    }

    /// Counts a request and decides its effects. Delays add up, the smallest bandwidth applies, and of several
    /// faults the first applies.
    pub fn decide(&self, target: &Target) -> Fate {
        let mut state = self.state();
        let State {
            rules,
            seed,
            latency_ms,
            bandwidth,
            requests,
            faults,
            ..
        } = &mut *state;
        *requests.entry(target.operation).or_default() += 1;
        let mut fate = Fate {
            delay: Duration::from_millis(*latency_ms),
            bandwidth: *bandwidth,
            fault: None,
        };
        for (place, (rule, stats)) in rules
            .iter_mut()
            .enumerate()
            .filter(|(_, (rule, _))| rule.matches(target))
        {
            let number = stats.matched;
            stats.matched += 1;
            let is_ended =
                fate.fault.is_some() && !matches!(rule.kind, Kind::Latency(_) | Kind::Bandwidth(_));
            if is_ended || !rule.hits(number, stats.injected, draw(*seed, place as u64, number)) {
                continue;
            }
            stats.injected += 1;
            *faults.entry(rule.kind.name()).or_default() += 1;
            match rule.kind {
                Kind::Latency(ms) => fate.delay += Duration::from_millis(ms),
                Kind::Bandwidth(limit) if fate.bandwidth == 0 => fate.bandwidth = limit,
                Kind::Bandwidth(limit) => fate.bandwidth = fate.bandwidth.min(limit),
                kind => fate.fault = Some(kind),
            }
        }
        fate
    }

    /// Counts a response.
    pub fn answer(&self, status: StatusCode) {
        *self.state().answers.entry(status.as_u16()).or_default() += 1;
    }

    /// Returns the bandwidth of every connection in bytes per second; 0 is unlimited.
    pub fn bandwidth(&self) -> u64 {
        self.state().bandwidth
    }

    /// Counts a request as in progress until the result is dropped.
    pub fn enter(&self) -> impl Drop + '_ {
        struct Leave<'a>(&'a AtomicU64);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let now = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_in_flight.fetch_max(now, Ordering::Relaxed);
        Leave(&self.in_flight)
    }

    /// Returns all counts.
    pub fn stats(&self) -> Stats {
        let state = self.state();
        Stats {
            requests: state.requests.clone(),
            answers: state.answers.clone(),
            faults: state.faults.clone(),
            rules: state.rules.iter().map(|(_, stats)| stats.clone()).collect(),
            connections: self.connections.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            most_in_flight: self.most_in_flight.load(Ordering::Relaxed),
            bytes_received: self.bytes_received.load(Ordering::Relaxed),
            bytes_sent: self.bytes_sent.load(Ordering::Relaxed),
        }
    }

    /// Sets all counts to zero. The rules are kept and start again with their first request.
    pub fn reset(&self) {
        let mut state = self.state();
        state.requests.clear();
        state.answers.clear();
        state.faults.clear();
        for (_, stats) in &mut state.rules {
            (stats.matched, stats.injected) = (0, 0);
        }
        for count in [
            &self.connections,
            &self.most_in_flight,
            &self.bytes_received,
            &self.bytes_sent,
        ] {
            count.store(0, Ordering::Relaxed);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a number in 0..1 that depends only on the arguments (splitmix64's mixing, three times).
fn draw(seed: u64, place: u64, number: u64) -> f64 {
    let mix = |mut bits: u64| {
        bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    };
    let bits = mix(mix(mix(seed) ^ place) ^ number);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    fn faults(lines: &[&str], seed: u64) -> Faults {
        let faults = Faults::default();
        let settings = Settings {
            faults: lines.iter().map(ToString::to_string).collect(),
            seed,
            ..Settings::default()
        };
        faults.set(settings).unwrap();
        faults
    }

    fn hits(faults: &Faults, count: usize) -> Vec<bool> {
        let target = Target {
            operation: "GetObject",
            key: "a/data/1".into(),
            ..Target::default()
        };
        (0..count)
            .map(|_| faults.decide(&target).fault.is_some())
            .collect()
    }

    #[test]
    fn the_same_seed_hits_the_same_requests_and_about_the_rate_of_them() {
        let line = "kind=slowdown,rate=0.05,op=GetObject,key=*/data/*";
        let first = hits(&faults(&[line], 3), 4000);
        assert_eq!(first, hits(&faults(&[line], 3), 4000));
        assert_ne!(first, hits(&faults(&[line], 4), 4000));
        let count = first.iter().filter(|hit| **hit).count();
        assert!((140..260).contains(&count), "{count} of 4000 at 0.05");
        let again = faults(&[line], 3);
        hits(&again, 100);
        again.reset();
        assert_eq!(hits(&again, 4000), first);
    }

    #[test]
    fn other_requests_do_not_move_a_rules_numbers() {
        let line = "kind=reset,rate=0.5,op=GetObject";
        let alone = hits(&faults(&[line], 1), 50);
        let mixed = faults(&[line], 1);
        let other = Target {
            operation: "PutObject",
            key: "a/data/1".into(),
            ..Target::default()
        };
        let with_others: Vec<bool> = (0..50)
            .map(|_| {
                assert_eq!(mixed.decide(&other), Fate::default());
                hits(&mixed, 1)[0]
            })
            .collect();
        assert_eq!(alone, with_others);
        let stats = mixed.stats();
        assert_eq!(
            (stats.rules[0].matched, stats.requests["PutObject"]),
            (50, 50)
        );
        assert_eq!(
            stats.faults["reset"],
            alone.iter().filter(|hit| **hit).count() as u64
        );
    }

    #[test]
    fn rules_combine() {
        let lines = [
            "kind=latency,ms=20",
            "kind=bandwidth,bytes_per_s=9",
            "kind=lost_reply,times=1,after=1",
            "kind=500",
        ];
        let faults = faults(&lines, 0);
        let target = Target {
            operation: "PutObject",
            ..Target::default()
        };
        let fates: Vec<Fate> = (0..3).map(|_| faults.decide(&target)).collect();
        let fault = |fault| Fate {
            delay: Duration::from_millis(20),
            bandwidth: 9,
            fault: Some(fault),
        };
        assert_eq!(
            fates,
            [
                fault(Kind::InternalError),
                fault(Kind::LostReply),
                fault(Kind::InternalError)
            ]
        );
        assert_eq!(faults.stats().faults["lost_reply"], 1);
        let error = faults
            .set(Settings {
                faults: vec!["kind=fire".into()],
                ..Settings::default()
            })
            .unwrap_err();
        assert!(
            error.contains("`kind=fire`") && error.contains("slowdown"),
            "{error}"
        );
        assert_eq!(faults.decide(&target).bandwidth, 9, "the rules before stay");
    }
}
