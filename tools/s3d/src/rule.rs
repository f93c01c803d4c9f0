//! A fault rule and its parser.

use std::str::FromStr;

use crate::operation::Target;

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Delays the request by this many milliseconds.
    Latency(u64),
    /// Limits its connection to this many bytes per second.
    Bandwidth(u64),
    /// 500 InternalError; the request is not executed.
    InternalError,
    /// 503 SlowDown; the request is not executed.
    SlowDown,
    /// 409 ConditionalRequestConflict; the request is not executed.
    Conflict,
    /// Resets the connection; the request is not executed.
    Reset,
    /// Truncates the response before its declared length.
    ShortBody,
    /// Executes the request and closes its connection without a response.
    LostReply,
    /// 501 NotImplemented to a PUT with a condition, as Backblaze B2 answers; the request is not executed.
    NoConditions,
    /// 400 InvalidArgument to a PUT with a condition, as some gateways answer; the request is not executed.
    BadCondition,
    /// 200 with a page in HTML, as a login page or a console answers.
    Html,
    /// 200 with an `<Error>` in its body.
    ErrorBody,
    /// 301 without a location, naming the region `eu-west-3` in a header, as for a bucket of another region.
    Moved,
    /// 403 RequestTimeTooSkewed at a date an hour ahead.
    Skewed,
}

impl Kind {
    /// Returns the name used in rules and counts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Latency(_) => "latency",
            Self::Bandwidth(_) => "bandwidth",
            Self::InternalError => "500",
            Self::SlowDown => "slowdown",
            Self::Conflict => "conflict",
            Self::Reset => "reset",
            Self::ShortBody => "short_body",
            Self::LostReply => "lost_reply",
            Self::NoConditions => "no_conditions",
            Self::BadCondition => "bad_condition",
            Self::Html => "html",
            Self::ErrorBody => "error_body",
            Self::Moved => "moved",
            Self::Skewed => "skewed",
        }
    }
}

/// A rule: one kind of fault and the requests that it hits.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The kind of fault.
    pub kind: Kind,
    /// The fraction of matching requests that it hits.
    rate: f64,
    /// Operation names, with the wildcards `*` and `?`.
    operations: Vec<String>,
    /// A pattern for keys, with the wildcards `*` and `?`.
    key: String,
    /// Number of matching requests that pass before the first hit.
    after: u64,
    /// Limit of the number of hits.
    times: u64,
}

impl Rule {
    /// Returns whether a request matches the rule's operations and key.
    pub fn matches(&self, target: &Target) -> bool {
        let is_possible = match self.kind {
            Kind::ShortBody => target.answers_with_a_body(),
            Kind::NoConditions | Kind::BadCondition => target.is_conditional,
            _ => true,
        };
        is_possible
            && self
                .operations
                .iter()
                .any(|pattern| is_glob_match(pattern, target.operation))
            && is_glob_match(&self.key, &target.key)
    }

    /// Returns whether the rule hits its matching request `number`, given the hits so far and `drawn`, a random
    /// number in 0..1.
    pub fn hits(&self, number: u64, injected: u64, drawn: f64) -> bool {
        number >= self.after && injected < self.times && drawn < self.rate
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let mut rule = Self {
            kind: Kind::Reset,
            rate: 1.0,
            operations: vec!["*".into()],
            key: "*".into(),
            after: 0,
            times: u64::MAX,
        };
        let (mut kind, mut ms, mut bytes_per_s) = (None, None, None);
        for pair in line.split(',') {
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| format!("`{pair}` is not `name=value`"))?;
            match name.trim() {
                "kind" => kind = Some(value.trim()),
                "rate" => rule.rate = rate(value)?,
                "op" => {
                    rule.operations = value
                        .split('|')
                        .map(|pattern| pattern.trim().to_owned())
                        .collect()
                }
                "key" => rule.key = value.to_owned(),
                "after" => rule.after = number(name, value)?,
                "times" => rule.times = number(name, value)?,
                "ms" => ms = Some(number(name, value)?),
                "bytes_per_s" => bytes_per_s = Some(number(name, value)?),
                _ => {
                    return Err(format!(
                        "`{name}` is none of kind, rate, op, key, after, times, ms, bytes_per_s"
                    ));
                }
            }
        }
        rule.kind = match (kind.ok_or("no `kind=` in it")?, ms, bytes_per_s) {
            ("latency", Some(ms), None) => Kind::Latency(ms),
            ("latency", ..) => {
                return Err("`kind=latency` takes `ms=`, and no `bytes_per_s=`".into());
            }
            ("bandwidth", None, Some(limit)) if limit > 0 => Kind::Bandwidth(limit),
            ("bandwidth", ..) => {
                return Err("`kind=bandwidth` takes `bytes_per_s=` above 0, and no `ms=`".into());
            }
            (name, None, None) => plain_kind(name)?,
            (name, ..) => {
                return Err(format!(
                    "`kind={name}` takes neither `ms=` nor `bytes_per_s=`"
                ));
            }
        };
        Ok(rule)
    }
}

fn plain_kind(name: &str) -> Result<Kind, String> {
    let kinds = [
        Kind::InternalError,
        Kind::SlowDown,
        Kind::Conflict,
        Kind::Reset,
        Kind::ShortBody,
        Kind::LostReply,
        Kind::NoConditions,
        Kind::BadCondition,
        Kind::Html,
        Kind::ErrorBody,
        Kind::Moved,
        Kind::Skewed,
    ];
    kinds
        .into_iter()
        .find(|kind| kind.name() == name)
        .ok_or_else(|| {
            let names: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
            format!(
                "kind `{name}` is none of latency, bandwidth, {}",
                names.join(", ")
            )
        })
}

fn rate(value: &str) -> Result<f64, String> {
    let rate = value
        .trim()
        .parse()
        .ok()
        .filter(|rate| (0.0..=1.0).contains(rate));
    rate.ok_or_else(|| format!("rate `{value}` is not a number from 0 to 1"))
}

fn number(name: &str, value: &str) -> Result<u64, String> {
    value
        .trim()
        .parse()
        .map_err(|_| format!("{name} `{value}` is not a whole number"))
}

/// Returns whether `text` matches `pattern`, in which `*` stands for any run of characters, including `/`, and
/// `?` for any single one.
fn is_glob_match(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    // The state to return to when the last `*` has to match one character more.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(wanted) if *wanted == '?' || *wanted == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((star_p, star_t)) => {
                    star = Some((star_p, star_t + 1));
                    p = star_p + 1;
                    t = star_t + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|rest| *rest == '*')
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn globs() {
        for (pattern, text, is_match) in [
            ("*", "", true),
            ("*/data/*", "ckpt/step-1/data/0001", true),
            ("*/data/*", "data/0001", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*a*a*b", "aaaaaaab", true),
            ("*a*a*b", "aaaaaaac", false),
            ("", "x", false),
            ("manifest.json", "manifest.json", true),
        ] {
            assert_eq!(is_glob_match(pattern, text), is_match, "{pattern} {text}");
        }
    }

    #[test]
    fn a_line_that_is_no_rule_is_refused_with_what_was_expected() {
        for (line, part) in [
            ("rate=0.5", "no `kind=`"),
            ("kind=slowdown,rate=1.5", "from 0 to 1"),
            ("kind=slowdown,rate=nan", "from 0 to 1"),
            ("kind=slowdown,rates=1", "none of kind, rate"),
            ("kind=slowdown,ms=3", "takes neither"),
            ("kind=latency", "takes `ms=`"),
            ("kind=bandwidth,bytes_per_s=0", "above 0"),
            ("slowdown", "not `name=value`"),
            ("kind=reset,times=-1", "whole number"),
        ] {
            let error = line.parse::<Rule>().unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn a_short_body_needs_a_body() {
        let rule: Rule = "kind=short_body".parse().unwrap();
        let target = |operation| Target {
            operation,
            ..Target::default()
        };
        assert!(rule.matches(&target("GetObject")) && !rule.matches(&target("PutObject")));
        let rule: Rule = "kind=reset,op=Get*|HeadObject".parse().unwrap();
        assert!(rule.matches(&target("HeadObject")) && !rule.matches(&target("HeadBucket")));
    }
}
