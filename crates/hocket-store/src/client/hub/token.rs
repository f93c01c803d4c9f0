//! The user's token for a hub, as `huggingface_hub` finds it: in variables, or in the file that a login writes.

use crate::error::{Result, StoreError};
use crate::values::env::EnvSnapshot;
use crate::values::settings::check_text;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The variables with a token; the first that is set wins.
const VARIABLES: [&str; 2] = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];

/// The source of the token, and the token once it was read.
pub(super) struct Token {
    source: TokenSource,
    file: Mutex<FileToken>,
}

/// The token of a file, as it was read last.
#[derive(Default)]
struct FileToken {
    token: Option<Arc<str>>,
    /// Whether the hub has refused a request since.
    is_refused: bool,
}

enum TokenSource {
    Anonymous,
    Variable(Arc<str>),
    File(PathBuf),
}

impl std::fmt::Debug for Token {
    /// Shows the kind of the source only.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.source {
            TokenSource::Anonymous => "Token(anonymous)",
            TokenSource::Variable(_) => "Token(variable)",
            TokenSource::File(_) => "Token(file)",
        })
    }
}

impl Token {
    /// Finds the source of the token, and reads it.
    ///
    /// # Errors
    /// `Config` for a token that no header can carry, a file that cannot be read, or a switch that is neither true
    /// nor false.
    pub(super) fn new(env: &EnvSnapshot, anonymous: bool) -> Result<Self> {
        let variable = VARIABLES.iter().find_map(|&name| {
            let token = env.get(name)?.trim();
            (!token.is_empty()).then_some((name, token))
        });
        let source = if anonymous || env.is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN")? {
            TokenSource::Anonymous
        } else if let Some((name, token)) = variable {
            check_text(name, token)?;
            TokenSource::Variable(token.into())
        } else {
            file(env).map_or(TokenSource::Anonymous, TokenSource::File)
        };
        let token = match &source {
            TokenSource::File(path) => read(path)?,
            _ => None,
        };
        let is_refused = false;
        let file = Mutex::new(FileToken { token, is_refused });
        Ok(Self { source, file })
    }

    /// Returns the token for a request; none without a login. A file is read again after a refusal only, because
    /// a login may have followed it.
    pub(super) fn get(&self) -> Option<Arc<str>> {
        let path = match &self.source {
            TokenSource::Anonymous => return None,
            TokenSource::Variable(token) => return Some(Arc::clone(token)),
            TokenSource::File(path) => path,
        };
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::take(&mut file.is_refused) {
            // A file that was good and is no more counts as none: the hub's refusal names the remedy.
            file.token = read(path).unwrap_or_default();
        }
        file.token.clone()
    }

    /// Returns whether the last request had a token.
    pub(super) fn is_known(&self) -> bool {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(self.source, TokenSource::Variable(_)) || file.token.is_some()
    }

    /// Notes that the hub has refused a request.
    pub(super) fn note_refusal(&self) {
        self.file
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_refused = true;
    }
}

fn read(path: &Path) -> Result<Option<Arc<str>>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(StoreError::config(format!(
                "the token of the hub in `{}` cannot be read: {error}; correct the file, or set `HF_TOKEN`",
                path.display()
            )));
        }
    };
    let token = text.trim();
    check_text(&path.to_string_lossy(), token)?;
    Ok((!token.is_empty()).then(|| token.into()))
}

/// Returns the path of the file that a login writes; none without a home folder.
fn file(env: &EnvSnapshot) -> Option<PathBuf> {
    let home = env.get("HOME").map(PathBuf::from);
    let expanded = |path: &str| match (path.strip_prefix('~'), &home) {
        (Some(below), Some(home)) if below.is_empty() || below.starts_with('/') => {
            home.join(below.trim_start_matches('/'))
        }
        _ => PathBuf::from(path),
    };
    if let Some(path) = env.get("HF_TOKEN_PATH") {
        return Some(expanded(path));
    }
    let folder = match (env.get("HF_HOME"), env.get("XDG_CACHE_HOME")) {
        (Some(folder), _) => expanded(folder),
        (None, Some(cache)) => expanded(cache).join("huggingface"),
        (None, None) => home.as_ref()?.join(".cache/huggingface"),
    };
    Some(folder.join("token"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use crate::service::Service;

    fn token(env: &[(&str, &str)]) -> Token {
        let all = env
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let env = EnvSnapshot::choose(all, Service::Hub.variables());
        Token::new(&env, false).unwrap()
    }

    #[test]
    fn the_first_source_that_is_set_wins() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        let cache = folder.path().join(".cache/huggingface");
        std::fs::create_dir_all(&cache).unwrap();
        std::fs::write(cache.join("token"), "of-home\n").unwrap();
        std::fs::write(folder.path().join("token"), " of-hf-home ").unwrap();
        std::fs::write(folder.path().join("own"), "of-path").unwrap();
        for (env, expected) in [
            (&[][..], Some("of-home")),
            (&[("HF_HOME", "~")], Some("of-hf-home")),
            (
                &[("HF_TOKEN_PATH", "~/own"), ("HF_HOME", "~")],
                Some("of-path"),
            ),
            (&[("HF_TOKEN_PATH", "~/none")], None),
            (&[("XDG_CACHE_HOME", "~/.cache")], Some("of-home")),
            (&[("HUGGING_FACE_HUB_TOKEN", "old")], Some("old")),
            (
                &[("HUGGING_FACE_HUB_TOKEN", "old"), ("HF_TOKEN", " new\n")],
                Some("new"),
            ),
            (&[("HF_TOKEN", " "), ("HF_HOME", "~")], Some("of-hf-home")),
            (
                &[("HF_TOKEN", "t"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")],
                None,
            ),
        ] {
            let all = [env, &[("HOME", home)]].concat();
            assert_eq!(token(&all).get().as_deref(), expected, "{env:?}");
        }
    }

    #[test]
    fn a_login_after_a_refusal_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let token = token(&[("HF_HOME", folder.path().to_str().unwrap())]);
        assert_eq!(token.get(), None);
        token.note_refusal();
        assert!(!token.is_known());
        std::fs::write(folder.path().join("token"), "first").unwrap();
        assert_eq!(token.get().as_deref(), Some("first"));
        std::fs::write(folder.path().join("token"), "second").unwrap();
        assert_eq!(token.get().as_deref(), Some("first"));
        token.note_refusal();
        assert!(token.is_known());
        assert_eq!(token.get().as_deref(), Some("second"));
        assert_eq!(format!("{token:?}"), "Token(file)");
    }
}
