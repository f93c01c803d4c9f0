//! The digests and frames of a data file, decoded.

use super::document::DataFile;
use crate::error::{CkptError, Result};
use crate::format::digest::{Digest, to_base64};
use crate::format::planes::PlaneRuns;

/// The decoded block table of a file, from the manifest.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    /// The digest of each block.
    digests: Vec<Digest>,
    /// Offsets of the frames in a compressed file, followed by the end of the last frame.
    pub(crate) frames: Option<Vec<u64>>,
    /// The runs of byte planes in the blocks of a compressed file.
    pub(crate) planes: Option<PlaneRuns>,
}

impl BlockTable {
    /// Decodes the table of a file.
    ///
    /// # Errors
    /// `Corrupt`; the message names the field that does not match the file's size.
    pub(crate) fn of(uri: &str, file: &DataFile) -> Result<Self> {
        Self::decode(file).map_err(|reason| {
            CkptError::bad_manifest(uri, format!("file `{}`: {reason}", file.path))
        })
    }

    /// Decodes the table of a file; the error names the field that does not match the file's size.
    pub(super) fn decode(file: &DataFile) -> std::result::Result<Self, String> {
        let digests = file.block_digests().ok_or_else(|| {
            format!(
                "`digests` has not one digest for each block of {} bytes",
                file.data_bytes()
            )
        })?;
        let frames = match &file.frames {
            None => None,
            Some(_) => Some(
                file.frame_starts()
                    .ok_or("`frames` has not one length for the header and one for each block")?,
            ),
        };
        let planes = match &file.planes {
            None => None,
            Some(_) if frames.is_none() => {
                return Err("only a compressed file has `planes`".to_owned());
            }
            Some(pairs) => Some(PlaneRuns::of_pairs(pairs, file.data_bytes())?),
        };
        Ok(Self {
            digests,
            frames,
            planes,
        })
    }

    /// Returns the digest of a block. For a block that does not exist, returns zeros, which match no block.
    pub(crate) fn digest(&self, block: u64) -> Digest {
        self.digests
            .get(block as usize)
            .copied()
            .unwrap_or_default()
    }

    /// Returns the digests as the manifest has them.
    pub(crate) fn digests_base64(&self) -> String {
        to_base64(self.digests.as_flattened())
    }
}
