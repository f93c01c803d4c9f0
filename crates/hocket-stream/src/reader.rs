//! Batches in order, read ahead of the consumer.
//!
//! Three kinds of threads serve one reader. `hocket-plan` walks the order ahead of the cursor and asks
//! for the shards it meets, within a budget of bytes. `hocket-fetch-*` open them: out of the cache, or by
//! way of the remote. `hocket-batch` takes the batches in turn, waits for the shards of each, and copies
//! its samples into contiguous columns; a few finished ones wait in a queue.
//! None of them talks to another process, and dropping the reader ends them all.

use std::collections::HashSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};

use crate::batch::{Batch, gather};
use crate::cache::Cache;
use crate::error::{Result, StreamError};
use crate::order::{Location, Order, Share};
use crate::window::Window;

/// The planner never walks further ahead than this many of the rank's samples: beyond, shards would be
/// found that are not needed for long.
const LOOKAHEAD_SAMPLES: u64 = 1 << 16;

/// Which batches a reader gives and how far it works ahead.
#[derive(Clone, Debug)]
pub struct ReaderOptions {
    /// This rank.
    pub rank: u64,
    /// How many ranks divide each batch.
    pub world: u64,
    /// The first batch.
    pub first: u64,
    /// The distance to the next one: 1, or the number of worker processes that take turns.
    pub stride: u64,
    /// Bytes of shards that may be fetched ahead of their first use.
    pub prefetch_bytes: u64,
    /// Finished batches that may wait for the consumer.
    pub prefetch_batches: usize,
    /// Threads that fetch shards.
    pub fetch_threads: usize,
}

/// The batches of one epoch for one rank, from some batch on.
pub struct Reader {
    batches: Receiver<Result<Option<Batch>>>,
    window: Arc<Window>,
    threads: Vec<JoinHandle<()>>,
    process: u32,
    is_done: bool,
}

impl Reader {
    /// Starts reading. Returns at once; the threads do the rest.
    ///
    /// # Errors
    /// [`StreamError::Config`] for a rank outside its world or a stride of 0; [`StreamError::Io`] where no
    /// thread can be started.
    pub fn start(cache: Arc<Cache>, order: Arc<Order>, options: ReaderOptions) -> Result<Self> {
        if options.rank >= options.world || options.stride == 0 {
            return Err(StreamError::config(format!(
                "rank {} of {} with a stride of {}: expected a rank below the world size and a stride of at least 1",
                options.rank, options.world, options.stride
            )));
        }
        let (wanted, requests) = unbounded();
        let (finished, batches) = bounded(options.prefetch_batches.max(1));
        let window = Arc::new(Window::new(wanted, options.prefetch_bytes));
        let mut reader = Self {
            batches,
            window: window.clone(),
            threads: Vec::new(),
            process: std::process::id(),
            is_done: false,
        };
        for number in 0..options.fetch_threads.max(1) {
            let (cache, window, requests) = (cache.clone(), window.clone(), requests.clone());
            reader.spawn(format!("hocket-fetch-{number}"), move || {
                fetch(&cache, &window, &requests)
            })?;
        }
        let sequence = Sequence { order, options };
        let (for_plan, index, shared) = (sequence.clone(), cache.clone(), window.clone());
        reader.spawn("hocket-plan".into(), move || {
            plan(&for_plan, &index, &shared)
        })?;
        reader.spawn("hocket-batch".into(), move || {
            assemble(&sequence, &cache, &window, &finished)
        })?;
        Ok(reader)
    }

    /// The next batch, `Ok(None)` at the end of the epoch, or `Err(None)` when `patience` ran out first.
    ///
    /// # Errors
    /// `Err(Some(error))` with what stopped a thread; the reader is then at its end.
    pub fn next(
        &mut self,
        patience: Duration,
    ) -> std::result::Result<Option<Batch>, Option<StreamError>> {
        if self.is_done {
            return Ok(None);
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
                // The assembler announces its end; silence means that it died.
                Err(Some(StreamError::config(
                    "a reading thread ended before its time; please report it",
                )))
            }
        }
    }

    fn spawn(&mut self, name: String, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let handle = std::thread::Builder::new()
            .name(name.clone())
            .spawn(run)
            .map_err(|error| StreamError::Io {
                path: name,
                reason: format!("could not start the thread: {error}"),
            })?;
        self.threads.push(handle);
        Ok(())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        if self.process != std::process::id() {
            // A forked child has the handles and not the threads: there is nobody to join.
            threads.into_iter().for_each(std::mem::forget);
            return;
        }
        self.window.stop();
        // An assembler that waits for room in the queue finds no receiver and ends.
        self.batches = crossbeam_channel::never();
        for thread in threads {
            let _ = thread.join();
        }
    }
}

/// The batches that a reader gives, in their turns.
#[derive(Clone)]
struct Sequence {
    order: Arc<Order>,
    options: ReaderOptions,
}

impl Sequence {
    /// The batch of turn `turn`, if the epoch has it, and what of it is read.
    fn at(&self, turn: u64) -> Option<(u64, Share)> {
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

    /// Where the share's samples lie, and their shards in the order in which they are met.
    fn locate(&self, share: &Share) -> (Vec<Location>, Vec<u32>) {
        let mut locations = Vec::with_capacity((share.range.end - share.range.start) as usize);
        self.order
            .locate(share.from, share.range.clone(), &mut locations);
        let mut met = HashSet::new();
        let shards = locations
            .iter()
            .map(|location| location.shard)
            .filter(|&shard| met.insert(shard))
            .collect();
        (locations, shards)
    }
}

fn plan(sequence: &Sequence, cache: &Cache, window: &Window) {
    let shards = cache.index().shards();
    for turn in 0.. {
        let Some((_, share)) = sequence.at(turn) else {
            return;
        };
        let distance = (LOOKAHEAD_SAMPLES / share.local.max(1)).max(2);
        if window.wait_for_turn(turn, distance).is_err() {
            return;
        }
        for number in sequence.locate(&share).1 {
            let bytes = shards
                .get(number as usize)
                .map_or(0, |shard| shard.raw.bytes);
            if window.ask_ahead(number, bytes, turn).is_err() {
                return;
            }
        }
    }
}

fn fetch(cache: &Cache, window: &Window, requests: &Receiver<u32>) {
    while !window.is_stopped() {
        match requests.recv_timeout(Duration::from_millis(50)) {
            Ok(number) => window.put(number, cache.open(number, &window.stop)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn assemble(
    sequence: &Sequence,
    cache: &Cache,
    window: &Window,
    finished: &Sender<Result<Option<Batch>>>,
) {
    for turn in 0.. {
        let Some((number, share)) = sequence.at(turn) else {
            let _ = finished.send(Ok(None));
            break;
        };
        let (locations, numbers) = sequence.locate(&share);
        let batch = window.take(&numbers, turn).and_then(|shards| {
            let columns = gather(cache.index().schema(), &locations, &shards)?;
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
