//! A shard writer: shards are assembled in memory, then hashed, compressed and stored by threads.
//!
//! A [`ShardWriter`] processes a fixed number of shards at once and accepts the next when one is written.
//! Memory is bounded by that number, the shard being submitted, and the compressed form of each. A file appears
//! under its final name only when it is complete and durable; the wait for durability holds no memory and
//! overlaps with the next writes. The caller writes the index, after everything else.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use crossbeam_channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded, unbounded};
use hocket_store::execution::defect;
use hocket_store::{Interrupted, PutMode, Store, StoreError, runtime, thread_refused};

use crate::error::{Result, StreamError};
use crate::semaphore::Semaphore;
use crate::shard::codec::Compression;
use crate::shard::files::{UnfinishedFile, stage};
use crate::shard::hash::Algorithm;
use crate::shard::info::FileInfo;
use crate::shard::raw_file::{AssembledFile, RawFile};

/// The destinations and options of a shard writer.
#[derive(Clone)]
pub struct WriterOptions {
    /// The local folder, if there is one.
    pub local: Option<PathBuf>,
    /// The store, if there is one.
    pub remote: Option<Store>,
    /// The compression of files, if any.
    pub compression: Option<Compression>,
    /// The digests to record in the index, by name.
    pub hashes: Vec<(String, Algorithm)>,
    /// Whether an existing file of the same name is an error; otherwise it is replaced.
    pub only_new: bool,
    /// Number of shards in memory at once; at least 1.
    pub threads: usize,
}

/// The index's record of a written file.
#[derive(Clone, Debug)]
pub struct WrittenFile {
    /// The uncompressed file.
    pub raw: FileInfo,
    /// The compressed file, if that was written.
    pub zip: Option<FileInfo>,
}

type Outcome = (usize, Result<Vec<WrittenFile>>);

/// A writer that stores shards in parallel, in threads named `hocket-seal-*` that end with it.
pub struct ShardWriter {
    jobs: Option<Sender<(usize, Vec<RawFile>)>>,
    outcomes: Receiver<Outcome>,
    /// Written files by submission number.
    written: Vec<Option<Vec<WrittenFile>>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    process: u32,
}

impl ShardWriter {
    /// Starts the threads; writes nothing yet.
    ///
    /// # Errors
    /// [`StreamError::Io`] if no thread can be started.
    pub fn start(options: WriterOptions) -> Result<Self> {
        runtime::start()?;
        let stop = Arc::new(AtomicBool::new(false));
        // Without capacity: a job is handed over only when a thread is free to take it.
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
        let in_hand = Arc::new(Semaphore::new(options.threads.max(1)));
        // Twice as many threads, because about half of them wait for the disk.
        for number in 0..2 * options.threads.max(1) {
            let (options, queue, report) = (options.clone(), queue.clone(), report.clone());
            let (stop, in_hand) = (stop.clone(), in_hand.clone());
            let name = format!("hocket-seal-{number}");
            let body = move || {
                work(
                    &options,
                    &queue,
                    &report,
                    &|| stop.load(Ordering::Relaxed),
                    &in_hand,
                )
            };
            match std::thread::Builder::new().name(name.clone()).spawn(body) {
                Ok(thread) => writer.threads.push(thread),
                Err(error) if number == 0 => {
                    let reason = thread_refused(&error);
                    return Err(StreamError::Io { path: name, reason });
                }
                // The threads that exist write all shards.
                Err(_) => break,
            }
        }
        Ok(writer)
    }

    /// Submits a shard; returns it to the caller if no thread becomes free within `patience`.
    ///
    /// # Errors
    /// The error of an earlier shard; the writer is then unusable. [`StreamError::Closed`] after that or after
    /// `finish`. [`StreamError::Config`] in a forked child, which has none of the threads.
    pub fn submit(
        &mut self,
        shard: Vec<RawFile>,
        patience: Duration,
    ) -> Result<Option<Vec<RawFile>>> {
        self.check_process()?;
        // Once a failure has been reported, further ones are not.
        if self.jobs.is_none() {
            return Err(StreamError::Closed);
        }
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
            Err(SendTimeoutError::Disconnected(_)) => Err(thread_lost()),
        }
    }

    /// Waits until all shards are stored and returns their records in the order of submission, or none if
    /// `patience` runs out first.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn finish(&mut self, patience: Duration) -> Result<Option<Vec<Vec<WrittenFile>>>> {
        self.check_process()?;
        if self.stop.load(Ordering::Relaxed) {
            return Err(StreamError::Closed);
        }
        self.jobs = None;
        while self.written.iter().any(Option::is_none) {
            match self.outcomes.recv_timeout(patience) {
                Ok(outcome) => self.note(outcome)?,
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => return Err(thread_lost()),
            }
        }
        let written = std::mem::take(&mut self.written);
        Ok(Some(written.into_iter().flatten().collect()))
    }

    /// Returns the number of stored shards.
    pub fn num_written(&self) -> usize {
        self.written.iter().flatten().count()
    }

    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(StreamError::config(
            "this writer belongs to the parent of this forked process: write there, or create a new writer in this process",
        ))
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
            // A forked child has the handles but not the threads, so there is nothing to join. Dropping a
            // channel takes its lock, which one of the threads may have held at the fork.
            threads.into_iter().for_each(std::mem::forget);
            std::mem::forget(self.jobs.take());
            std::mem::forget(std::mem::replace(
                &mut self.outcomes,
                crossbeam_channel::never(),
            ));
            return;
        }
        self.give_up();
        // Joins the threads, so that no file appears after the writer is gone.
        for thread in threads {
            let _ = thread.join();
        }
    }
}

/// Returns the error of threads that ended without a report, as after a panic.
fn thread_lost() -> StreamError {
    StreamError::Store(defect("a writer's thread"))
}

fn work(
    options: &WriterOptions,
    queue: &Receiver<(usize, Vec<RawFile>)>,
    report: &Sender<Outcome>,
    interrupted: Interrupted<'_>,
    in_hand: &Semaphore,
) {
    loop {
        let permit = in_hand.acquire();
        let Ok((number, shard)) = queue.recv() else {
            return;
        };
        let files = shard
            .into_iter()
            .map(|file| place(options, file, interrupted));
        let files = files.collect::<Result<Vec<_>>>();
        drop(permit);
        let written = files.and_then(|files| files.into_iter().map(PlacedFile::commit).collect());
        if report.send((number, written)).is_err() {
            return;
        }
    }
}

/// A file that is written to all its destinations but not yet renamed in the folder.
pub(crate) struct PlacedFile {
    written: WrittenFile,
    part: Option<UnfinishedFile>,
}

impl PlacedFile {
    /// Waits until the file is durable, and renames it.
    ///
    /// # Errors
    /// [`StreamError::Io`] if the disk reports an error.
    pub(crate) fn commit(self) -> Result<WrittenFile> {
        self.part.map_or(Ok(()), UnfinishedFile::commit)?;
        Ok(self.written)
    }
}

/// Writes one file to all its destinations.
///
/// # Errors
/// As [`ShardWriter::submit`].
pub(crate) fn place(
    options: &WriterOptions,
    file: RawFile,
    interrupted: Interrupted<'_>,
) -> Result<PlacedFile> {
    let basename = file.basename.clone();
    let contents = file.into_contents();
    let raw = describe(basename, &contents, &options.hashes);
    let Some(compression) = options.compression else {
        let part = put(options, &raw.basename, contents, interrupted)?;
        let written = WrittenFile { raw, zip: None };
        return Ok(PlacedFile { written, part });
    };
    let packed = compression.pack(&contents, interrupted)?;
    drop(contents);
    let name = format!("{}.{}", raw.basename, compression.extension());
    let zip = describe(name, &packed, &options.hashes);
    let contents = AssembledFile::new(&[], packed.into());
    let part = put(options, &zip.basename, contents, interrupted)?;
    let zip = Some(zip);
    let written = WrittenFile { raw, zip };
    Ok(PlacedFile { written, part })
}

fn put(
    options: &WriterOptions,
    name: &str,
    contents: AssembledFile,
    interrupted: Interrupted<'_>,
) -> Result<Option<UnfinishedFile>> {
    if interrupted() {
        return Err(StreamError::Closed);
    }
    let local = options.local.as_ref();
    let part = local
        .map(|local| stage(&local.join(name), &contents, options.only_new))
        .transpose()?;
    let Some(remote) = options.remote.clone() else {
        return Ok(part);
    };
    let (key, contents) = (name.to_owned(), Bytes::from_owner(contents));
    let mode = match options.only_new {
        true => PutMode::Create,
        false => PutMode::Overwrite,
    };
    let sent = async move { remote.put(&key, contents, mode).await };
    match runtime::wait(sent, interrupted).and_then(|answer| answer) {
        Ok(_) => Ok(part),
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
    fn shards_are_written_in_the_order_of_submission() {
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
    fn a_failure_is_returned_and_ends_the_writer() {
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

    #[test]
    fn a_thread_that_ends_without_a_report_is_an_error_of_its_own() {
        let (jobs, queue) = bounded(0);
        let mut writer = ShardWriter {
            jobs: Some(jobs),
            outcomes: unbounded().1,
            written: vec![None],
            stop: Arc::default(),
            threads: Vec::new(),
            process: std::process::id(),
        };
        drop(queue);
        for lost in [
            submit(&mut writer, 1),
            writer.finish(Duration::ZERO).map(drop),
        ] {
            let told = lost.unwrap_err().to_string();
            assert!(
                told.contains("a writer's thread ended without a result"),
                "{told}"
            );
        }
    }

    #[test]
    fn a_forked_child_does_not_use_the_writers_channels() {
        let (jobs, queue) = bounded(0);
        let (report, outcomes) = unbounded();
        let mut writer = ShardWriter {
            jobs: Some(jobs),
            outcomes,
            written: Vec::new(),
            stop: Arc::default(),
            threads: Vec::new(),
            process: 0,
        };
        let outcomes = [
            submit(&mut writer, 0),
            writer.finish(Duration::ZERO).map(drop),
        ];
        assert!(
            outcomes
                .iter()
                .all(|outcome| matches!(outcome, Err(StreamError::Config { .. })))
        );
        drop(writer);
        assert!(queue.try_recv().is_err_and(|error| error.is_empty()));
        assert!(report.send((0, Ok(Vec::new()))).is_ok());
    }
}
