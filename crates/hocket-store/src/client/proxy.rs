//! The proxies of the environment: which one a request goes through, and `NO_PROXY=*`.

use crate::error::{Result, StoreError};
use crate::values::env::EnvSnapshot;
use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;
use object_store::ClientOptions;
use std::sync::Arc;

const HTTP: [&str; 2] = ["http_proxy", "HTTP_PROXY"];
const HTTPS: [&str; 2] = ["https_proxy", "HTTPS_PROXY"];
const ALL: [&str; 2] = ["all_proxy", "ALL_PROXY"];
const NONE: [&str; 2] = ["no_proxy", "NO_PROXY"];
/// The client's own variables, one for each service, which come before the others.
const OWN: [&str; 3] = ["AWS_PROXY_URL", "GOOGLE_PROXY_URL", "AZURE_PROXY_URL"];
const OWN_NONE: [&str; 3] = [
    "AWS_PROXY_EXCLUDES",
    "GOOGLE_PROXY_EXCLUDES",
    "AZURE_PROXY_EXCLUDES",
];

/// Every host, as the HTTP client writes it: there, `*` alone means names and not addresses.
const EVERY_HOST: &str = "*,0.0.0.0/0,::/0";

/// The proxies by the scheme of a request, as the HTTP client chooses them.
#[derive(Debug, Default, Clone)]
pub(super) struct Proxies(Option<Arc<Chosen>>);

#[derive(Debug)]
struct Chosen {
    matcher: Matcher,
    http: &'static str,
    https: &'static str,
}

impl Proxies {
    /// Reads the proxies of the environment.
    ///
    /// # Errors
    /// `Config` for a value that the HTTP client would ignore.
    pub(super) fn of(env: &EnvSnapshot) -> Result<Self> {
        let first = |names: &[&'static str]| {
            let set = |name: &&'static str| Some((*name, env.get(name)?));
            names.iter().find_map(set)
        };
        let (own, all) = (first(&OWN), first(&ALL));
        let http = own.or_else(|| first(&HTTP)).or(all);
        let https = own.or_else(|| first(&HTTPS)).or(all);
        for (name, value) in [http, https].into_iter().flatten() {
            let alone = Matcher::builder().all(value.to_owned()).build();
            if alone.intercept(&Uri::from_static("http://host/")).is_none() {
                return Err(StoreError::config(format!(
                    "`{name}` is no address of a proxy; expected one such as `http://proxy:3128`, or an empty value"
                )));
            }
        }
        if (http, https) == (None, None) || excludes_every_host(env) {
            return Ok(Self::default());
        }
        let value = |found: Option<(&str, &str)>| {
            found.map_or_else(String::new, |(_, value)| value.to_owned())
        };
        let matcher = Matcher::builder()
            .http(value(http))
            .https(value(https))
            .no(value(if own.is_some() {
                first(&OWN_NONE)
            } else {
                first(&NONE)
            }))
            .build();
        let name = |found: Option<(&'static str, &str)>| found.map_or("", |(name, _)| name);
        let (http, https) = (name(http), name(https));
        Ok(Self(Some(Arc::new(Chosen {
            matcher,
            http,
            https,
        }))))
    }

    /// Names the proxy that a request to `uri` goes through, without a login.
    pub(super) fn describe(&self, uri: &Uri) -> Option<String> {
        let chosen = self.0.as_ref()?;
        let proxy = chosen.matcher.intercept(uri)?;
        let is_https = uri.scheme_str() == Some("https");
        let name = if is_https { chosen.https } else { chosen.http };
        let address = proxy.uri().to_string();
        Some(format!(
            "the proxy `{}` (`{name}`)",
            address.trim_end_matches('/')
        ))
    }
}

/// Returns whether `NO_PROXY` is `*`, which means every host, also those that are given by their addresses.
pub(super) fn excludes_every_host(env: &EnvSnapshot) -> bool {
    (env.first(&NONE)).is_some_and(|list| list.split(',').any(|host| host.trim() == "*"))
}

/// Returns `options` without the environment's proxies if `NO_PROXY` excludes every host.
pub(super) fn exclude(options: ClientOptions, env: &EnvSnapshot) -> ClientOptions {
    if !excludes_every_host(env) {
        return options;
    }
    // An explicit proxy replaces those of the environment; this one is never used.
    options
        .with_proxy_url("http://127.0.0.1:9")
        .with_proxy_excludes(EVERY_HOST)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn env(all: &[(&str, &str)]) -> EnvSnapshot {
        let all = all.iter();
        EnvSnapshot::choose(
            all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
            &["AWS_"],
        )
    }

    #[test]
    fn the_proxy_of_a_request_is_named_without_its_login() {
        let both = [
            ("HTTPS_PROXY", "http://me:secret@p:3128"),
            ("ALL_PROXY", "q:1"),
            ("NO_PROXY", "inside,10.0.0.0/8"),
        ];
        let proxies = Proxies::of(&env(&both)).unwrap();
        let of = |uri: &'static str| proxies.describe(&Uri::from_static(uri));
        assert_eq!(
            of("https://s3/b").unwrap(),
            "the proxy `http://p:3128` (`HTTPS_PROXY`)"
        );
        assert_eq!(
            of("http://s3/b").unwrap(),
            "the proxy `http://q:1` (`ALL_PROXY`)"
        );
        assert_eq!(of("https://inside/b"), None);
        assert_eq!(of("http://10.1.2.3/b"), None);
        assert_eq!(
            Proxies::of(&env(&[]))
                .unwrap()
                .describe(&Uri::from_static("http://s3/")),
            None
        );
        let own = Proxies::of(&env(&[both[0], ("AWS_PROXY_URL", "http://own:1")])).unwrap();
        assert_eq!(
            own.describe(&Uri::from_static("https://inside/b")).unwrap(),
            "the proxy `http://own:1` (`AWS_PROXY_URL`)"
        );
        let none = Proxies::of(&env(&[both[0], ("no_proxy", "*")])).unwrap();
        assert_eq!(none.describe(&Uri::from_static("https://1.2.3.4/")), None);
    }

    #[test]
    fn an_address_that_would_be_ignored_is_refused_without_its_login() {
        for value in ["ftp://p:1", "http://", "ftp://me:secret@p:1"] {
            let error = Proxies::of(&env(&[("HTTP_PROXY", value)]))
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("`HTTP_PROXY`") && !error.contains("secret"),
                "{error}"
            );
        }
    }
}
