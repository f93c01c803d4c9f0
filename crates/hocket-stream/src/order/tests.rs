#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use crate::order::interleave::apportion;
use proptest::prelude::*;

fn storage(sizes: &[u64]) -> Arc<[u64]> {
    let mut starts = vec![0];
    for size in sizes {
        starts.push(starts.last().unwrap() + size);
    }
    starts.into()
}

fn whole(sizes: &[u64]) -> StreamMix {
    StreamMix::whole(storage(sizes))
}

fn settings(global_batch_size: u64, num_canonical_nodes: u64, shuffle: bool) -> OrderSettings {
    OrderSettings {
        global_batch_size,
        num_canonical_nodes,
        shuffle,
        shuffle_seed: 9176,
        shuffle_block_size: 16,
        tail: TailPolicy::Short,
        batching_method: Batching::Random,
        sampling_method: Sampling::Balanced,
        sampling_granularity: 1,
    }
}

fn ids(order: &Order, k: u64, range: Range<u64>) -> Vec<u64> {
    let mut out = Vec::new();
    order.locate(k, range, &mut out);
    out.into_iter()
        .map(|location| order.storage_id(location))
        .collect()
}

fn epoch_ids(order: &Order) -> Vec<Vec<u64>> {
    (0..order.num_batches())
        .map(|k| ids(order, k, 0..order.batch_len(k)))
        .collect()
}

#[test]
fn without_shuffling_one_lane_is_storage_order_in_every_epoch() {
    for epoch in 0..2 {
        let order = Order::new(settings(4, 1, false), &whole(&[3, 0, 7]), epoch).unwrap();
        assert_eq!(
            epoch_ids(&order),
            [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9]]
        );
    }
}

#[test]
fn lanes_alternate_and_their_remainders_fill_the_last_batch() {
    // 11 samples in 2 lanes: 0..5 and 5..11.
    let order = Order::new(settings(4, 2, false), &whole(&[11]), 0).unwrap();
    assert_eq!(
        epoch_ids(&order),
        [vec![0, 1, 5, 6], vec![2, 3, 7, 8], vec![4, 9, 10]]
    );
}

#[test]
fn the_order_equals_the_recorded_one() {
    // Saved runs resume in this order, so it must never change.
    let order = Order::new(settings(8, 4, true), &whole(&[5, 7, 0, 4, 9]), 3).unwrap();
    let expected = [
        vec![8, 6, 4, 1, 17, 15, 24, 19],
        vec![7, 10, 0, 3, 13, 14, 21, 22],
        vec![5, 9, 2, 11, 12, 16, 23, 20],
        vec![18],
    ];
    assert_eq!(epoch_ids(&order), expected);
}

#[test]
fn each_tail_has_the_expected_last_batch() {
    let with = |tail| {
        Order::new(
            OrderSettings {
                tail,
                ..settings(4, 2, true)
            },
            &whole(&[6, 4]),
            1,
        )
        .unwrap()
    };
    let (short, drop, pad) = (
        with(TailPolicy::Short),
        with(TailPolicy::Drop),
        with(TailPolicy::Pad),
    );
    assert_eq!(
        (short.num_batches(), drop.num_batches(), pad.num_batches()),
        (3, 2, 3)
    );
    assert_eq!((drop.num_dropped(), pad.num_repeated()), (2, 2));
    assert_eq!(epoch_ids(&drop)[..], epoch_ids(&short)[..2]);
    let (padded, plain) = (epoch_ids(&pad), epoch_ids(&short));
    assert_eq!(padded[2][..2], plain[2][..]);
    assert_eq!(padded[2][2..], plain[0][..2]);
}

#[test]
fn padding_repeats_if_there_are_fewer_samples_than_slots() {
    let order = Order::new(
        OrderSettings {
            tail: TailPolicy::Pad,
            ..settings(8, 1, false)
        },
        &whole(&[3]),
        0,
    )
    .unwrap();
    assert_eq!(epoch_ids(&order), [vec![0, 1, 2, 0, 1, 2, 0, 1]]);
    assert_eq!(order.num_repeated(), 5);
}

#[test]
fn a_rank_without_a_share_reads_one_sample_of_its_own() {
    let order = Order::new(settings(4, 1, false), &whole(&[9]), 0).unwrap();
    let share = order.share(2, 0, 4);
    assert_eq!(
        share,
        BatchShare {
            from: 1,
            range: 0..1,
            local: 0,
            global: 1
        }
    );
    assert_eq!(
        order.share(2, 3, 4),
        BatchShare {
            from: 2,
            range: 0..1,
            local: 1,
            global: 1
        }
    );
}

#[test]
fn lanes_must_divide_the_batch() {
    let message = Order::new(settings(6, 4, true), &whole(&[9]), 0)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains('4') && message.contains('6') && message.contains("divisor"),
        "{message}"
    );
}

#[test]
fn the_cost_of_an_order_depends_on_shards_and_not_on_samples() {
    // 6,104 shards of 16,384 samples: if any step were linear in the samples, this test would take seconds.
    let order = Order::new(
        OrderSettings {
            shuffle_block_size: 1 << 18,
            ..settings(1024, 64, true)
        },
        &whole(&[16_384; 6104]),
        0,
    )
    .unwrap();
    let k = order.num_batches() * 99 / 100;
    assert_eq!(ids(&order, k, 0..1024).len(), 1024);
}

prop_compose! {
    fn cases()(
        sizes in prop::collection::vec(0u64..40, 1..8),
        per_lane in 1u64..6,
        lanes in 1u64..6,
        block in 1u64..60,
        seed: u64,
        epoch in 0u64..4,
        shuffle: bool,
    ) -> (OrderSettings, Vec<u64>, u64) {
        (OrderSettings { shuffle_seed: seed, shuffle_block_size: block, ..settings(per_lane * lanes, lanes, shuffle) }, sizes, epoch)
    }
}

proptest! {
    #[test]
    fn every_sample_occurs_once((settings, sizes, epoch) in cases()) {
        let order = Order::new(settings, &whole(&sizes), epoch).unwrap();
        let mut seen = epoch_ids(&order).concat();
        seen.sort_unstable();
        prop_assert!(seen.into_iter().eq(0..sizes.iter().sum::<u64>()));
    }

    #[test]
    fn the_ranks_parts_are_the_batch((settings, sizes, epoch) in cases(), world in 1u64..9) {
        let order = Order::new(settings, &whole(&sizes), epoch).unwrap();
        for k in 0..order.num_batches() {
            let mut together = Vec::new();
            for rank in 0..world {
                let share = order.share(k, rank, world);
                prop_assert_eq!(share.range.end - share.range.start, share.local.max(1));
                let read = ids(&order, share.from, share.range);
                if share.local > 0 { together.extend(read) }
            }
            prop_assert_eq!(together, ids(&order, k, 0..order.batch_len(k)));
        }
    }

    #[test]
    fn epochs_and_seeds_differ(seed: u64, epoch in 0u64..1000) {
        let at = |seed, epoch| {
            let settings = OrderSettings { shuffle_seed: seed, ..settings(8, 2, true) };
            epoch_ids(&Order::new(settings, &whole(&[20, 20, 20]), epoch).unwrap())
        };
        prop_assert_ne!(at(seed, epoch), at(seed, epoch + 1));
        prop_assert_ne!(at(seed, epoch), at(seed.wrapping_add(1), epoch));
        prop_assert_eq!(at(seed, epoch), at(seed, epoch));
    }
}

/// Returns the mix of streams given as pairs of (samples of each shard, samples per epoch).
fn streams(mix: &[(&[u64], u64)]) -> StreamMix {
    let storages: Vec<_> = mix.iter().map(|(sizes, _)| storage(sizes)).collect();
    let wanted: Vec<u64> = mix.iter().map(|(_, wanted)| *wanted).collect();
    StreamMix::new(&storages, &wanted).unwrap()
}

fn with(batching_method: Batching, settings: OrderSettings) -> OrderSettings {
    OrderSettings {
        batching_method,
        ..settings
    }
}

#[test]
fn one_stream_is_the_same_by_any_method() {
    for batching in [Batching::Stratified, Batching::PerStream] {
        let order = Order::new(with(batching, settings(4, 2, false)), &whole(&[11]), 0).unwrap();
        let random = Order::new(settings(4, 2, false), &whole(&[11]), 0).unwrap();
        assert_eq!(epoch_ids(&order), epoch_ids(&random));
    }
}

#[test]
fn orders_of_several_streams_equal_the_recorded_ones() {
    // Saved runs resume in these orders, so they must never change.
    let mix = streams(&[(&[5, 7], 18), (&[4, 0, 9], 6)]);
    let at =
        |batching| epoch_ids(&Order::new(with(batching, settings(8, 4, true)), &mix, 3).unwrap());
    let expected = [
        vec![22, 20, 11, 3, 5, 0, 6, 7],
        vec![17, 0, 2, 6, 7, 4, 10, 11],
        vec![21, 18, 4, 1, 9, 14, 8, 9],
    ];
    assert_eq!(at(Batching::Random), expected);
    let expected = [
        vec![21, 6, 7, 9, 22, 10, 4, 3],
        vec![14, 5, 9, 8, 18, 0, 4, 11],
        vec![20, 6, 7, 11, 17, 1, 2, 0],
    ];
    assert_eq!(at(Batching::Stratified), expected);
    let expected = [
        vec![14, 20, 21, 17, 22, 18],
        vec![6, 11, 8, 5, 10, 1, 4, 2],
        vec![7, 9, 6, 9, 11, 0, 3, 0],
        vec![7, 4],
    ];
    assert_eq!(at(Batching::PerStream), expected);
}

#[test]
fn a_stratified_batch_has_every_stream() {
    let mix = streams(&[(&[955], 955), (&[45], 45)]);
    let message = Order::new(with(Batching::Stratified, settings(10, 1, true)), &mix, 0)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("stream 1") && message.contains("45 of"),
        "{message}"
    );
}

#[test]
fn stratified_batches_end_when_the_first_stream_ends() {
    // 9 and 1 of each batch of 10: the second stream lasts 55 batches, the first would last 105.
    let mix = streams(&[(&[945], 945), (&[55], 55)]);
    let order = Order::new(with(Batching::Stratified, settings(10, 1, true)), &mix, 0).unwrap();
    assert_eq!(
        (
            order.num_batches(),
            order.batch_len(55),
            order.num_dropped()
        ),
        (56, 9, 441)
    );
}

prop_compose! {
    fn mixes()(
        (settings, _, epoch) in cases(),
        parts in prop::collection::vec((prop::collection::vec(1u64..12, 1..5), 1u64..60), 1..5),
        batching_method in prop::sample::select(vec![Batching::Random, Batching::Stratified, Batching::PerStream]),
        tail in prop::sample::select(vec![TailPolicy::Short, TailPolicy::Drop, TailPolicy::Pad]),
        sampling_granularity in 1u64..9,
    ) -> (OrderSettings, Vec<(Vec<u64>, u64)>, u64) {
        (OrderSettings { batching_method, tail, sampling_granularity, ..settings }, parts, epoch)
    }
}

proptest! {
    #[test]
    fn stream_counts_are_exact((settings, parts, epoch) in mixes()) {
        let storages: Vec<_> = parts.iter().map(|(sizes, _)| storage(sizes)).collect();
        let wanted: Vec<u64> = parts.iter().map(|(_, wanted)| *wanted).collect();
        let mix = StreamMix::new(&storages, &wanted).unwrap();
        let Ok(order) = Order::new(settings, &mix, epoch) else {
            prop_assert!(settings.batching_method == Batching::Stratified && apportion(settings.global_batch_size, &wanted).contains(&0));
            return Ok(());
        };
        let batches = epoch_ids(&order);
        let all: u64 = wanted.iter().sum();
        let given: u64 = batches.iter().map(|batch| batch.len() as u64).sum();
        prop_assert_eq!(given, all - order.num_dropped() + order.num_repeated());
        prop_assert!(batches.iter().all(|batch| !batch.is_empty()));
        // Number of occurrences of each sample, by stream.
        let held: Vec<u64> = parts.iter().map(|(sizes, _)| sizes.iter().sum()).collect();
        let mut counts: Vec<Vec<u64>> = held.iter().map(|&held| vec![0; held as usize]).collect();
        let mut by_batch = Vec::new();
        for batch in &batches {
            let mut of_batch = vec![0u64; parts.len()];
            for &id in batch {
                let (mut stream, mut id) = (0, id);
                while id >= held[stream] {
                    id -= held[stream];
                    stream += 1;
                }
                counts[stream][id as usize] += 1;
                of_batch[stream] += 1;
            }
            by_batch.push(of_batch);
        }
        let full = by_batch.iter().filter(|of| of.iter().sum::<u64>() == settings.global_batch_size);
        match settings.batching_method {
            Batching::Stratified => {
                let expected = apportion(settings.global_batch_size, &wanted);
                prop_assert!(full.into_iter().all(|of| *of == expected));
            }
            Batching::PerStream => {
                prop_assert!(by_batch.iter().all(|of| of.iter().filter(|&&n| n > 0).count() == 1));
            }
            Batching::Random => {}
        }
        if order.num_dropped() == 0 && order.num_repeated() == 0 {
            // Repeated streams: the numbers of occurrences of any two samples differ by at most one.
            for ((counts, wanted), held) in counts.iter().zip(&wanted).zip(&held) {
                prop_assert_eq!(counts.iter().sum::<u64>(), *wanted);
                let times = wanted / held;
                prop_assert!(counts.iter().all(|&n| n == times || n == times + 1));
            }
        }
    }

    #[test]
    fn the_ranks_parts_are_the_batch_of_several_streams((settings, parts, epoch) in mixes(), world in 1u64..9) {
        let storages: Vec<_> = parts.iter().map(|(sizes, _)| storage(sizes)).collect();
        let wanted: Vec<u64> = parts.iter().map(|(_, wanted)| *wanted).collect();
        let Ok(order) = Order::new(settings, &StreamMix::new(&storages, &wanted).unwrap(), epoch) else {
            return Ok(());
        };
        let mut by_rank = vec![0; world as usize];
        for k in 0..order.num_batches() {
            let mut together = Vec::new();
            for rank in 0..world {
                let share = order.share(k, rank, world);
                by_rank[rank as usize] += share.local;
                let read = ids(&order, share.from, share.range);
                prop_assert!(!read.is_empty());
                if share.local > 0 { together.extend(read) }
            }
            prop_assert_eq!(together, ids(&order, k, 0..order.batch_len(k)));
        }
        let expected: Vec<u64> = (0..world).map(|rank| order.num_local_samples(rank, world)).collect();
        prop_assert_eq!(by_rank, expected);
    }
}

#[test]
fn a_listed_order_has_the_listed_batches() {
    let mix = streams(&[(&[3, 0, 2], 5), (&[4], 4)]);
    let order = Order::listed(&mix, vec![8, 0, 4, 4, 7], vec![0, 2, 5]).unwrap();
    assert_eq!(epoch_ids(&order), [vec![8, 0], vec![4, 4, 7]]);
    assert_eq!(order.num_local_samples(1, 2), 1 + 2);
    for (ids, edges) in [
        (vec![9], vec![0, 1]),
        (vec![1], vec![0, 2]),
        (vec![], vec![]),
        (vec![1, 2], vec![0, 2, 1, 2]),
    ] {
        assert!(matches!(
            Order::listed(&mix, ids, edges),
            Err(StreamError::Config { .. })
        ));
    }
}

proptest! {
    #[test]
    fn scheduled_streams_are_read_whole_before_again_and_in_any_slices(
        sizes in prop::collection::vec(1u64..40, 2..4),
        weights in prop::collection::vec(prop::collection::vec(0u64..5, 3), 1..4),
        batch in 1u64..24,
        lanes in 1u64..5,
        epoch_size in 1u64..200,
        shuffle: bool,
    ) {
        let storages: Vec<Arc<[u64]>> = sizes
            .iter()
            .map(|&size| (0..=size.div_ceil(7)).map(|shard| (7 * shard).min(size)).collect())
            .collect();
        let mix = StreamMix::new(&storages, &sizes).unwrap();
        let phases: Vec<(u64, Vec<u64>)> = weights
            .iter()
            .enumerate()
            .map(|(number, weights)| {
                let own = weights.iter().take(sizes.len()).map(|weight| weight + 1);
                (97 * number as u64, own.collect())
            })
            .collect();
        let schedule = MixSchedule::new(&phases).unwrap();
        let settings = OrderSettings {
            global_batch_size: batch * lanes,
            num_canonical_nodes: lanes,
            shuffle,
            shuffle_seed: 3,
            shuffle_block_size: 5,
            tail: TailPolicy::Short,
            batching_method: Batching::Random,
            sampling_method: Sampling::Balanced,
            sampling_granularity: 1,
        };
        let mut read: Vec<Vec<u64>> = vec![Vec::new(); sizes.len()];
        let firsts: Vec<u64> = sizes.iter().scan(0, |sum, size| { *sum += size; Some(*sum - size) }).collect();
        for epoch in 0..3 {
            let order = Order::scheduled(settings, &mix, &schedule, epoch_size, epoch).unwrap();
            prop_assert_eq!(order.num_batches(), epoch_size.div_ceil(batch * lanes));
            for k in 0..order.num_batches() {
                let mut whole = Vec::new();
                order.locate(k, 0..order.batch_len(k), &mut whole);
                let mut parts = Vec::new();
                for rank in 0..3 {
                    order.locate(k, slice(order.batch_len(k), rank, 3), &mut parts);
                }
                prop_assert_eq!(&whole, &parts);
                for place in whole {
                    let id = order.storage_id(place);
                    let stream = firsts.partition_point(|&first| first <= id) - 1;
                    read[stream].push(id - firsts[stream]);
                }
                let position = epoch * epoch_size + k * batch * lanes + order.batch_len(k);
                let counts: Vec<u64> = read.iter().map(|ids| ids.len() as u64).collect();
                prop_assert_eq!(schedule.given(position), counts);
            }
        }
        for (ids, &size) in read.iter().zip(&sizes) {
            // At a batch, a pass over the stream may begin before the one before it has ended.
            let passes = ids.len() / size as usize;
            for id in 0..size {
                let times = ids.iter().filter(|&&one| one == id).count();
                prop_assert!(times == passes || times == passes + 1, "{id}: {times} of {passes}");
            }
        }
    }
}
