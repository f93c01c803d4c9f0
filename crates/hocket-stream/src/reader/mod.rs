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
        let fetching = Arc::new(Semaphore::new(options.fetch_threads.max(1)));
        // Twice as many threads, because up to half of them wait for the disk, which flushes their files together.
        for number in 0..2 * options.fetch_threads.max(1) {
            let (sources, window, requests) = (sources.clone(), window.clone(), requests.clone());
            let fetching = fetching.clone();
            reader.spawn(format!("hocket-fetch-{number}"), move || {
                fetch(&sources, &window, &requests, &fetching)
            })?;
        }
        let sequence = BatchSequence { order, options };
        let next = following.map(|order| sequence.followed_by(order));
        let epochs: Vec<BatchSequence> = std::iter::once(sequence.clone()).chain(next).collect();
        let (planned, shared) = (sources.clone(), window.clone());
        reader.spawn("hocket-plan".into(), move || {
            plan(&epochs, &planned, &shared)
        })?;
        reader.spawn("hocket-batch".into(), move || {
            assemble(&sequence, &sources, &window, &finished)
        })?;
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
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use crate::cache::{Cache, CacheOptions};
    use crate::index::Index;
    use crate::order::{Batching, OrderSettings, Sampling, StreamMix, TailPolicy};
    use crate::reader::batch::{BatchColumn, ColumnData};
    use crate::shard::hash::Algorithm;
    use crate::shard::raw_file::assemble;
    use crate::writer::{WriterOptions, place};
    use std::path::Path;

    /// Writes five shards of 20 samples, each with its number as `uint32` and as a text of that many letters.
    fn write(folder: &Path) -> Arc<Index> {
        let mut shards = Vec::new();
        for number in 0..5u32 {
            let samples: Vec<Vec<u8>> = (20 * number..20 * (number + 1))
                .map(|id| {
                    [
                        &id.to_le_bytes()[..],
                        &id.to_le_bytes(),
                        &vec![b'x'; id as usize],
                    ]
                    .concat()
                })
                .collect();
            let options = WriterOptions {
                local: Some(folder.into()),
                remote: None,
                compression: None,
                hashes: vec![("xxh3_64".into(), Algorithm::Xxh3_64)],
                only_new: true,
                threads: 1,
            };
            let name = format!("{number}.mds");
            let file = assemble(name, b"{}", samples.iter().collect()).unwrap();
            let placed = place(&options, file, &|| false).unwrap();
            let raw = placed.commit().unwrap().raw;
            shards.push(serde_json::json!({
                "column_encodings": ["uint32", "str"], "column_names": ["id", "text"], "column_sizes": [4, null],
                "compression": null, "format": "mds", "hashes": [], "samples": 20, "size_limit": null, "version": 2,
                "raw_data": {"basename": raw.basename, "bytes": raw.bytes, "hashes": {"xxh3_64": raw.hashes[0].1}},
                "zip_data": null,
            }));
        }
        let text = serde_json::json!({"version": 2, "shards": shards}).to_string();
        Arc::new(Index::parse(text.as_bytes(), "index.json").unwrap())
    }

    fn order(index: &Index) -> Arc<Order> {
        let settings = OrderSettings {
            global_batch_size: 6,
            num_canonical_nodes: 2,
            shuffle: true,
            shuffle_seed: 1,
            shuffle_block_size: 16,
            tail: TailPolicy::Short,
            batching_method: Batching::Random,
            sampling_method: Sampling::Balanced,
            sampling_granularity: 1,
        };
        Arc::new(Order::new(settings, &StreamMix::whole(index.starts().clone()), 0).unwrap())
    }

    fn cache(folder: &Path, index: &Arc<Index>) -> Arc<DatasetSources> {
        let options = CacheOptions {
            local: folder.into(),
            keep_zip: false,
            keep_shards: true,
            download_retry: 1,
            validate_hash: None,
            wait: std::time::Duration::from_secs(60),
        };
        let cache = Cache::new(index.clone(), None, options).unwrap();
        Arc::new(DatasetSources::new(vec![Arc::new(cache)]).unwrap())
    }

    fn options(first: u64, stride: u64, prefetch_bytes: u64) -> ReaderOptions {
        ReaderOptions {
            rank: 0,
            world: 1,
            first,
            stride,
            prefetch_bytes,
            prefetch_batches: 2,
            fetch_threads: 2,
        }
    }

    fn read_ids(reader: &mut Reader) -> Result<Vec<(u64, Vec<u64>)>> {
        let mut all = Vec::new();
        loop {
            match reader.next(Duration::from_secs(10)) {
                Ok(Some(batch)) => all.push((batch.number, check(&batch))),
                Ok(None) => return Ok(all),
                Err(error) => return Err(error.expect("no batch within 10 s")),
            }
        }
    }

    /// Returns the ids in a batch, and checks that the texts match them.
    fn check(batch: &Batch) -> Vec<u64> {
        let columns: Vec<&ColumnData> = batch
            .columns
            .iter()
            .map(|BatchColumn { data, rows }| {
                assert_eq!(rows, &None);
                data
            })
            .collect();
        let [ColumnData::Fixed(ids), ColumnData::Ragged { data, offsets }] = columns[..] else {
            panic!("{columns:?}")
        };
        let ids: Vec<u64> = ids
            .chunks_exact(4)
            .map(|id| u64::from(u32::from_le_bytes(id.try_into().unwrap())))
            .collect();
        let lengths: Vec<u64> = offsets.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(lengths, ids);
        assert!(data.iter().all(|&byte| byte == b'x'));
        ids
    }

    #[test]
    fn the_reader_follows_the_order_for_any_window_and_first_batch() {
        let folder = tempfile::tempdir().unwrap();
        let index = write(folder.path());
        let (order, cache) = (order(&index), cache(folder.path(), &index));
        for (first, stride, prefetch_bytes) in [
            (0, 1, 1 << 20),
            (0, 1, 0),
            (5, 1, 1),
            (1, 3, 1 << 20),
            (17, 1, 1),
        ] {
            let mut reader = Reader::start(
                cache.clone(),
                order.clone(),
                None,
                options(first, stride, prefetch_bytes),
            )
            .unwrap();
            let expected: Vec<(u64, Vec<u64>)> = (first..order.num_batches())
                .step_by(stride as usize)
                .map(|k| {
                    let mut places = Vec::new();
                    order.locate(k, 0..order.batch_len(k), &mut places);
                    (
                        k,
                        places
                            .into_iter()
                            .map(|place| order.storage_id(place))
                            .collect(),
                    )
                })
                .collect();
            assert_eq!(read_ids(&mut reader).unwrap(), expected);
        }
    }

    #[test]
    fn workers_prefetch_all_batches_of_the_next_epoch() {
        let folder = tempfile::tempdir().unwrap();
        let order = order(&write(folder.path()));
        let number = |first: u64, turn: u64| {
            let options = options(first, 3, 0);
            let sequence = BatchSequence {
                order: order.clone(),
                options,
            };
            Some(sequence.followed_by(order.clone()).at(turn)?.0)
        };
        for start in [0, 7] {
            let mut seen: Vec<u64> = (start..start + 3)
                .flat_map(|first| (0..).map_while(move |turn| number(first, turn)))
                .collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..order.num_batches()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_bad_shard_fails_the_batch_that_needs_it_and_none_before() {
        let folder = tempfile::tempdir().unwrap();
        let index = write(folder.path());
        std::fs::write(folder.path().join("4.mds"), b"no shard").unwrap();
        let settings = OrderSettings {
            global_batch_size: 6,
            num_canonical_nodes: 1,
            shuffle: false,
            shuffle_seed: 0,
            shuffle_block_size: 16,
            tail: TailPolicy::Short,
            batching_method: Batching::Random,
            sampling_method: Sampling::Balanced,
            sampling_granularity: 1,
        };
        let order =
            Arc::new(Order::new(settings, &StreamMix::whole(index.starts().clone()), 0).unwrap());
        let mut reader = Reader::start(
            cache(folder.path(), &index),
            order,
            None,
            options(0, 1, 1 << 20),
        )
        .unwrap();
        let mut seen = 0;
        let error = loop {
            match reader.next(Duration::from_secs(10)) {
                Ok(batch) => seen += batch.unwrap().share.local,
                Err(error) => break error.unwrap(),
            }
        };
        // 80 good samples: 13 whole batches of 6.
        assert_eq!(seen, 78);
        assert!(matches!(error, StreamError::ShardCorrupt { .. }), "{error}");
        assert!(matches!(reader.next(Duration::from_secs(1)), Ok(None)));
    }

    #[test]
    fn dropping_the_reader_ends_its_threads() {
        let folder = tempfile::tempdir().unwrap();
        let index = write(folder.path());
        let cache = cache(folder.path(), &index);
        let mut reader =
            Reader::start(cache.clone(), order(&index), None, options(0, 1, 1 << 20)).unwrap();
        assert!(reader.next(Duration::from_secs(10)).unwrap().is_some());
        drop(reader);
        assert_eq!(Arc::strong_count(&cache), 1);
    }

    #[test]
    fn a_forked_child_does_not_use_the_readers_channels() {
        let (wanted, requests) = unbounded();
        let (finished, batches) = bounded(1);
        let mut reader = Reader {
            batches,
            window: Arc::new(ShardWindow::new(wanted, 0, None)),
            threads: Vec::new(),
            process: 0,
            is_done: false,
        };
        let next = reader.next(Duration::ZERO);
        assert!(matches!(next, Err(Some(StreamError::Config { .. }))));
        drop(reader);
        assert!(finished.try_send(Ok(None)).is_ok());
        assert_eq!(
            requests.try_recv(),
            Err(crossbeam_channel::TryRecvError::Empty)
        );
    }
}
