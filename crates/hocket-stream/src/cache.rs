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
use crate::index::{FileInfo, INDEX_NAME, Index, ShardInfo, StoredFile};
use crate::remote::Remote;
use crate::shard::{Shard, ShardBytes, check_table};

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
pub fn load_index(
    local: &Path,
    remote: Option<&Remote>,
    interrupted: &dyn Fn() -> bool,
) -> Result<Vec<u8>> {
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
        .get(INDEX_NAME, interrupted)?
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
                .flat_map(ShardInfo::files)
                .find(|file| !file.raw.hashes.iter().any(|(known, _)| known == name));
            if let Some(file) = lacking {
                let known: Vec<&str> = file
                    .raw
                    .hashes
                    .iter()
                    .map(|(known, _)| known.as_str())
                    .collect();
                return Err(StreamError::config(format!(
                    "`validate_hash` is `{name}`, and shard `{}` carries {known:?}: expected one of those; write the data set with `hashes=[\"{name}\"]` or leave `validate_hash` out",
                    file.raw.basename
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
        let is_checked = self
            .checked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(&number);
        let (data, origin) = self.bring(shard, &shard.data, is_checked, stop)?;
        let meta = match &shard.meta {
            Some(file) => {
                Some(Box::new(self.bring(shard, file, is_checked, stop)?.0) as ShardBytes)
            }
            None => None,
        };
        let opened = Shard::open(shard, &origin, Box::new(data), meta)?;
        self.checked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(number);
        Ok(opened)
    }

    /// A raw file's bytes, brought here first where they are not, and its path.
    fn bring(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        is_checked: bool,
        stop: &AtomicBool,
    ) -> Result<(Mapped, String)> {
        let path = self.options.local.join(&file.raw.basename);
        let origin = path.display().to_string();
        if let Some(bytes) = map(&path)? {
            if is_checked {
                return Ok((bytes, origin));
            }
            match self.check_raw(shard, file, &origin, &bytes) {
                Ok(()) => return Ok((bytes, origin)),
                Err(error) if !self.can_refetch(file) => return Err(error),
                Err(error) => self.note(format!("{error}; it is fetched again")),
            }
        }
        let bytes = self.admit(shard, file, &path, stop)?;
        Ok((bytes, origin))
    }

    /// Makes a raw file, or waits for the process that does.
    fn admit(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        path: &Path,
        stop: &AtomicBool,
    ) -> Result<Mapped> {
        let missing = || StreamError::ShardNotFound {
            shard: file.raw.basename.clone(),
            uri: path.display().to_string(),
        };
        if !self.can_refetch(file) {
            return Err(missing());
        }
        let part = Part::lock(path, stop)?;
        // Another process may have admitted it while this one waited for the lock.
        if let Some(bytes) = map(path)?
            && self
                .check_raw(shard, file, &path.display().to_string(), &bytes)
                .is_ok()
        {
            return Ok(bytes);
        }
        let mut attempt = 1;
        loop {
            match self.make(shard, file, &part, stop) {
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
        map(path)?.ok_or_else(missing)
    }

    /// One attempt: `part` holds the raw file, checked, or the attempt failed.
    fn make(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        part: &Part,
        stop: &AtomicBool,
    ) -> Result<()> {
        let (Some(zip), Some(compression)) = (&file.zip, shard.compression) else {
            let origin = self.download(&file.raw, part.path(), stop)?;
            let bytes = map(part.path())?;
            return self.check_raw(shard, file, &origin, bytes.as_ref().map_or(&[], |b| b));
        };
        let unpack = |origin: &str, packed: &[u8]| {
            self.check(zip, origin, packed)?;
            let raw = compression
                .unpack(packed, file.raw.bytes)
                .map_err(|actual| StreamError::ShardCorrupt {
                    shard: zip.basename.clone(),
                    object: origin.into(),
                    expected: format!("{} bytes packed as {compression}", file.raw.bytes),
                    actual,
                })?;
            self.check_raw(shard, file, origin, &raw)?;
            fs::write(part.path(), &raw).map_err(|e| StreamError::io(part.path(), "write", &e))
        };
        let path = self.options.local.join(&zip.basename);
        if let Some(bytes) = map(&path)? {
            match unpack(&path.display().to_string(), &bytes) {
                Err(error @ StreamError::ShardCorrupt { .. }) if self.remote.is_some() => {
                    self.note(format!("{error}; it is fetched again"));
                }
                other => return other,
            }
        }
        let packed = Part::lock(&path, stop)?;
        let origin = self.download(zip, packed.path(), stop)?;
        let bytes = map(packed.path())?;
        unpack(&origin, bytes.as_ref().map_or(&[], |b| b))?;
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

    /// Whether `bytes` are a shard's raw file: size and digest, and the table of offsets if it has it.
    fn check_raw(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        origin: &str,
        bytes: &[u8],
    ) -> Result<()> {
        self.check(&file.raw, origin, bytes)?;
        if file.holds_offsets {
            check_table(shard, origin, bytes, shard.data.raw.bytes as usize)?;
        }
        Ok(())
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

    /// Whether the raw file can be made anew: from a remote, or from the compressed file beside it.
    fn can_refetch(&self, file: &StoredFile) -> bool {
        self.remote.is_some()
            || file
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use crate::codec::Compression;
    use crate::writer::{RawFile, WriterOptions, assemble, write};
    use hocket_store::StoreOptions;
    use serde_json::{Value, json};
    use tempfile::TempDir;

    /// A data set of one shard with ten 4-byte samples, and a cache of it elsewhere.
    struct Fixture {
        remote: TempDir,
        local: TempDir,
        index: Arc<Index>,
    }

    impl Fixture {
        fn new(compression: Option<&str>, hash: &str) -> Self {
            let remote = tempfile::tempdir().unwrap();
            let samples: Vec<[u8; 4]> = (0u32..10).map(u32::to_le_bytes).collect();
            let options = WriterOptions {
                local: Some(remote.path().into()),
                remote: None,
                compression: compression.map(|text| Compression::parse(text).unwrap()),
                hashes: vec![(hash.into(), Algorithm::parse(hash).unwrap())],
                only_new: true,
                threads: 1,
            };
            let contents = assemble(b"{}", &samples).unwrap();
            let file = RawFile {
                basename: "s.mds".into(),
                contents,
            };
            let written = write(&options, file, &AtomicBool::new(false)).unwrap();
            let file = |file: &FileInfo| {
                let hashes: std::collections::HashMap<_, _> = file.hashes.iter().cloned().collect();
                json!({"basename": file.basename, "bytes": file.bytes, "hashes": hashes})
            };
            let shard = json!({
                "column_encodings": ["uint32"], "column_names": ["a"], "column_sizes": [4],
                "compression": compression, "format": "mds", "hashes": [hash], "samples": 10,
                "size_limit": null, "version": 2, "raw_data": file(&written.raw),
                "zip_data": written.zip.as_ref().map_or(Value::Null, file),
            });
            let text = json!({"version": 2, "shards": [shard]}).to_string();
            fs::write(remote.path().join(INDEX_NAME), &text).unwrap();
            let index = Arc::new(Index::parse(text.as_bytes(), "index.json").unwrap());
            Self {
                remote,
                local: tempfile::tempdir().unwrap(),
                index,
            }
        }

        fn cache(&self, keep_zip: bool) -> Cache {
            let remote = Remote::open(
                self.remote.path().to_str().unwrap(),
                StoreOptions::default(),
            )
            .unwrap();
            self.cache_at(self.local.path(), Some(remote), keep_zip)
        }

        fn cache_at(&self, local: &Path, remote: Option<Remote>, keep_zip: bool) -> Cache {
            let options = CacheOptions {
                local: local.into(),
                keep_zip,
                attempts: 3,
                validate_hash: None,
            };
            Cache::new(self.index.clone(), remote, options).unwrap()
        }

        fn local_names(&self) -> Vec<String> {
            let entries = fs::read_dir(self.local.path()).unwrap();
            let mut names: Vec<String> = entries
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        }
    }

    fn open(cache: &Cache) -> Result<Shard> {
        cache.open(0, &AtomicBool::new(false))
    }

    fn third(shard: &Shard) -> Vec<u8> {
        let mut value = Vec::new();
        shard.sample(3, |_, bytes| value = bytes.to_vec()).unwrap();
        value
    }

    fn flip(path: &Path) {
        let mut bytes = fs::read(path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn brings_raw_and_compressed_shards_and_nothing_else() {
        for (level, keep_zip, expected) in [
            (None, false, vec!["s.mds"]),
            (Some("zstd"), false, vec!["s.mds"]),
            (Some("zstd:7"), true, vec!["s.mds", "s.mds.zstd"]),
            (Some("br:1"), true, vec!["s.mds", "s.mds.br"]),
            (Some("bz2"), false, vec!["s.mds"]),
            (Some("gz"), true, vec!["s.mds", "s.mds.gz"]),
            (Some("snappy"), true, vec!["s.mds", "s.mds.snappy"]),
        ] {
            let fixture = Fixture::new(level, "xxh3_64");
            assert_eq!(
                third(&open(&fixture.cache(keep_zip)).unwrap()),
                [3, 0, 0, 0]
            );
            assert_eq!(fixture.local_names(), expected);
        }
    }

    #[test]
    fn reads_in_place_without_a_remote() {
        for level in [None, Some("zstd:3")] {
            let fixture = Fixture::new(level, "sha1");
            let cache = fixture.cache_at(fixture.remote.path(), None, false);
            assert_eq!(third(&open(&cache).unwrap()), [3, 0, 0, 0]);
        }
    }

    #[test]
    fn an_altered_cached_shard_is_fetched_again_and_said() {
        let fixture = Fixture::new(None, "xxh3_64");
        open(&fixture.cache(false)).unwrap();
        flip(&fixture.local.path().join("s.mds"));
        let cache = fixture.cache(false);
        assert_eq!(third(&open(&cache).unwrap()), [3, 0, 0, 0]);
        assert!(cache.take_notices().concat().contains("fetched again"));
        fs::write(fixture.local.path().join("s.mds"), b"short").unwrap();
        assert_eq!(third(&open(&fixture.cache(false)).unwrap()), [3, 0, 0, 0]);
    }

    #[test]
    fn an_altered_remote_is_tried_and_then_named() {
        for (level, name) in [(None, "s.mds"), (Some("zstd"), "s.mds.zstd")] {
            let fixture = Fixture::new(level, "xxh64");
            let object = fixture.remote.path().join(name);
            flip(&object);
            let cache = fixture.cache(false);
            let error = open(&cache).unwrap_err();
            let StreamError::ShardCorrupt {
                shard,
                object: named,
                expected,
                actual,
            } = &error
            else {
                panic!("{error}")
            };
            assert_eq!(shard, name);
            assert!(named.ends_with(object.to_str().unwrap()), "{named}");
            assert!(
                expected.starts_with("xxh64 ")
                    && actual.starts_with("xxh64 ")
                    && expected != actual
            );
            assert_eq!(cache.take_notices().len(), 2);
            assert!(fixture.local_names().is_empty());
        }
    }

    #[test]
    fn a_truncated_remote_is_named_with_both_sizes() {
        let fixture = Fixture::new(None, "xxh3_64");
        let object = fixture.remote.path().join("s.mds");
        let bytes = fs::read(&object).unwrap();
        fs::write(&object, &bytes[..20]).unwrap();
        let message = open(&fixture.cache(false)).unwrap_err().to_string();
        assert!(
            message.contains("20 bytes") && message.contains(&format!("{} bytes", bytes.len())),
            "{message}"
        );
    }

    #[test]
    fn a_missing_shard_is_not_a_corrupt_one() {
        let fixture = Fixture::new(None, "xxh3_64");
        fs::remove_file(fixture.remote.path().join("s.mds")).unwrap();
        for cache in [
            fixture.cache(false),
            fixture.cache_at(fixture.remote.path(), None, false),
        ] {
            assert!(matches!(
                open(&cache).unwrap_err(),
                StreamError::ShardNotFound { .. }
            ));
        }
    }

    #[test]
    fn what_a_killed_process_left_is_no_obstacle() {
        let fixture = Fixture::new(None, "xxh3_64");
        fs::write(fixture.local.path().join(".s.mds.part"), b"half").unwrap();
        assert_eq!(third(&open(&fixture.cache(false)).unwrap()), [3, 0, 0, 0]);
        assert_eq!(fixture.local_names(), ["s.mds"]);
    }

    #[test]
    fn the_index_comes_from_the_remote_and_its_absence_is_named() {
        let fixture = Fixture::new(None, "xxh3_64");
        fs::write(fixture.local.path().join(INDEX_NAME), b"of yesterday").unwrap();
        let remote = Remote::open(
            fixture.remote.path().to_str().unwrap(),
            StoreOptions::default(),
        )
        .unwrap();
        let data = load_index(fixture.local.path(), Some(&remote), &|| false).unwrap();
        assert_eq!(
            data,
            fs::read(fixture.local.path().join(INDEX_NAME)).unwrap()
        );
        fs::remove_file(fixture.remote.path().join(INDEX_NAME)).unwrap();
        let error = load_index(fixture.local.path(), Some(&remote), &|| false).unwrap_err();
        assert!(matches!(error, StreamError::IndexNotFound { .. }));
    }
}
