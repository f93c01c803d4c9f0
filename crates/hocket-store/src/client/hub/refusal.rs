//! The errors of a hub, by the codes that it sends beside the status.

use super::repository::HubRepository;
use crate::client::http::LastRequest;
use crate::error::StoreError;

/// Builds the error of a response that a repeated request would get again; none for other failures.
pub(crate) fn refused(
    uri: &str,
    repository: &HubRepository,
    seen: &LastRequest,
) -> Option<StoreError> {
    let status = seen.status.filter(|status| (400..500).contains(status))?;
    let uri = uri.to_owned();
    if !repository.is_own(seen.authority.as_deref()) {
        let host = seen.authority.as_deref().unwrap_or_default();
        let reason = format!("HTTP {status} from `{host}`, the storage that the hub redirects to");
        return matches!(status, 401 | 403 | 404).then_some(StoreError::Permission {
            uri,
            reason: format!("{reason}: check that this machine may read from that host"),
        });
    }
    let page = repository.page();
    let code = seen.error_code.as_deref();
    let message = seen.error_message.as_deref();
    let told = message.map_or_else(String::new, |message| {
        format!(", {}", message.trim_end_matches('.'))
    });
    let missing = |reason: String| StoreError::RepositoryNotFound {
        uri: uri.clone(),
        reason,
    };
    let forbidden = |reason: String| StoreError::Permission {
        uri: uri.clone(),
        reason,
    };
    let help = if repository.has_token() {
        "check that the token (`HF_TOKEN`, or that of `hf auth login`) is of an account with access, and may read \
         its repositories"
    } else {
        "no token was sent: set `HF_TOKEN`, or call `hf auth login`"
    };
    let unknown = format!(
        "HTTP {status}{told}: {page} does not exist, or is private; check the name and its kind \
         (`hf://datasets/…`, or `hf://owner/name` for a model); {help}"
    );
    Some(match (status, code) {
        (_, Some("GatedRepo")) => forbidden(format!(
            "HTTP {status}{told}: the repository is gated; ask for access at {page}, then {help}"
        )),
        (_, Some("RevisionNotFound")) => missing(format!(
            "the repository has no revision `{}`: expected a branch, a tag or a commit of {page}",
            repository.revision()
        )),
        (_, Some("EntryNotFound")) => StoreError::NotFound { uri },
        (401, _) if message.is_some_and(|text| text.starts_with("Invalid credentials")) => {
            forbidden(format!("HTTP 401{told}: the hub refuses the token; {help}"))
        }
        (401, _) => forbidden(unknown),
        (_, Some("RepoNotFound")) => missing(unknown),
        (403, _) => forbidden(format!("HTTP 403{told}; {help}")),
        _ => return None,
    })
}
