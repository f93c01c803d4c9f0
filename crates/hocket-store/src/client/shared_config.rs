//! The settings of an AWS profile in the shared files, read as boto3 reads them: the region and the endpoints.
//!
//! Keys are boto3's work (see [`credentials`](crate::client::credentials)); these settings also apply where the keys come
//! from variables and boto3 is not installed.

use crate::error::{Result, StoreError};
use crate::values::env::EnvSnapshot;
use std::collections::HashMap;

/// The variables that name the profile, in boto3's order.
const PROFILES: [&str; 2] = ["AWS_DEFAULT_PROFILE", "AWS_PROFILE"];

/// The settings of a profile that concern requests to S3.
#[derive(Debug, Default, PartialEq)]
pub(super) struct SharedConfig {
    /// `endpoint_url` of the service `s3`, or else of the profile.
    pub(super) endpoint: Option<String>,
    pub(super) region: Option<String>,
    /// Whether endpoints in variables and files are ignored.
    pub(super) ignores_endpoints: bool,
}

type Section = HashMap<String, String>;

/// Reads the settings of the profile that `env` names. Missing files have no settings.
///
/// # Errors
/// `Config` if the profile names services that no section describes.
pub(super) fn read(env: &EnvSnapshot) -> Result<SharedConfig> {
    let text = |variable, default| {
        let path = env.get(variable).unwrap_or(default);
        let path = match (path.strip_prefix("~/"), env.get("HOME")) {
            (Some(rest), Some(home)) => format!("{home}/{rest}"),
            _ => path.to_owned(),
        };
        std::fs::read_to_string(path).unwrap_or_default()
    };
    let config = text("AWS_CONFIG_FILE", "~/.aws/config");
    let credentials = text("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials");
    choose(env, &config, &credentials)
}

fn choose(env: &EnvSnapshot, config: &str, credentials: &str) -> Result<SharedConfig> {
    let profile = env.first(&PROFILES).unwrap_or("default");
    let sections = parse(config);
    let named = |kind: &str, name: &str| {
        let is_it = |title: &str| {
            let rest = title.strip_prefix(kind);
            let rest = rest.filter(|rest| rest.starts_with([' ', '\t']));
            rest.is_some_and(|rest| unquote(rest.trim_start()) == name)
        };
        let found = sections.iter().rev().find(|(title, _)| {
            is_it(title) || (kind == "profile" && name == "default" && title == "default")
        });
        found.map(|(_, section)| section)
    };
    let mut settings = named("profile", profile).cloned().unwrap_or_default();
    let own = parse(credentials).into_iter();
    for (_, section) in own.filter(|(title, _)| title == profile) {
        settings.extend(section);
    }
    let ignores_endpoints = match env.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") {
        Some(value) => value.eq_ignore_ascii_case("true"),
        None => (settings.get("ignore_configured_endpoint_urls"))
            .is_some_and(|value| value.eq_ignore_ascii_case("true")),
    };
    let mut endpoint = None;
    if !ignores_endpoints {
        if let Some(services) = settings.get("services") {
            let section = named("services", services).ok_or_else(|| {
                StoreError::config(format!(
                    "the AWS profile `{profile}` has `services = {services}`, but the configuration file has no section \
                     `[services {services}]`; add it, or set `AWS_ENDPOINT_URL_S3`"
                ))
            })?;
            endpoint = section.get("s3.endpoint_url").cloned();
        }
        endpoint = endpoint.or_else(|| settings.get("endpoint_url").cloned());
    }
    Ok(SharedConfig {
        endpoint: endpoint.filter(|url| !url.is_empty()),
        region: settings.remove("region").filter(|name| !name.is_empty()),
        ignores_endpoints,
    })
}

/// Parses a file into its sections in order. A setting nested below another one is named `{outer}.{inner}`.
fn parse(text: &str) -> Vec<(String, Section)> {
    let mut sections: Vec<(String, Section)> = Vec::new();
    let mut outer = String::new();
    for line in text.lines() {
        let content = line.trim();
        if content.is_empty() || content.starts_with(['#', ';']) {
            continue;
        }
        let is_indented = line.starts_with([' ', '\t']);
        if !is_indented
            && let Some((title, _)) = content
                .strip_prefix('[')
                .and_then(|rest| rest.rsplit_once(']'))
        {
            sections.push((title.trim().to_owned(), Section::new()));
            continue;
        }
        let (Some((name, value)), Some((_, section))) =
            (content.split_once(['=', ':']), sections.last_mut())
        else {
            continue;
        };
        let (name, value) = (name.trim().to_ascii_lowercase(), value.trim().to_owned());
        if is_indented {
            section.insert(format!("{outer}.{name}"), value);
        } else {
            outer.clone_from(&name);
            section.insert(name, value);
        }
    }
    sections
}

/// Removes the quotes of a name, as in `[profile "a b"]`.
fn unquote(name: &str) -> &str {
    let quoted = |mark| name.strip_prefix(mark)?.strip_suffix(mark);
    quoted('"').or_else(|| quoted('\'')).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    const CONFIG: &str = "
[default]
region = eu-west-1
endpoint_url = http://default
# endpoint_url = http://comment
[profile plain]
endpoint_url: http://plain
s3 =
    addressing_style = path
[profile \"two words\"]
Services = mine
endpoint_url = http://fallback
[profile other-service]
services = no-s3
endpoint_url = http://fallback
[profile off]
endpoint_url = http://off
ignore_configured_endpoint_urls = true
[profile lost]
services = nowhere
[services mine]
dynamodb =
  endpoint_url = http://dynamo
s3 =
  endpoint_url = http://mine
[services no-s3]
dynamodb =
  endpoint_url = http://dynamo
";

    fn read(profile: &str, credentials: &str) -> Result<SharedConfig> {
        let all = [("AWS_PROFILE".to_owned(), profile.to_owned())];
        let env = EnvSnapshot::choose(all.into_iter(), &["AWS_"]);
        choose(&env, CONFIG, credentials)
    }

    #[test]
    fn the_endpoint_of_a_profile_is_its_services_or_its_own() {
        for (profile, endpoint) in [
            ("", Some("http://default")),
            ("default", Some("http://default")),
            ("plain", Some("http://plain")),
            ("two words", Some("http://mine")),
            ("other-service", Some("http://fallback")),
            ("off", None),
            ("unknown", None),
        ] {
            let shared = read(profile, "").unwrap();
            assert_eq!(shared.endpoint.as_deref(), endpoint, "{profile}");
        }
        assert_eq!(read("", "").unwrap().region.as_deref(), Some("eu-west-1"));
        assert!(read("off", "").unwrap().ignores_endpoints);
        let error = read("lost", "").unwrap_err().to_string();
        assert!(error.contains("[services nowhere]"), "{error}");
    }

    #[test]
    fn the_credentials_file_comes_before_the_configuration() {
        let credentials =
            "[plain]\nregion = x\nendpoint_url = http://credentials\n[profile plain]\nregion = y";
        let shared = read("plain", credentials).unwrap();
        assert_eq!(shared.endpoint.as_deref(), Some("http://credentials"));
        assert_eq!(shared.region.as_deref(), Some("x"));
    }
}
