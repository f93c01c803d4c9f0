//! An open checkpoint, in Hocket's format or another.

use std::mem::take;

use crate::data_files::DataFiles;
use crate::error::Result;
use crate::fetch::read_manifest;
use crate::foreign::{self, Catalogue};
use crate::location::Location;
use crate::manifest::{DataFile, Document};
use crate::workers::Interrupted;

/// A checkpoint whose contents were read and checked once, with its data files ready for any number of reads. It
/// holds no open file and may be kept across a fork.
pub struct Checkpoint {
    /// The table of contents.
    pub contents: Contents,
    /// The data files, with their digests decoded.
    pub files: DataFiles,
}

/// The table of contents of a checkpoint.
pub enum Contents {
    /// Hocket's manifest; its `files` moved to [`Checkpoint::files`].
    Manifest(Document),
    /// The catalogue of another format.
    Catalogue(Catalogue),
}

impl Checkpoint {
    /// Reads and checks the manifest of a checkpoint, and decodes its digests.
    ///
    /// # Errors
    /// `NotFound`, `Partial` (data without a manifest), `Corrupt`, `Incompatible`, and errors of the disk or the
    /// store.
    pub fn open(uri: &str, interrupted: Interrupted<'_>) -> Result<Self> {
        let location = Location::open(uri)?;
        let manifest = read_manifest(&location, interrupted)?;
        let mut document = manifest.document;
        let files = take(&mut document.files);
        Ok(Self {
            contents: Contents::Manifest(document),
            files: DataFiles::with_tables(location, files, manifest.tables),
        })
    }

    /// Recognizes and lists a checkpoint of another format.
    ///
    /// # Errors
    /// As [`foreign::catalogue`].
    pub fn open_foreign(uri: &str, interrupted: Interrupted<'_>) -> Result<Self> {
        let catalogue = foreign::catalogue(uri, interrupted)?;
        let files: Vec<DataFile> = catalogue.files().map(plain_file).collect();
        let location = Location::open(catalogue.root())?;
        Ok(Self {
            contents: Contents::Catalogue(catalogue),
            files: DataFiles::without_digests(location, files),
        })
    }
}

/// Returns the record of a file without header and digests, whose data is the whole file.
fn plain_file((path, size): (&str, u64)) -> DataFile {
    DataFile {
        path: path.to_owned(),
        size,
        data_start: 0,
        header: String::new(),
        digests: String::new(),
        frames: None,
    }
}
