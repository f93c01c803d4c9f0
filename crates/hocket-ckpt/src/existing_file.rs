//! A file completed by an earlier run, compared with the new data and left unchanged.

use crate::blob::Blob;
use crate::error::{CkptError, Result};
use crate::files::Target;
use crate::location::Location;
use crate::workers::Interrupted;

/// Bytes read and compared at a time.
const PIECE_BYTES: usize = 4 << 20;

pub(crate) struct ExistingFile {
    blob: Blob,
    at: u64,
}

impl ExistingFile {
    /// Opens the existing file at `path`; returns none if there is none.
    ///
    /// # Errors
    /// `Exists` if its size already shows that it differs.
    pub(crate) fn find(
        location: &Location,
        path: &str,
        expected: Option<u64>,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<Self>> {
        let Some(blob) = Blob::find(location, path, interrupted)? else {
            return Ok(None);
        };
        let found = Self { blob, at: 0 };
        if expected.is_some_and(|size| size != found.blob.size()) {
            return Err(found.differs());
        }
        Ok(Some(found))
    }

    fn differs(&self) -> CkptError {
        CkptError::Exists {
            uri: format!(
                "{}/{}",
                self.blob.uri().trim_end_matches('/'),
                self.blob.name()
            ),
            reason: "it is not what would be written here, and was not touched. Name another destination, or delete it \
                     first"
                .to_owned(),
        }
    }
}

impl Target for ExistingFile {
    /// Compares the next bytes.
    fn write(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<()> {
        for piece in bytes.chunks(PIECE_BYTES) {
            let end = self.at + piece.len() as u64;
            if end > self.blob.size() || self.blob.read(self.at..end, interrupted)? != piece {
                return Err(self.differs());
            }
            self.at = end;
            if interrupted() {
                return Err(CkptError::Interrupted);
            }
        }
        Ok(())
    }

    /// Ends the comparison; all data has been passed.
    fn finish(self: Box<Self>, _: Interrupted<'_>) -> Result<()> {
        if self.at == self.blob.size() {
            return Ok(());
        }
        Err(self.differs())
    }
}
