//! Shards written: assembled in memory, then digested, compressed and put in place by threads.
//!
//! A [`ShardWriter`] has as many shards in hand as it has threads, and takes the next one when one of them
//! is done: memory is bounded by that number, the one being submitted, and the packed form of each. Nothing
//! appears under a final name before it is whole. The index is the caller's, and the last thing written.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use crossbeam_channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded, unbounded};
use hocket_store::{PutMode, Store, StoreError, runtime};

use crate::buffers::Buffer;
use crate::codec::Compression;
use crate::error::{Result, StreamError};
use crate::files::{write_new, write_whole};
use crate::hash::Algorithm;
use crate::index::FileInfo;
use crate::samples::Samples;

/// Where shards go, and how.
#[derive(Clone)]
pub struct WriterOptions {
    /// The local folder, if there is one.
    pub local: Option<PathBuf>,
    /// The store, if there is one.
    pub remote: Option<Store>,
    /// How files are compressed, if they are.
    pub compression: Option<Compression>,
    /// The digests that the index is to carry, by name.
    pub hashes: Vec<(String, Algorithm)>,
    /// Whether a file of the same name is an error rather than replaced.
    pub only_new: bool,
    /// Shards worked on at once; at least 1.
    pub threads: usize,
}

/// One file of a shard in the making: a head, and what follows it.
#[derive(Debug, Default)]
pub struct RawFile {
    /// Its name, uncompressed.
    pub basename: String,
    /// What comes first. Known last, so it is put there by the thread that stores the file.
    pub head: Vec<u8>,
    /// The rest.
    pub rest: Buffer,
}

impl RawFile {
    /// All of it.
    pub fn into_contents(mut self) -> Buffer {
        self.rest.splice(..0, self.head);
        self.rest
    }
}

/// What the index is to say of a file that was written.
#[derive(Clone, Debug)]
pub struct Written {
    /// The uncompressed file.
    pub raw: FileInfo,
    /// The compressed one, if it is that which was written.
    pub zip: Option<FileInfo>,
}

/// An MDS shard's one file: count, offsets, `config`, samples.
///
/// # Errors
/// [`StreamError::Config`] where the shard would pass the 4 GiB that its offsets can reach.
pub fn assemble(basename: String, config: &[u8], samples: Samples) -> Result<RawFile> {
    let first = 4 + 4 * (samples.len() + 1) + config.len();
    let mut head = table(first, &samples)?;
    head.extend_from_slice(config);
    Ok(RawFile {
        basename,
        head,
        rest: samples.data,
    })
}

/// A text shard's two files: `header` and samples; count, offsets and `config`.
///
/// # Errors
/// As [`assemble`].
pub fn assemble_text(
    basename: String,
    config: &[u8],
    header: &[u8],
    samples: Samples,
) -> Result<(RawFile, RawFile)> {
    let mut meta = table(header.len(), &samples)?;
    meta.extend_from_slice(config);
    let meta = RawFile {
        basename: format!("{basename}.meta"),
        head: meta,
        rest: Buffer::default(),
    };
    let data = RawFile {
        basename,
        head: header.into(),
        rest: samples.data,
    };
    Ok((data, meta))
}

/// Count and offsets of samples that begin at `first`.
fn table(first: usize, samples: &Samples) -> Result<Vec<u8>> {
    let end = first + samples.data.len();
    let (Ok(count), Ok(_)) = (u32::try_from(samples.len()), u32::try_from(end)) else {
        return Err(StreamError::config(format!(
            "a shard of {} samples would have {end} bytes: expected fewer than 2^32; set `size_limit` below 4 GiB",
            samples.len()
        )));
    };
    let mut table = Vec::with_capacity(first);
    table.extend_from_slice(&count.to_le_bytes());
    for end in [0].iter().chain(&samples.ends) {
        table.extend_from_slice(&((first + end) as u32).to_le_bytes());
    }
    Ok(table)
}

type Outcome = (usize, Result<Vec<Written>>);

/// Writes shards side by side, in threads named `hocket-seal-*` that end with it.
pub struct ShardWriter {
    jobs: Option<Sender<(usize, Vec<RawFile>)>>,
    outcomes: Receiver<Outcome>,
    /// By the numbers of their submission.
    written: Vec<Option<Vec<Written>>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    process: u32,
}

impl ShardWriter {
    /// Starts the threads; writes nothing yet.
    ///
    /// # Errors
    /// [`StreamError::Io`] where no thread can be started.
    pub fn start(options: WriterOptions) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        // Without room: a job is handed over when a thread is free to take it.
        let (jobs, queue) = bounded(0);
        let (report, outcomes) = unbounded();
        let mut writer = Self {
            jobs: Some(jobs),
            outcomes,
            written: Vec::new(),
            stop: stop.clone(),
            threads: Vec::new(),
            process: std::process::id(),
        };
        for number in 0..options.threads.max(1) {
            let (options, queue, report) = (options.clone(), queue.clone(), report.clone());
            let stop = stop.clone();
            let name = format!("hocket-seal-{number}");
            let thread = std::thread::Builder::new()
                .name(name.clone())
                .spawn(move || work(&options, &queue, &report, &stop))
                .map_err(|error| StreamError::io(name.as_ref(), "start the thread", &error))?;
            writer.threads.push(thread);
        }
        Ok(writer)
    }

    /// Hands a shard over; gives it back where no thread was free within `patience`.
    ///
    /// # Errors
    /// What an earlier shard met: the writer is then of no further use. [`StreamError::Closed`] after that
    /// or after `finish`.
    pub fn submit(
        &mut self,
        shard: Vec<RawFile>,
        patience: Duration,
    ) -> Result<Option<Vec<RawFile>>> {
        while let Ok(outcome) = self.outcomes.try_recv() {
            self.note(outcome)?;
        }
        let jobs = self.jobs.as_ref().ok_or(StreamError::Closed)?;
        match jobs.send_timeout((self.written.len(), shard), patience) {
            Ok(()) => {
                self.written.push(None);
                Ok(None)
            }
            Err(SendTimeoutError::Timeout((_, shard))) => Ok(Some(shard)),
            Err(SendTimeoutError::Disconnected(_)) => Err(StreamError::Closed),
        }
    }

    /// Waits until all shards are in place; what was written, in the order of submission, or `None` where
    /// that is not so within `patience`.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn finish(&mut self, patience: Duration) -> Result<Option<Vec<Vec<Written>>>> {
        self.jobs = None;
        while self.written.iter().any(Option::is_none) {
            match self.outcomes.recv_timeout(patience) {
                Ok(outcome) => self.note(outcome)?,
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => return Err(StreamError::Closed),
            }
        }
        let written = std::mem::take(&mut self.written);
        Ok(Some(written.into_iter().flatten().collect()))
    }

    /// How many shards are in place.
    pub fn num_written(&self) -> usize {
        self.written.iter().flatten().count()
    }

    fn note(&mut self, (number, outcome): Outcome) -> Result<()> {
        let written = outcome.inspect_err(|_| self.give_up())?;
        if let Some(slot) = self.written.get_mut(number) {
            *slot = Some(written);
        }
        Ok(())
    }

    fn give_up(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.jobs = None;
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        if self.process != std::process::id() {
            // A forked child has the handles and not the threads: there is nobody to join.
            threads.into_iter().for_each(std::mem::forget);
            return;
        }
        self.give_up();
        // Joined, so that no file appears after its writer is gone.
        for thread in threads {
            let _ = thread.join();
        }
    }
}

fn work(
    options: &WriterOptions,
    queue: &Receiver<(usize, Vec<RawFile>)>,
    report: &Sender<Outcome>,
    stop: &AtomicBool,
) {
    for (number, shard) in queue {
        let written = shard.into_iter().map(|file| write(options, file, stop));
        let written = written.collect::<Result<Vec<_>>>();
        if report.send((number, written)).is_err() {
            return;
        }
    }
}

/// Writes one file to all its places, and says what the index is to say of it.
///
/// # Errors
/// As [`ShardWriter::submit`].
pub fn write(options: &WriterOptions, file: RawFile, stop: &AtomicBool) -> Result<Written> {
    let basename = file.basename.clone();
    let contents = file.into_contents();
    let raw = describe(basename, &contents, &options.hashes);
    let Some(compression) = options.compression else {
        put(options, &raw.basename, contents, stop)?;
        return Ok(Written { raw, zip: None });
    };
    let packed = compression.pack(&contents, stop)?;
    drop(contents);
    let name = format!("{}.{}", raw.basename, compression.extension());
    let zip = describe(name, &packed, &options.hashes);
    put(options, &zip.basename, packed.into(), stop)?;
    Ok(Written {
        raw,
        zip: Some(zip),
    })
}

fn put(options: &WriterOptions, name: &str, contents: Buffer, stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) {
        return Err(StreamError::Closed);
    }
    if let Some(local) = &options.local {
        let write = if options.only_new {
            write_new
        } else {
            write_whole
        };
        write(&local.join(name), &contents)?;
    }
    let Some(remote) = options.remote.clone() else {
        return Ok(());
    };
    let (key, contents) = (name.to_owned(), Bytes::from_owner(contents));
    let mode = match options.only_new {
        true => PutMode::Create,
        false => PutMode::Overwrite,
    };
    let sent = async move { remote.put(&key, contents, mode).await };
    match runtime::wait(sent, &|| stop.load(Ordering::Relaxed)).and_then(|answer| answer) {
        Ok(_) => Ok(()),
        Err(StoreError::Interrupted) => Err(StreamError::Closed),
        Err(error) => Err(error.into()),
    }
}

fn describe(basename: String, contents: &[u8], hashes: &[(String, Algorithm)]) -> FileInfo {
    let digest = |(name, algorithm): &(String, Algorithm)| (name.clone(), algorithm.hex(contents));
    FileInfo {
        basename,
        bytes: contents.len() as u64,
        hashes: hashes.iter().map(digest).collect(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use hocket_store::StoreOptions;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// Two samples of the columns `a: int`, `b: str`, `c: ndarray`, as the format's own writer lays them
    /// out: offsets 239, 267 and 290.
    #[test]
    fn matches_the_reference_writer() {
        let config = br#"{"column_encodings": ["int", "str", "ndarray"], "column_names": ["a", "b", "c"], "column_sizes": [8, null, null], "compression": "zstd:7", "format": "mds", "hashes": ["sha1", "xxh3_64"], "size_limit": 1048576, "version": 2}"#;
        let samples: [&[u8]; 2] = [
            b"\x02\0\0\0\x0a\0\0\0\x05\0\0\0\0\0\0\0hi\x11\x08\x01\x03\x01\0\x02\0\x03\0",
            b"\0\0\0\0\x07\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\x22\x04\x01\0\0\xe0\x40",
        ];
        let file = assemble(String::new(), config, samples.iter().collect()).unwrap();
        let shard = file.into_contents();
        assert_eq!(shard.len(), 290);
        assert_eq!(
            shard[..16],
            [2, 0, 0, 0, 239, 0, 0, 0, 11, 1, 0, 0, 34, 1, 0, 0]
        );
        assert_eq!(
            Algorithm::Sha1.hex(&shard),
            "c7bf4d885a9acb8f883d43c4552ed7e9e7ba677e"
        );
        assert_eq!(Algorithm::Xxh3_64.hex(&shard), "d02a354e92e5a0d0");
    }

    /// Of memory that nobody touches.
    #[test]
    fn four_gib_are_refused() {
        let samples = || Samples {
            data: vec![0; 1 << 32].into(),
            ends: vec![1 << 32],
            ..Samples::default()
        };
        for refused in [
            assemble(String::new(), b"{}", samples()).unwrap_err(),
            assemble_text(String::new(), b"{}", b"", samples()).unwrap_err(),
        ] {
            let message = refused.to_string();
            assert!(
                message.contains("2^32") && message.contains("size_limit"),
                "{message}"
            );
        }
    }

    fn options(local: Option<PathBuf>, remote: Option<Store>, threads: usize) -> WriterOptions {
        WriterOptions {
            local,
            remote,
            compression: Some(Compression::parse("zstd:1").unwrap()),
            hashes: vec![("xxh64".into(), Algorithm::Xxh64)],
            only_new: false,
            threads,
        }
    }

    fn submit(writer: &mut ShardWriter, number: usize) -> Result<()> {
        let mut shard = vec![RawFile {
            basename: format!("{number}.bin"),
            head: vec![number as u8; 5],
            rest: vec![number as u8; 5000].into(),
        }];
        loop {
            match writer.submit(shard, Duration::from_millis(5))? {
                None => return Ok(()),
                Some(back) => shard = back,
            }
        }
    }

    #[test]
    fn shards_come_out_in_the_order_in_which_they_went_in() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open("memory://order", StoreOptions::default()).unwrap();
        let options = options(Some(folder.path().into()), Some(store.clone()), 3);
        let mut writer = ShardWriter::start(options).unwrap();
        for number in 0..20 {
            submit(&mut writer, number).unwrap();
        }
        let written = writer.finish(PATIENCE).unwrap().unwrap();
        assert_eq!(written.len(), 20);
        for (number, files) in written.iter().enumerate() {
            let zip = files[0].zip.as_ref().unwrap();
            assert_eq!(zip.basename, format!("{number}.bin.zstd"));
            let local = std::fs::read(folder.path().join(&zip.basename)).unwrap();
            let (handle, key) = (store.clone(), zip.basename.clone());
            let remote = runtime::wait(async move { handle.get(&key).await }, &|| false);
            assert_eq!(remote.unwrap().unwrap(), local);
            assert_eq!(Algorithm::Xxh64.hex(&local), zip.hashes[0].1);
        }
    }

    #[test]
    fn a_failure_surfaces_and_ends_the_writer() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"in the way").unwrap();
        let mut writer = ShardWriter::start(options(Some(file), None, 2)).unwrap();
        let error = (0..100)
            .find_map(|number| submit(&mut writer, number).err())
            .or_else(|| writer.finish(PATIENCE).err());
        assert!(matches!(error, Some(StreamError::Io { .. })), "{error:?}");
        assert!(matches!(submit(&mut writer, 0), Err(StreamError::Closed)));
    }
}
