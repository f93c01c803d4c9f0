//! A manifest to be committed, and its comparison with the existing one.

use bytes::Bytes;

use crate::error::{CkptError, Result};
use crate::manifest::decode_head;

/// The conditions of a commit.
#[derive(Debug, Clone, Default)]
pub struct CommitOptions {
    /// Commit by writes without conditions, for a store that ignores or rejects conditions.
    pub unfenced: bool,
    /// The id of the save whose manifest is replaced; without it, no manifest may exist.
    pub replaces: Option<String>,
    /// Fail with `NotFound` if the manifest to replace does not exist, instead of writing a new one.
    pub must_exist: bool,
}

/// A manifest to be written to a place.
#[derive(Clone)]
pub(crate) struct ManifestWrite {
    pub(crate) uri: String,
    pub(crate) bytes: Bytes,
    pub(crate) save_id: String,
    pub(crate) options: CommitOptions,
}

impl ManifestWrite {
    /// Returns an error unless the existing manifest belongs to this save.
    pub(crate) fn compare(&self, there: &[u8]) -> Result<()> {
        let conflict = match decode_head(there, &self.uri) {
            Ok((head, _, _)) if head.save_id == self.save_id => return Ok(()),
            Ok((head, _, _)) => format!(
                "save `{}` of step {} was committed there",
                head.save_id, head.step
            ),
            Err(error) => {
                format!("an object of that name exists and is not a manifest ({error})")
            }
        };
        Err(CkptError::Exists {
            uri: self.uri.clone(),
            reason: format!(
                "{conflict}, and was not touched. Save under another name, or delete it first"
            ),
        })
    }

    /// Returns whether the existing manifest belongs to the save `save_id`.
    pub(crate) fn is_of(&self, there: &[u8], save_id: &str) -> bool {
        decode_head(there, &self.uri).is_ok_and(|(head, _, _)| head.save_id == save_id)
    }

    /// Returns an error if a manifest that does not exist has to be there.
    pub(crate) fn allow_missing(&self) -> Result<()> {
        if self.options.must_exist {
            return Err(CkptError::not_found(
                &self.uri,
                "the checkpoint to replace was removed meanwhile",
            ));
        }
        Ok(())
    }

    /// Builds the error of a store that ignores or rejects the condition of a write.
    pub(crate) fn unfenced(&self, reason: &str) -> CkptError {
        CkptError::Unfenced {
            uri: self.uri.clone(),
            reason: reason.to_owned(),
        }
    }
}
