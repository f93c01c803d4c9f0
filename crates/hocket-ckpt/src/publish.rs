//! The last step of a local commit: a file gets its final name, unless the name exists.

use std::io;
use std::path::Path;

use crate::error::{CkptError, Result};
use crate::location::Location;
use crate::manifest::decode_head;

/// Gives the file its final name; returns false if the name exists.
pub(crate) fn publish(temporary: &Path, name: &Path, unfenced: bool) -> Result<bool> {
    match std::fs::hard_link(temporary, name) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
        // File systems without hard links report different errors; the rename below reports the actual cause.
        Err(_) => {}
    }
    let (from, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::NOREPLACE);
    match rustix::fs::renameat_with(from, temporary, from, name, flags) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::EXIST) => Ok(false),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP) => {
            if !unfenced {
                return Err(CkptError::Unfenced {
                    uri: name.display().to_string(),
                });
            }
            if name.exists() {
                return Ok(false);
            }
            std::fs::rename(temporary, name)
                .map(|()| true)
                .map_err(|error| CkptError::io(name, "name the manifest", &error))
        }
        Err(error) => Err(CkptError::io(name, "name the manifest", &error.into())),
    }
}

/// Succeeds if the existing manifest is that of `save_id`.
pub(crate) fn compare(location: &Location, there: &[u8], save_id: &str) -> Result<()> {
    let theirs = match decode_head(there, location.uri()) {
        Ok((head, _, _)) if head.save_id == save_id => return Ok(()),
        Ok((head, _, _)) => format!(
            "save `{}` of step {} was committed there",
            head.save_id, head.step
        ),
        Err(error) => format!("an object of that name exists and is not a manifest ({error})"),
    };
    Err(CkptError::Exists {
        uri: location.uri().to_owned(),
        reason: format!(
            "{theirs}, and was not touched. Save under another name, or delete it first"
        ),
    })
}
