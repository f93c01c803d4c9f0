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
