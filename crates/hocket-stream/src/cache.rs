//! Shards on local disk: brought there whole, checked, by one process of a node for all of them.

use std::collections::HashSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::Mmap;

use crate::error::{Result, StreamError};
use crate::files::{Part, write_whole};
use crate::hash::{Algorithm, NAMES};
use crate::index::{FileInfo, INDEX_NAME, Index, ShardInfo};
use crate::remote::Remote;
use crate::shard::Shard;

/// How a cache behaves.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// The folder; where there is no remote, the data set itself.
    pub local: PathBuf,
    /// Whether a downloaded compressed file stays beside the raw one.
    pub keep_zip: bool,
    /// How often a shard is fetched before a wrong size or digest is final; at least 1.
    pub attempts: u32,
    /// The digest to check; the quickest known one of each file if `None`.
    pub validate_hash: Option<String>,
}

/// The shards of one data set, as this process sees them. Threads may share it; a forked child makes its
/// own.
pub struct Cache {
    index: Arc<Index>,
    remote: Option<Remote>,
    options: CacheOptions,
    /// Shards whose bytes this process has checked.
    checked: Mutex<HashSet<u32>>,
    notices: Mutex<Vec<String>>,
}

/// Reads `index.json` of the data set; with a remote from there, leaving a copy in `local`.
///
/// # Errors
/// [`StreamError::IndexNotFound`]; the store's own errors.
pub fn load_index(local: &Path, remote: Option<&Remote>, stop: &AtomicBool) -> Result<Vec<u8>> {
    let path = local.join(INDEX_NAME);
    let held = fs::read(&path);
    let Some(remote) = remote else {
        return held.map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
                StreamError::IndexNotFound {
                    uri: path.display().to_string(),
                }
            }
            _ => StreamError::io(&path, "read", &error),
        });
    };
    // Always the remote's own: a copy may be of a data set that was since written anew.
    let uri = remote.object_uri(INDEX_NAME);
    let data = remote
        .get(INDEX_NAME, stop)?
        .ok_or(StreamError::IndexNotFound { uri })?;
    if held.ok().as_deref() != Some(&data[..]) {
        write_whole(&path, &data)?;
    }
    Ok(data)
}

impl Cache {
    /// A cache for `index`, fed from `remote` if there is one.
    ///
    /// # Errors
    /// [`StreamError::Config`] where `validate_hash` is unknown or not in the index.
    pub fn new(index: Arc<Index>, remote: Option<Remote>, options: CacheOptions) -> Result<Self> {
        if let Some(name) = &options.validate_hash {
            Algorithm::parse(name)?;
            let lacking = index
                .shards()
                .iter()
                .find(|shard| !shard.raw.hashes.iter().any(|(known, _)| known == name));
            if let Some(shard) = lacking {
                let known: Vec<&str> = shard
                    .raw
                    .hashes
                    .iter()
                    .map(|(known, _)| known.as_str())
                    .collect();
                return Err(StreamError::config(format!(
                    "`validate_hash` is `{name}`, and shard `{}` carries {known:?}: expected one of those; write the data set with `hashes=[\"{name}\"]` or leave `validate_hash` out",
                    shard.raw.basename
                )));
            }
        }
        Ok(Self {
            index,
            remote,
            options,
            checked: Mutex::default(),
            notices: Mutex::default(),
        })
    }

    /// What this cache holds shards of.
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// Takes what happened that a person may want to know, such as a shard fetched twice.
    pub fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut self.notices.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Opens a shard, bringing it here first where it is not. Blocks; gives up once `stop` is set.
    ///
    /// # Errors
    /// [`StreamError::ShardNotFound`], [`StreamError::ShardCorrupt`] when no attempt brought the right
    /// bytes, [`StreamError::Io`], the store's own errors, [`StreamError::Closed`].
    pub fn open(&self, number: u32, stop: &AtomicBool) -> Result<Shard> {
        let shard = self.index.shards().get(number as usize).ok_or_else(|| {
            StreamError::config(format!(
                "shard {number}: expected a number below {}",
                self.index.shards().len()
            ))
        })?;
        let path = self.options.local.join(&shard.raw.basename);
        let is_checked = self
            .checked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(&number);
        let found = map(&path)?.map(|bytes| self.view(shard, &path, bytes, !is_checked));
        let opened = match found {
            Some(Ok(opened)) => opened,
            Some(Err(error)) if !self.can_refetch(shard) => return Err(error),
            Some(Err(error)) => {
                self.note(format!("{error}; it is fetched again"));
                self.admit(shard, &path, stop)?
            }
            None => self.admit(shard, &path, stop)?,
        };
        self.checked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(number);
        Ok(opened)
    }

    /// Makes the raw file of a shard, or waits for the process that does.
    fn admit(&self, shard: &ShardInfo, path: &Path, stop: &AtomicBool) -> Result<Shard> {
        if !self.can_refetch(shard) {
            return Err(StreamError::ShardNotFound {
                shard: shard.raw.basename.clone(),
                uri: path.display().to_string(),
            });
        }
        let part = Part::lock(path, stop)?;
        // Another process may have admitted it while this one waited for the lock.
        if let Some(bytes) = map(path)?
            && let Ok(opened) = self.view(shard, path, bytes, true)
        {
            return Ok(opened);
        }
        let mut attempt = 1;
        loop {
            match self.make(shard, &part, stop) {
                Ok(()) => break,
                Err(error @ StreamError::ShardCorrupt { .. })
                    if attempt < self.options.attempts =>
                {
                    self.note(format!(
                        "{error}; attempt {attempt} of {}",
                        self.options.attempts
                    ));
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
        part.commit()?;
        let bytes = map(path)?.ok_or_else(|| StreamError::ShardNotFound {
            shard: shard.raw.basename.clone(),
            uri: path.display().to_string(),
        })?;
        self.view(shard, path, bytes, false)
    }

    /// One attempt: `part` holds the raw shard, checked, or the attempt failed.
    fn make(&self, shard: &ShardInfo, part: &Part, stop: &AtomicBool) -> Result<()> {
        let Some(zip) = &shard.zip else {
            let origin = self.download(&shard.raw, part.path(), stop)?;
            let bytes = map(part.path())?;
            return self.check(&shard.raw, &origin, bytes.as_ref().map_or(&[], |b| b));
        };
        let path = self.options.local.join(&zip.basename);
        if let Some(bytes) = map(&path)? {
            let here = self.unpack(shard, zip, &path.display().to_string(), &bytes, part);
            match here {
                Err(error @ StreamError::ShardCorrupt { .. }) if self.remote.is_some() => {
                    self.note(format!("{error}; it is fetched again"));
                }
                other => return other,
            }
        }
        let packed = Part::lock(&path, stop)?;
        let origin = self.download(zip, packed.path(), stop)?;
        let bytes = map(packed.path())?;
        self.unpack(shard, zip, &origin, bytes.as_ref().map_or(&[], |b| b), part)?;
        if self.options.keep_zip {
            packed.commit()
        } else {
            Ok(())
        }
    }

    fn download(&self, file: &FileInfo, into: &Path, stop: &AtomicBool) -> Result<String> {
        let missing = |uri| StreamError::ShardNotFound {
            shard: file.basename.clone(),
            uri,
        };
        let Some(remote) = &self.remote else {
            return Err(missing(
                self.options
                    .local
                    .join(&file.basename)
                    .display()
                    .to_string(),
            ));
        };
        let uri = remote.object_uri(&file.basename);
        if remote.download(&file.basename, into, stop)? {
            Ok(uri)
        } else {
            Err(missing(uri))
        }
    }

    fn unpack(
        &self,
        shard: &ShardInfo,
        zip: &FileInfo,
        origin: &str,
        packed: &[u8],
        part: &Part,
    ) -> Result<()> {
        self.check(zip, origin, packed)?;
        // The index bounds the size: a file that would unpack to more is refused, not followed.
        let raw = zstd::bulk::decompress(packed, shard.raw.bytes as usize).map_err(|error| {
            StreamError::ShardCorrupt {
                shard: zip.basename.clone(),
                object: origin.into(),
                expected: format!("a zstd frame of {} bytes", shard.raw.bytes),
                actual: format!("bytes that do not unpack ({error})"),
            }
        })?;
        self.check(&shard.raw, origin, &raw)?;
        fs::write(part.path(), &raw).map_err(|e| StreamError::io(part.path(), "write", &e))
    }

    /// Compares bytes with what the index says of the file: size, then digest.
    fn check(&self, file: &FileInfo, origin: &str, bytes: &[u8]) -> Result<()> {
        let corrupt = |expected: String, actual: String| StreamError::ShardCorrupt {
            shard: file.basename.clone(),
            object: origin.into(),
            expected,
            actual,
        };
        if bytes.len() as u64 != file.bytes {
            return Err(corrupt(
                format!("{} bytes", file.bytes),
                format!("{} bytes", bytes.len()),
            ));
        }
        let wanted = self.options.validate_hash.as_deref();
        let choice = NAMES
            .iter()
            .filter(|(name, _)| wanted.is_none_or(|wanted| wanted == *name))
            .find_map(|(name, algorithm)| {
                let (_, digest) = file.hashes.iter().find(|(known, _)| known == name)?;
                Some((name, algorithm, digest))
            });
        let Some((name, algorithm, digest)) = choice else {
            return Ok(());
        };
        let actual = algorithm.hex(bytes);
        if actual.eq_ignore_ascii_case(digest) {
            Ok(())
        } else {
            Err(corrupt(
                format!("{name} {digest}"),
                format!("{name} {actual}"),
            ))
        }
    }

    fn view(&self, shard: &ShardInfo, path: &Path, bytes: Mapped, check: bool) -> Result<Shard> {
        let origin = path.display().to_string();
        if check {
            self.check(&shard.raw, &origin, &bytes)?;
        }
        Shard::open(
            &shard.raw.basename,
            &origin,
            Box::new(bytes),
            self.index.schema().clone(),
            shard.samples,
        )
    }

    /// Whether the raw file can be made anew: from a remote, or from the compressed file beside it.
    fn can_refetch(&self, shard: &ShardInfo) -> bool {
        self.remote.is_some()
            || shard
                .zip
                .as_ref()
                .is_some_and(|zip| self.options.local.join(&zip.basename).exists())
    }

    fn note(&self, notice: String) {
        self.notices
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(notice);
    }
}

/// The bytes of a file: mapped, or nothing for an empty one, which cannot be.
struct Mapped(Option<Mmap>);

impl std::ops::Deref for Mapped {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or(&[])
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Maps a file; `None` where there is none.
fn map(path: &Path) -> Result<Option<Mapped>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(StreamError::io(path, "open", &error)),
    };
    let metadata = file
        .metadata()
        .map_err(|e| StreamError::io(path, "look at", &e))?;
    if metadata.len() == 0 {
        return Ok(Some(Mapped(None)));
    }
    // SAFETY: the map is only read. Files under a final name are replaced by rename and never shortened in
    // place by this crate; a part is shortened only by the holder of its lock, who is the one mapping it.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| StreamError::io(path, "map", &e))?;
    Ok(Some(Mapped(Some(map))))
}
