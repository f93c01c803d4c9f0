//! A reader that prefetches batches in order.
//!
//! Three kinds of threads serve one reader. `hocket-plan` follows the order ahead of the cursor and requests
//! the shards that it needs, within a budget of bytes; at the end of the epoch it continues with the first
//! shards of the next one, so that they are available when that epoch begins. `hocket-fetch-*` open these
//! shards, from the cache or through the remote. `hocket-batch` takes the batches in turn, waits for the shards
//! of each, and copies its samples into contiguous columns; a few finished batches wait in a queue. None of
//! these threads communicates with another process, and dropping the reader ends them.

pub mod batch;
mod batched_open;
pub mod lookup;
pub mod sources;
mod window;

use std::collections::HashSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use hocket_store::thread_refused;

use crate::error::{Result, StreamError};
use crate::order::{BatchShare, Order, SamplePlace};
use crate::reader::batch::{Batch, BatchGatherer};
use crate::reader::sources::DatasetSources;
use crate::reader::window::ShardWindow;
use crate::semaphore::Semaphore;

/// Limit of the planner's distance from the cursor, in samples of this rank, so that shards are not requested
/// long before they are needed.
const LOOKAHEAD_SAMPLES: u64 = 1 << 16;

/// The batches that a reader returns, and the limits of its prefetch.
#[derive(Clone, Debug)]
pub struct ReaderOptions {
    /// This rank.
    pub rank: u64,
    /// Number of ranks that share each batch.
    pub world: u64,
    /// The first batch.
    pub first: u64,
    /// Distance to the next batch: 1, or the number of worker processes that take turns.
    pub stride: u64,
    /// Bytes of shards that may be prefetched before their first use.
    pub prefetch_bytes: u64,
    /// Number of finished batches that may wait for the consumer.
    pub prefetch_batches: usize,
    /// Number of shards fetched concurrently.
    pub fetch_threads: usize,
}

/// The batches of one epoch for one rank, from a given batch on.
pub struct Reader {
    batches: Receiver<Result<Option<Batch>>>,
    window: Arc<ShardWindow>,
    threads: Vec<JoinHandle<()>>,
    process: u32,
    is_done: bool,
}

impl Reader {
    /// Starts reading in threads and returns at once.
    ///
    /// `following` is the next epoch's order, if known. Its batches are not returned; its first shards are
    /// fetched, within the same budget of bytes, while the last batches of this epoch are consumed.
    ///
    /// # Errors
    /// [`StreamError::Config`] for a rank outside its world or a stride of 0; [`StreamError::Io`] if no thread
    /// can be started.
    pub fn start(
        sources: Arc<DatasetSources>,
        order: Arc<Order>,
        following: Option<Arc<Order>>,
        options: ReaderOptions,
    ) -> Result<Self> {
        if options.rank >= options.world || options.stride == 0 {
            return Err(StreamError::config(format!(
                "rank {} of {} with a stride of {}: expected a rank below the world size and a stride of at least 1",
                options.rank, options.world, options.stride
            )));
        }
        let (wanted, requests) = unbounded();
        let (finished, batches) = bounded(options.prefetch_batches.max(1));
        let window = Arc::new(ShardWindow::new(
            wanted,
            options.prefetch_bytes,
            sources.limit_bytes(),
        ));
        let mut reader = Self {
            batches,
            window: window.clone(),
            threads: Vec::new(),
            process: std::process::id(),
            is_done: false,
        };
        let num_fetching = options.fetch_threads.max(1);
        let fetching = Arc::new(Semaphore::new(num_fetching));
        let sequence = BatchSequence { order, options };
        let next = following.map(|order| sequence.followed_by(order));
        let epochs: Vec<BatchSequence> = std::iter::once(sequence.clone()).chain(next).collect();
        let (planned, shared) = (sources.clone(), window.clone());
        reader.spawn("hocket-plan".into(), move || {
            plan(&epochs, &planned, &shared)
        })?;
        let (read, ready) = (sources.clone(), window.clone());
        reader.spawn("hocket-batch".into(), move || {
            assemble(&sequence, &read, &ready, &finished)
        })?;
        // Twice as many threads, because up to half of them wait for the disk, which flushes their files together.
        for number in 0..(2 * num_fetching).min(sources.num_shards().max(1)) {
            let (sources, window, requests) = (sources.clone(), window.clone(), requests.clone());
            let fetching = fetching.clone();
            let started = reader.spawn(format!("hocket-fetch-{number}"), move || {
                fetch(&sources, &window, &requests, &fetching)
            });
            match started {
                // The system grants no more threads; those that exist fetch all shards.
                Err(_) if number > 0 => break,
                _ => started?,
            }
        }
        Ok(reader)
    }

    /// Returns the next batch, `Ok(None)` at the end of the epoch, or `Err(None)` if `patience` runs out first.
    ///
    /// # Errors
    /// `Err(Some(error))` with the error that stopped a thread, or in a forked child, which has no threads; the
    /// reader has then ended.
    pub fn next(
        &mut self,
        patience: Duration,
    ) -> std::result::Result<Option<Batch>, Option<StreamError>> {
        if self.is_done {
            return Ok(None);
        }
        if self.process != std::process::id() {
            self.is_done = true;
            return Err(Some(StreamError::config(
                "this iteration belongs to the parent of this forked process, where it continues: start a new iteration in this process",
            )));
        }
        match self.batches.recv_timeout(patience) {
            Ok(Ok(batch)) => {
                self.is_done = batch.is_none();
                Ok(batch)
            }
            Ok(Err(error)) => {
                self.is_done = true;
                Err(Some(error))
            }
            Err(RecvTimeoutError::Timeout) => Err(None),
            Err(RecvTimeoutError::Disconnected) => {
                self.is_done = true;
                // The assembler always announces its end, so a closed channel means that it died.
                Err(Some(StreamError::config(
                    "a reader thread ended unexpectedly; this is a defect of Hocket",
                )))
            }
        }
    }

    /// Returns the number of finished batches in the queue.
    pub fn queued(&self) -> usize {
        self.batches.len()
    }

    fn spawn(&mut self, name: String, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let handle = std::thread::Builder::new()
            .name(name.clone())
            .spawn(run)
            .map_err(|error| StreamError::Io {
                path: name,
                reason: thread_refused(&error),
            })?;
        self.threads.push(handle);
        Ok(())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        if self.process != std::process::id() {
            // A forked child has the handles but not the threads, so there is nothing to join. Dropping a
            // channel takes its lock, which one of the threads may have held at the fork.
            threads.into_iter().for_each(std::mem::forget);
            std::mem::forget(self.window.clone());
            std::mem::forget(std::mem::replace(
                &mut self.batches,
                crossbeam_channel::never(),
            ));
            return;
        }
        self.window.stop();
        // An assembler that waits for room in the queue then finds no receiver and ends.
        self.batches = crossbeam_channel::never();
        for thread in threads {
            let _ = thread.join();
        }
    }
}

/// The sequence of batches that a reader returns, addressed by turn.
#[derive(Clone)]
struct BatchSequence {
    order: Arc<Order>,
    options: ReaderOptions,
}

impl BatchSequence {
    /// Returns the sequence of the next epoch, in which each worker starts with a different one of the first
    /// batches.
    fn followed_by(&self, order: Arc<Order>) -> Self {
        let mut options = self.options.clone();
        options.first %= options.stride;
        Self { order, options }
    }

    /// Returns the batch of turn `turn` and the share to read, if the epoch has it.
    fn at(&self, turn: u64) -> Option<(u64, BatchShare)> {
        let number = self
            .options
            .stride
            .checked_mul(turn)?
            .checked_add(self.options.first)?;
        (number < self.order.num_batches()).then(|| {
            (
                number,
                self.order
                    .share(number, self.options.rank, self.options.world),
            )
        })
    }

    /// Returns the locations of the share's samples, and their shards in order of first use.
    fn locate(&self, share: &BatchShare) -> (Vec<SamplePlace>, Vec<u32>) {
        let mut locations = Vec::with_capacity((share.range.end - share.range.start) as usize);
        self.order
            .locate(share.from, share.range.clone(), &mut locations);
        let mut seen = HashSet::new();
        let shards = locations
            .iter()
            .map(|location| location.shard)
            .filter(|&shard| seen.insert(shard))
            .collect();
        (locations, shards)
    }
}

fn plan(epochs: &[BatchSequence], sources: &DatasetSources, window: &ShardWindow) {
    let mut turn = 0;
    for (number, sequence) in epochs.iter().enumerate() {
        // A shard that does not fit in the cache would be gone when its epoch begins.
        if number > 0 && sources.has_passed() {
            return;
        }
        for (_, share) in (0..).map_while(|turn| sequence.at(turn)) {
            let distance = (LOOKAHEAD_SAMPLES / share.local.max(1)).max(2);
            if window.wait_for_turn(turn, distance).is_err() {
                return;
            }
            for number in sequence.locate(&share).1 {
                let bytes = sources.shard_bytes(number);
                if window.ask_ahead(number, bytes, turn).is_err() {
                    return;
                }
            }
            turn += 1;
        }
    }
}

fn fetch(
    sources: &DatasetSources,
    window: &ShardWindow,
    requests: &Receiver<u32>,
    fetching: &Semaphore,
) {
    loop {
        let permit = fetching.acquire();
        // The channel closes when the window is stopped.
        let Ok(number) = requests.recv() else {
            return;
        };
        if window.is_stopped() {
            return;
        }
        let opened = sources.open_early(number, &|| window.is_stopped());
        drop(permit);
        let unsettled = match opened {
            Ok((shard, unsettled)) => {
                window.put(number, Ok(shard));
                unsettled
            }
            Err(error) => {
                window.put(number, Err(error));
                continue;
            }
        };
        // The shard is already in use; the next batch that needs it receives the error.
        if let Err(error) = unsettled.commit() {
            window.put(number, Err(error));
        }
    }
}

fn assemble(
    sequence: &BatchSequence,
    sources: &DatasetSources,
    window: &ShardWindow,
    finished: &Sender<Result<Option<Batch>>>,
) {
    let mut gatherer = BatchGatherer::new(sources.columns().clone());
    for turn in 0.. {
        let Some((number, share)) = sequence.at(turn) else {
            // Fetches for the next epoch may continue until the consumer has finished this one.
            let _ = finished.send(Ok(None));
            return;
        };
        let (locations, numbers) = sequence.locate(&share);
        let shards = batched_open::open(sources, window, &locations, &numbers, turn);
        let batch = shards.and_then(|shards| {
            let columns = gatherer.gather(&locations, &shards)?;
            Ok(Some(Batch {
                number,
                share,
                columns,
            }))
        });
        let failed = batch.is_err();
        if finished.send(batch).is_err() || failed {
            break;
        }
    }
    window.stop();
}

#[cfg(test)]
mod tests;
