//! An open checkpoint, in Hocket's format or another.

use std::collections::HashMap;
use std::mem::take;
use std::sync::{Arc, Mutex, PoisonError};

use crate::boxes::{BoxReads, Limits, Target};
use crate::data_files::DataFiles;
use crate::error::{CkptError, Result};
use crate::fetch::read_manifest;
use crate::foreign::{self, Catalogue, Located, TensorItem, Unpacker};
use crate::location::Location;
use crate::manifest::tiling::Box as Region;
use crate::manifest::{DataFile, Document};
use crate::stored::{StoredTensor, StoredTensors, Wrapped};
use crate::workers::Interrupted;

/// A checkpoint whose contents were read and checked once, with its data files ready for any number of reads. It may
/// be kept across a fork.
pub struct Checkpoint {
    location: Location,
    files: DataFiles,
    tensors: Arc<StoredTensors>,
    /// Whether a read fetches the gaps between nearby runs too. In Hocket's format it takes only the blocks that it
    /// needs.
    reads_gaps: bool,
    /// The rest of the contents, until they are taken.
    contents: Mutex<Option<Contents>>,
    /// The tensors inside zips that have been located, by file and offset of the zip.
    located: Mutex<HashMap<Zip, Located>>,
    /// The compressed zip that was read last, which stays open for its next piece.
    unpacking: Mutex<Option<(Zip, Unpacker)>>,
}

/// File and offset of a zip.
type Zip = (usize, u64);

/// The contents of a checkpoint apart from its files and, in Hocket's format, its tensors.
pub enum Contents {
    /// Hocket's manifest, without `files` and `tensors`.
    Manifest(Document),
    /// The catalogue of another format.
    Catalogue(Catalogue),
}

/// A box of a tensor to read, and its destination.
pub struct BoxRead<'a> {
    tensor: &'a str,
    start: Vec<u64>,
    size: Vec<u64>,
    address: usize,
    strides: Option<Vec<isize>>,
}

impl<'a> BoxRead<'a> {
    /// Describes a read of a box into memory; `strides` are in bytes, none for C order.
    ///
    /// # Safety
    /// Every item of the box, of the tensor's dtype, must be writable at its place from `address` on, and nothing
    /// else may use it until the read returns.
    #[must_use]
    pub unsafe fn new(
        tensor: &'a str,
        start: Vec<u64>,
        size: Vec<u64>,
        address: usize,
        strides: Option<Vec<isize>>,
    ) -> Self {
        Self {
            tensor,
            start,
            size,
            address,
            strides,
        }
    }

    /// Returns the destination.
    ///
    /// # Errors
    /// `Invalid` if the box is not inside the tensor.
    fn target(&self, tensor: &StoredTensor) -> Result<Target> {
        let dims = tensor.shape.len();
        let strides = self.strides.as_ref().map_or(dims, Vec::len);
        let is_inside = self.start.len() == dims
            && self.size.len() == dims
            && strides == dims
            && (0..dims).all(|dim| {
                let end = self.start[dim].checked_add(self.size[dim]);
                end.is_some_and(|end| end <= tensor.shape[dim])
            });
        if !is_inside {
            return Err(CkptError::Invalid(format!(
                "the box at {:?} of size {:?} is not inside `{}` of shape {:?}",
                self.start,
                self.size,
                tensor.name(),
                tensor.shape
            )));
        }
        let region = Region {
            start: self.start.clone(),
            size: self.size.clone(),
        };
        // SAFETY: as guaranteed to `new`.
        Ok(unsafe {
            Target::new(
                self.address,
                region,
                self.strides.clone(),
                tensor.item_bytes,
            )
        })
    }
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
        let tensors = StoredTensors::of_manifest(take(&mut document.tensors.0));
        let files = DataFiles::with_tables(location.clone(), files, manifest.tables);
        let contents = Contents::Manifest(document);
        Ok(Self::new(location, files, tensors, contents))
    }

    /// Recognizes and lists a checkpoint of another format.
    ///
    /// # Errors
    /// As [`foreign::catalogue`].
    pub fn open_foreign(uri: &str, interrupted: Interrupted<'_>) -> Result<Self> {
        let catalogue = foreign::catalogue(uri, interrupted)?;
        let files: Vec<DataFile> = catalogue.files().map(plain_file).collect();
        let location = Location::open(catalogue.root())?;
        let tensors = StoredTensors::of_catalogue(&catalogue)?;
        let files = DataFiles::without_digests(location.clone(), files);
        let contents = Contents::Catalogue(catalogue);
        Ok(Self::new(location, files, tensors, contents))
    }

    fn new(
        location: Location,
        files: DataFiles,
        tensors: StoredTensors,
        contents: Contents,
    ) -> Self {
        Self {
            reads_gaps: location.is_remote() && matches!(contents, Contents::Catalogue(_)),
            location,
            files,
            tensors: Arc::new(tensors),
            contents: Mutex::new(Some(contents)),
            located: Mutex::default(),
            unpacking: Mutex::default(),
        }
    }

    /// Returns the data files.
    #[must_use]
    pub fn files(&self) -> &DataFiles {
        &self.files
    }

    /// Returns the tensors.
    #[must_use]
    pub fn tensors(&self) -> &Arc<StoredTensors> {
        &self.tensors
    }

    /// Passes the contents to `look`; none if they were taken.
    pub fn with_contents<T>(&self, look: impl FnOnce(Option<&Contents>) -> T) -> T {
        look(locked(&self.contents).as_ref())
    }

    /// Takes the contents, which are then in memory only where the caller keeps them.
    pub fn take_contents(&self) -> Option<Contents> {
        locked(&self.contents).take()
    }

    /// Reads boxes of tensors into the caller's memory, each assembled from its chunks. With `check`, verifies the
    /// digest of every block that they touch, in formats that have digests.
    ///
    /// Data with the same layout in the file and in memory is read directly into place; other data goes through at
    /// most `scratch_bytes` of memory. Zips of torch are located first.
    ///
    /// # Errors
    /// `CorruptTensor` if a block or a size differs (destinations are then undefined), `NotFound` if a file is gone,
    /// `Invalid` for an unknown name or a box outside its tensor, `TempFile` if a compressed tensor cannot be
    /// unpacked, and errors of the disk or the store.
    pub fn read_boxes(
        &self,
        boxes: &[BoxRead<'_>],
        check: bool,
        scratch_bytes: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let owners = boxes.iter().map(|one| self.tensors.owner_of(one.tensor));
        let owners: Vec<&StoredTensor> = owners.collect::<Result<_>>()?;
        self.locate(&owners, interrupted)?;
        let limits = Limits::new(self.reads_gaps, scratch_bytes);
        let mut reads = BoxReads::new(limits);
        for (one, tensor) in boxes.iter().zip(&owners) {
            let target = one.target(tensor)?;
            if let Some(data) = &tensor.data {
                let whole = Region {
                    start: vec![0; tensor.shape.len()],
                    size: tensor.shape.clone(),
                };
                BoxReads::copy(&target, data, &whole);
            }
            for chunk in tensor.chunks.near(target.region()) {
                if tensor.chunks.wrapped(chunk) == Some(Wrapped::Zstd) {
                    self.unpack(&target, tensor, chunk, limits, interrupted)?;
                    continue;
                }
                let mut stored = tensor.chunks.get(chunk);
                if tensor.chunks.wrapped(chunk) == Some(Wrapped::Torch)
                    && let Some((offset, strides)) =
                        locked(&self.located).get(&(stored.file, stored.offset))
                {
                    (stored.offset, stored.strides) = (*offset, strides.clone());
                }
                reads.add(&target, &stored)?;
            }
        }
        reads
            .run(&mut |reads| self.files.read(reads, check, interrupted))
            .map_err(|error| self.named(error, boxes))
    }

    /// Returns the offset and strides of each chunk of some tensors; none for a chunk that is compressed.
    ///
    /// # Errors
    /// `Invalid` for an unknown name, `Corrupt` if a zip does not match the catalogue, and errors of the disk or the
    /// store.
    pub fn located(
        &self,
        names: &[&str],
        interrupted: Interrupted<'_>,
    ) -> Result<Vec<Vec<Option<Located>>>> {
        let owners = names.iter().map(|name| self.tensors.owner_of(name));
        let owners: Vec<&StoredTensor> = owners.collect::<Result<_>>()?;
        self.locate(&owners, interrupted)?;
        let located = locked(&self.located);
        let place = |tensor: &StoredTensor, chunk: usize| {
            let stored = tensor.chunks.get(chunk);
            match tensor.chunks.wrapped(chunk) {
                None => Some((stored.offset, stored.strides)),
                Some(Wrapped::Torch) => located.get(&(stored.file, stored.offset)).cloned(),
                Some(Wrapped::Zstd) => None,
            }
        };
        let all = owners.into_iter().map(|tensor| {
            let chunks = 0..tensor.chunks.len();
            chunks.map(|chunk| place(tensor, chunk)).collect()
        });
        Ok(all.collect())
    }

    /// Returns the tensors and chunks, by name, that overlap a block of a file, in order; with no offset, those in
    /// the file. An alias is listed with the chunks of the tensor that owns the storage.
    #[must_use]
    pub fn in_block(&self, path: &str, offset: Option<u64>) -> Vec<(&str, String)> {
        let file = self.files.paths().position(|one| one == path);
        file.map_or_else(Vec::new, |file| self.tensors.in_block(file, offset, None))
    }

    /// Finds the tensors inside zips, many in one read.
    fn locate(&self, tensors: &[&StoredTensor], interrupted: Interrupted<'_>) -> Result<()> {
        let mut wanted: HashMap<usize, Vec<TensorItem>> = HashMap::new();
        for tensor in tensors {
            for chunk in 0..tensor.chunks.len() {
                if tensor.chunks.wrapped(chunk) != Some(Wrapped::Torch) {
                    continue;
                }
                let stored = tensor.chunks.get(chunk);
                if !locked(&self.located).contains_key(&(stored.file, stored.offset)) {
                    let items = wanted.entry(stored.file).or_default();
                    items.push(item(tensor, chunk));
                }
            }
        }
        for (file, items) in wanted {
            let path = self.files.paths().nth(file).unwrap_or_default();
            let places = foreign::locate(&self.location, path, &items, interrupted)?;
            let offsets = items.iter().map(|item| (file, item.offset));
            locked(&self.located).extend(offsets.zip(places));
        }
        Ok(())
    }

    /// Copies the part of a target that a compressed zip contains.
    fn unpack(
        &self,
        target: &Target,
        tensor: &StoredTensor,
        chunk: usize,
        limits: Limits,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let stored = tensor.chunks.get(chunk);
        let zip = (stored.file, stored.offset);
        let mut unpacking = locked(&self.unpacking);
        // Frees the temporary file of the zip before.
        let last = unpacking.take().filter(|(last, _)| *last == zip);
        let (_, unpacker) = unpacking.insert(match last {
            Some(last) => last,
            None => {
                let path = self.files.paths().nth(stored.file).unwrap_or_default();
                let item = item(tensor, chunk);
                (
                    zip,
                    Unpacker::open(&self.location, path, &item, interrupted)?,
                )
            }
        });
        unpacker.fill(target, stored.region, limits, interrupted)
    }

    /// Names the tensors in an error about a block.
    fn named(&self, error: CkptError, boxes: &[BoxRead<'_>]) -> CkptError {
        let CkptError::Corrupt {
            file: Some(path),
            offset,
            ..
        } = &error
        else {
            return error;
        };
        let Some(file) = self.files.paths().position(|one| one == path) else {
            return error;
        };
        let owners = self.tensors.owners(boxes.iter().map(|one| one.tensor));
        CkptError::CorruptTensor {
            subject: self.tensors.describe_block(file, *offset, &owners),
            error: Box::new(error),
        }
    }
}

/// Returns a chunk as the item of a distributed checkpoint.
fn item(tensor: &StoredTensor, chunk: usize) -> TensorItem {
    let stored = tensor.chunks.get(chunk);
    TensorItem {
        offset: stored.offset,
        length: tensor.chunks.length(chunk),
        dtype: tensor.dtype.clone(),
        shape: stored.region.size,
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
