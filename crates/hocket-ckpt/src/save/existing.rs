//! A file completed by an earlier run, compared with the new data and left unchanged.

use crate::error::{CkptError, Result};
use crate::place::CheckpointPlace;
use crate::place::blob::Blob;
use crate::place::files::PieceWriter;
use crate::workers::Interrupted;

/// Bytes read at a time.
const WINDOW_BYTES: u64 = 4 << 20;

pub(crate) struct ExistingFile {
    blob: Blob,
    /// Bytes of the file that were read and not yet compared, from `compared` in `window` on.
    window: Vec<u8>,
    compared: usize,
    /// Bytes read so far.
    num_read: u64,
}

impl ExistingFile {
    /// Opens the existing file at `path`; returns none if there is none.
    ///
    /// # Errors
    /// `Exists` if its size already shows that it differs.
    pub(crate) fn find(
        place: &CheckpointPlace,
        path: &str,
        expected: Option<u64>,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<Self>> {
        let Some(blob) = Blob::find(place, path, interrupted)? else {
            return Ok(None);
        };
        let found = Self {
            blob,
            window: Vec::new(),
            compared: 0,
            num_read: 0,
        };
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

impl PieceWriter for ExistingFile {
    /// Compares the next bytes.
    fn write(&mut self, mut bytes: &[u8], interrupted: Interrupted<'_>) -> Result<()> {
        while !bytes.is_empty() {
            if self.compared == self.window.len() {
                let end = self.blob.size().min(self.num_read + WINDOW_BYTES);
                if end == self.num_read {
                    return Err(self.differs());
                }
                self.window = self.blob.read(self.num_read..end, interrupted)?;
                (self.num_read, self.compared) = (end, 0);
                if interrupted() {
                    return Err(CkptError::Interrupted);
                }
            }
            let expected = &self.window[self.compared..];
            let (part, rest) = bytes.split_at(bytes.len().min(expected.len()));
            if !expected.starts_with(part) {
                return Err(self.differs());
            }
            self.compared += part.len();
            bytes = rest;
        }
        Ok(())
    }

    /// Ends the comparison; all data has been passed.
    fn finish(self: Box<Self>, _: Interrupted<'_>) -> Result<()> {
        if self.num_read == self.blob.size() && self.compared == self.window.len() {
            return Ok(());
        }
        Err(self.differs())
    }
}
