//! An open checkpoint, in Hocket's format or another.

pub(crate) mod data_files;
mod delta;
pub(crate) mod head;
pub(crate) mod stored;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use crate::error::{CkptError, Result};
use crate::foreign::{self, ChunkWrapping, ForeignContents, ItemUnpacker, Located, TensorItem};
use crate::manifest::tiling::TensorBox;
use crate::manifest::{DataFile, DeltaBase, ManifestDocument, decode_checked};
use crate::place::CheckpointPlace;
use crate::read::boxes::{BoxReads, BoxTarget, ReadLimits};
use crate::workers::Interrupted;
use data_files::DataFiles;
use head::read_stored;
use stored::{StoredTensor, StoredTensors};

/// A checkpoint whose contents were read and checked once, with its data files ready for any number of reads. It may
/// be kept across a fork.
pub struct Checkpoint {
    place: CheckpointPlace,
    files: DataFiles,
    tensors: Arc<StoredTensors>,
    save_id: String,
    /// The base, if the tensors are stored as a difference from it, and the opened bases, the nearest first.
    delta: Option<DeltaBase>,
    bases: Mutex<Option<Arc<Vec<Self>>>>,
    /// Whether a read fetches the gaps between nearby runs too. In Hocket's format it takes only the blocks that it
    /// needs.
    reads_gaps: bool,
    /// The rest of the contents, until they are taken.
    contents: Mutex<Option<CheckpointContents>>,
    /// The chunks inside zips that have been located.
    located: Mutex<HashMap<Chunk, Located>>,
    /// The compressed chunk that was read last, which stays open for its next piece.
    unpacking: Mutex<Option<(Chunk, ItemUnpacker)>>,
}

/// Index of a tensor, and of a chunk of it. Two tensors of a damaged checkpoint may name the same zip.
type Chunk = (usize, usize);

/// Indices and strides of the chunks of a tensor that are not in C order.
pub type Strided = Vec<(usize, Vec<u64>)>;

/// Interval between attempts to take a lock that another thread may hold for long.
const LOCK_INTERVAL: Duration = Duration::from_millis(10);

/// The contents of a checkpoint apart from its files and tensors.
pub enum CheckpointContents {
    /// Hocket's manifest, without `files` and `tensors`.
    Manifest(ManifestDocument),
    /// The contents of another format, without its tensors, and its digest with them.
    Foreign(ForeignContents, String),
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
    fn target(&self, tensor: &StoredTensor) -> Result<BoxTarget> {
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
        let region = TensorBox {
            start: self.start.clone(),
            size: self.size.clone(),
        };
        // SAFETY: as guaranteed to `new`.
        Ok(unsafe {
            BoxTarget::new(
                self.address,
                region,
                self.strides.clone(),
                tensor.dtype.item_bytes(),
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
        let place = CheckpointPlace::open(uri)?;
        let stored = read_stored(&place, interrupted)?;
        Self::of_stored(place, &stored)
    }

    /// Checks the stored bytes of a checkpoint's manifest, which [`read_stored`](crate::read_stored) returned, as [`Self::open`]
    /// does; reads nothing.
    ///
    /// # Errors
    /// `Corrupt`, `Incompatible`, and errors of an invalid URI.
    pub fn open_stored(uri: &str, stored: &[u8]) -> Result<Self> {
        Self::of_stored(CheckpointPlace::open(uri)?, stored)
    }

    fn of_stored(place: CheckpointPlace, stored: &[u8]) -> Result<Self> {
        let manifest = decode_checked(stored, place.uri())?;
        let mut document = manifest.document;
        let files = take(&mut document.files);
        let tensors = StoredTensors::of_manifest(take(&mut document.tensors.0))?;
        let files = DataFiles::with_tables(place.clone(), files, manifest.tables);
        let contents = CheckpointContents::Manifest(document);
        Ok(Self::new(place, files, tensors, contents))
    }

    /// Recognizes and lists a checkpoint of another format.
    ///
    /// # Errors
    /// As [`foreign::contents`].
    pub fn open_foreign(uri: &str, interrupted: Interrupted<'_>) -> Result<Self> {
        let mut foreign = foreign::contents(uri, interrupted)?;
        let digest = foreign.digest()?;
        let files: Vec<DataFile> = foreign.files().map(plain_file).collect();
        let place = CheckpointPlace::open(&foreign.root)?;
        let tensors = StoredTensors::of_foreign(take(&mut foreign.tensors));
        let files = DataFiles::without_digests(place.clone(), files);
        let contents = CheckpointContents::Foreign(foreign, digest);
        Ok(Self::new(place, files, tensors, contents))
    }

    fn new(
        place: CheckpointPlace,
        files: DataFiles,
        tensors: StoredTensors,
        contents: CheckpointContents,
    ) -> Self {
        let (save_id, delta) = match &contents {
            CheckpointContents::Manifest(document) => {
                (document.save_id.clone(), document.delta.clone())
            }
            CheckpointContents::Foreign(..) => (String::new(), None),
        };
        Self {
            save_id,
            delta,
            bases: Mutex::default(),
            reads_gaps: place.is_remote() && matches!(contents, CheckpointContents::Foreign(..)),
            place,
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
    pub fn with_contents<T>(&self, look: impl FnOnce(Option<&CheckpointContents>) -> T) -> T {
        look(locked(&self.contents).as_ref())
    }

    /// Takes the contents, which are then in memory only where the caller keeps them.
    pub fn take_contents(&self) -> Option<CheckpointContents> {
        locked(&self.contents).take()
    }

    /// Reads boxes of tensors into the caller's memory, each assembled from its chunks. With `check`, verifies the
    /// digest of every block that they touch, in formats that have digests.
    ///
    /// Data with the same layout in the file and in memory is read directly into place; other data goes through at
    /// most `scratch_bytes` of memory. Zips of torch are located first. The boxes of a delta are read through its
    /// bases.
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
        if self.delta.is_some() {
            return self.read_chain(boxes, check, scratch_bytes, interrupted);
        }
        self.read_own(boxes, check, scratch_bytes, interrupted)
    }

    /// Reads boxes of what the checkpoint's own files hold.
    fn read_own(
        &self,
        boxes: &[BoxRead<'_>],
        check: bool,
        scratch_bytes: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let owners = boxes.iter().map(|one| self.tensors.owner_of(one.tensor));
        let owners: Vec<&StoredTensor> = owners.collect::<Result<_>>()?;
        let targets = boxes
            .iter()
            .zip(&owners)
            .map(|(one, owner)| one.target(owner));
        let targets: Vec<BoxTarget> = targets.collect::<Result<_>>()?;
        let wrapped = owners.iter().zip(&targets);
        let wrapped = wrapped.filter(|(tensor, _)| tensor.chunks.is_foreign());
        let wrapped = wrapped.flat_map(|(tensor, target)| {
            let chunks = tensor.chunks.near(target.region());
            chunks.into_iter().map(|chunk| (*tensor, chunk))
        });
        self.locate(wrapped, interrupted)?;
        let limits = ReadLimits::new(self.reads_gaps, scratch_bytes);
        let mut reads = BoxReads::new(limits);
        for (target, tensor) in targets.iter().zip(&owners) {
            if let Some(data) = &tensor.data {
                let whole = TensorBox {
                    start: vec![0; tensor.shape.len()],
                    size: tensor.shape.clone(),
                };
                target.copy_from(data, &whole);
            }
            for chunk in tensor.chunks.near(target.region()) {
                if tensor.chunks.wrapped(chunk) == Some(ChunkWrapping::Zstd) {
                    self.unpack(target, tensor, chunk, limits, interrupted)
                        .map_err(|error| of_tensor(tensor, error))?;
                    continue;
                }
                let mut stored = tensor.chunks.get(chunk);
                if tensor.chunks.wrapped(chunk) == Some(ChunkWrapping::Torch)
                    && let Some((offset, strides)) =
                        locked(&self.located).get(&(tensor.owner, chunk))
                {
                    (stored.offset, stored.strides) = (*offset, strides.clone());
                }
                reads.add(target, &stored)?;
            }
        }
        reads
            .run(&mut |reads| self.files.read(reads, check, interrupted))
            .map_err(|error| self.named(error, boxes))
    }

    /// Returns the strides, in items, of the chunks of some tensors that are not in C order, with the chunks' indices.
    /// Zips are located first, many in one read; those of compressed chunks are not known.
    ///
    /// # Errors
    /// `Invalid` for an unknown name, `CorruptTensor` if a zip does not match the contents, and errors of the disk or
    /// the store.
    pub fn strides(&self, names: &[&str], interrupted: Interrupted<'_>) -> Result<Vec<Strided>> {
        let owners = names.iter().map(|name| self.tensors.owner_of(name));
        let owners: Vec<&StoredTensor> = owners.collect::<Result<_>>()?;
        let all = owners.iter().flat_map(|tensor| {
            let count = if tensor.chunks.is_foreign() {
                tensor.chunks.len()
            } else {
                0
            };
            (0..count).map(|chunk| (*tensor, chunk))
        });
        self.locate(all, interrupted)?;
        let located = locked(&self.located);
        let strides = |tensor: &StoredTensor, chunk: usize| match tensor.chunks.wrapped(chunk) {
            None => tensor.chunks.strides(chunk).map(<[u64]>::to_vec),
            Some(ChunkWrapping::Torch) => located.get(&(tensor.owner, chunk))?.1.clone(),
            Some(ChunkWrapping::Zstd) => None,
        };
        let all = owners.into_iter().map(|tensor| {
            let chunks = 0..tensor.chunks.len();
            let strided = chunks.filter_map(|chunk| Some((chunk, strides(tensor, chunk)?)));
            strided.collect()
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

    /// Finds the chunks that are inside zips, many in one read.
    fn locate<'a>(
        &'a self,
        chunks: impl Iterator<Item = (&'a StoredTensor, usize)>,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let mut seen = HashSet::new();
        let mut wanted: BTreeMap<usize, Vec<(&StoredTensor, usize)>> = BTreeMap::new();
        {
            let located = locked(&self.located);
            for (tensor, chunk) in chunks {
                let key = (tensor.owner, chunk);
                if tensor.chunks.wrapped(chunk) == Some(ChunkWrapping::Torch)
                    && !located.contains_key(&key)
                    && seen.insert(key)
                {
                    let file = tensor.chunks.file(chunk);
                    wanted.entry(file).or_default().push((tensor, chunk));
                }
            }
        }
        for (file, chunks) in wanted {
            let path = self.files.paths().nth(file).unwrap_or_default();
            let items: Vec<TensorItem> = chunks
                .iter()
                .map(|(tensor, chunk)| item(tensor, *chunk))
                .collect();
            let named = |number: usize, error| match chunks.get(number) {
                Some((tensor, _)) => of_tensor(tensor, error),
                None => error,
            };
            let places = foreign::locate(&self.place, path, &items, &named, interrupted)?;
            let keys = chunks.iter().map(|(tensor, chunk)| (tensor.owner, *chunk));
            locked(&self.located).extend(keys.zip(places));
        }
        Ok(())
    }

    /// Copies the part of a target that a compressed zip contains.
    fn unpack(
        &self,
        target: &BoxTarget,
        tensor: &StoredTensor,
        chunk: usize,
        limits: ReadLimits,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let stored = tensor.chunks.get(chunk);
        let key = (tensor.owner, chunk);
        let mut unpacking = lock_or_interrupt(&self.unpacking, interrupted)?;
        // Frees the temporary file of the chunk before.
        let last = unpacking.take().filter(|(last, _)| *last == key);
        let (_, unpacker) = unpacking.insert(match last {
            Some(last) => last,
            None => {
                let path = self.files.paths().nth(stored.file).unwrap_or_default();
                let item = item(tensor, chunk);
                (
                    key,
                    ItemUnpacker::open(&self.place, path, &item, interrupted)?,
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
        dtype: tensor.dtype,
        shape: stored.region.size,
    }
}

/// Names the tensor in an error about corrupt bytes of it.
fn of_tensor(tensor: &StoredTensor, error: CkptError) -> CkptError {
    if !matches!(error, CkptError::Corrupt { .. }) {
        return error;
    }
    CkptError::CorruptTensor {
        subject: format!("Tensor `{}`", tensor.name()),
        error: Box::new(error),
    }
}

/// Waits for a lock that another thread may hold for long.
fn lock_or_interrupt<'a, T>(
    mutex: &'a Mutex<T>,
    interrupted: Interrupted<'_>,
) -> Result<MutexGuard<'a, T>> {
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if interrupted() => return Err(CkptError::Interrupted),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_INTERVAL),
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
        planes: None,
    }
}
