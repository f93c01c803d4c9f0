#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{RankReports, ReportedTrees};
use crate::manifest::{DataFile, decode};
use crate::save::report::{WrittenChunk, pack_report};

const ITEM_BYTES: u64 = 4;

/// The document of a save of some `F32` tensors, before the reports are joined.
fn document(shapes: &[Vec<u64>], num_ranks: usize) -> Vec<u8> {
    let tensors: serde_json::Map<String, Value> = shapes
        .iter()
        .enumerate()
        .map(|(number, shape)| {
            let name = format!("t{number}");
            let record = json!({"dtype": "F32", "shape": shape, "path": [name]});
            (name, record)
        })
        .collect();
    let document = json!({
        "format": 1, "version": "0", "save_id": "0123456789abcdef0123456789abcdef", "step": 3,
        "created": "2026-01-01T00:00:00.000000Z", "writer": "test", "world_size": num_ranks, "mesh": null,
        "files": [], "tensors": tensors, "values": {}, "per_rank": {"policy": "drop", "ranks": []},
        "user": {"a": 1},
    });
    serde_json::to_vec(&document).unwrap()
}

fn file(rank: usize, data_bytes: u64) -> DataFile {
    let digest = crate::format::digest::to_base64(&[rank as u8; 16]);
    DataFile {
        path: format!("data/01234567-r{rank:05}-000.safetensors"),
        size: 4096 + data_bytes,
        data_start: 4096,
        header: digest.clone(),
        digests: if data_bytes == 0 {
            String::new()
        } else {
            digest
        },
        frames: None,
        planes: None,
    }
}

/// Chunks of one rank, given by tensor, start and size, laid out one after the other.
fn laid_out(parts: &[(Option<u32>, Vec<u64>, Vec<u64>)]) -> (Vec<WrittenChunk>, u64) {
    let mut offset = 0;
    let chunks = parts.iter().map(|(tensor, start, size)| {
        let length = size.iter().product::<u64>() * tensor.map_or(1, |_| ITEM_BYTES);
        let chunk = WrittenChunk {
            tensor: *tensor,
            file: 0,
            offset,
            length,
            start: start.clone(),
            size: size.clone(),
        };
        offset += length;
        chunk
    });
    let chunks = chunks.collect();
    (chunks, offset)
}

fn report(rank: usize, parts: &[(Option<u32>, Vec<u64>, Vec<u64>)], own: Option<&str>) -> Vec<u8> {
    let (chunks, bytes) = laid_out(parts);
    pack_report(vec![file(rank, bytes)], &chunks, own.map(str::to_owned)).unwrap()
}

fn one_tree(num_tensors: usize, num_ranks: usize) -> ReportedTrees {
    ReportedTrees {
        trees: vec![(0..num_tensors).collect()],
        tree_of: vec![0; num_ranks],
        holders: vec![(0..num_ranks).collect()],
        holders_of: vec![0; num_tensors],
        inlined: HashMap::new(),
    }
}

fn joined(reports: Vec<Vec<u8>>, shapes: &[Vec<u64>], trees: &ReportedTrees) -> Value {
    let num_ranks = reports.len();
    let reports = RankReports::new(reports).unwrap();
    let manifest = reports.join(&document(shapes, num_ranks), trees).unwrap();
    serde_json::from_slice(&decode(&manifest, "test").unwrap()).unwrap()
}

fn refusal(reports: Vec<Vec<u8>>, shapes: &[Vec<u64>], trees: &ReportedTrees) -> String {
    let num_ranks = reports.len();
    match RankReports::new(reports) {
        Ok(reports) => reports
            .join(&document(shapes, num_ranks), trees)
            .unwrap_err()
            .to_string(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn own_values_and_inlined_tensors_are_in_the_document() {
    let mut trees = one_tree(1, 2);
    trees.inlined.insert("t0".to_owned(), vec![1, 0, 0, 0]);
    let reports = vec![
        report(
            0,
            &[(Some(0), vec![], vec![])],
            Some(r#"{"stored_in":"$per_rank.0"}"#),
        ),
        report(1, &[(None, vec![0], vec![9])], None),
    ];
    let document = joined(reports, &[vec![]], &trees);
    assert_eq!(document["tensors"]["t0"]["data"], "AQAAAA==");
    let own = &document["tensors"]["$per_rank.1"];
    assert_eq!(own["path"], json!(["$per_rank", 1]));
    assert_eq!((&own["dtype"], &own["shape"]), (&json!("U8"), &json!([9])));
    assert_eq!(own["chunks"]["file"], json!([1]));
    let own = json!({"policy": "drop", "ranks": [{"stored_in": "$per_rank.0"}, null]});
    assert_eq!(document["per_rank"], own);
    assert_eq!(document["user"], json!({"a": 1}));
    let plain = vec![report(0, &[(Some(0), vec![], vec![])], None)];
    let document = joined(plain, &[vec![]], &one_tree(1, 1));
    assert_eq!(document["per_rank"], Value::Null);
}

#[test]
fn a_chunk_of_a_rank_that_does_not_hold_its_tensor_is_left_out() {
    let shapes = [vec![4]];
    let mut trees = one_tree(1, 2);
    let whole = || {
        vec![
            report(0, &[(Some(0), vec![0], vec![4])], None),
            report(1, &[(Some(0), vec![0], vec![4])], None),
        ]
    };
    assert!(refusal(whole(), &shapes, &trees).contains("overlap"));
    trees.holders = vec![vec![1]];
    let document = joined(whole(), &shapes, &trees);
    assert_eq!(document["tensors"]["t0"]["chunks"]["file"], json!([1]));
}

#[test]
fn what_does_not_match_is_refused() {
    let shapes = [vec![4, 2]];
    let trees = one_tree(1, 1);
    let part = |start: &[u64], size: &[u64]| {
        vec![report(0, &[(Some(0), start.to_vec(), size.to_vec())], None)]
    };
    assert!(refusal(part(&[0, 0], &[3, 2]), &shapes, &trees).contains("`t0`: the chunk at [0, 0]"));
    assert!(refusal(part(&[0], &[4]), &shapes, &trees).contains("rank 0"));
    assert!(refusal(vec![b"no report".to_vec()], &shapes, &trees).contains("rank 0"));
    let unknown = vec![report(0, &[(Some(7), vec![0, 0], vec![4, 2])], None)];
    assert!(refusal(unknown, &shapes, &trees).contains("no tensor 7"));
    let mut cut = report(0, &[(Some(0), vec![0, 0], vec![4, 2])], None);
    cut.truncate(cut.len() - 3);
    assert!(refusal(vec![cut], &shapes, &trees).contains("rank 0"));
    assert!(pack_report(Vec::new(), &[], Some("{".to_owned())).is_err());
}

/// Shapes, and for each tensor the rows at which the ranks' parts begin.
fn saves() -> impl Strategy<Value = (Vec<Vec<u64>>, Vec<Vec<u64>>)> {
    (1_usize..5, 1_usize..6).prop_flat_map(|(num_tensors, num_ranks)| {
        let shapes = prop::collection::vec((1_u64..20, 1_u64..4), num_tensors);
        shapes.prop_flat_map(move |shapes| {
            let cuts: Vec<_> = shapes
                .iter()
                .map(|&(rows, _)| prop::collection::vec(0..=rows, num_ranks - 1))
                .collect();
            let shapes: Vec<Vec<u64>> = shapes
                .iter()
                .map(|&(rows, columns)| vec![rows, columns])
                .collect();
            let sorted = |mut cuts: Vec<Vec<u64>>| {
                cuts.iter_mut().for_each(|cuts| cuts.sort_unstable());
                cuts
            };
            (Just(shapes), cuts.prop_map(sorted))
        })
    })
}

proptest! {
    #[test]
    fn every_chunk_of_every_rank_is_listed_in_the_order_of_starts(
        (shapes, cuts) in saves(),
        is_reversed in any::<bool>(),
    ) {
        let num_ranks = cuts[0].len() + 1;
        let mut expected: Vec<Vec<(u64, u64, u64, u64)>> = vec![Vec::new(); shapes.len()];
        let mut reports = Vec::new();
        for rank in 0..num_ranks {
            let place = if is_reversed { num_ranks - 1 - rank } else { rank };
            let mut parts = Vec::new();
            for (tensor, (shape, cuts)) in shapes.iter().zip(&cuts).enumerate() {
                let from = if place == 0 { 0 } else { cuts[place - 1] };
                let to = cuts.get(place).copied().unwrap_or(shape[0]);
                if to > from {
                    parts.push((Some(tensor as u32), vec![from, 0], vec![to - from, shape[1]]));
                }
            }
            let (chunks, _) = laid_out(&parts);
            for chunk in &chunks {
                let tensor = chunk.tensor.unwrap() as usize;
                let row = (chunk.start[0], chunk.size[0], rank as u64, chunk.offset);
                expected[tensor].push(row);
            }
            reports.push(report(rank, &parts, None));
        }
        let document = joined(reports, &shapes, &one_tree(shapes.len(), num_ranks));
        for (tensor, rows) in expected.iter_mut().enumerate() {
            rows.sort_unstable();
            let chunks = &document["tensors"][format!("t{tensor}")]["chunks"];
            let column = |values: &Value| -> Vec<u64> {
                values.as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).collect()
            };
            let found = column(&chunks["start"][0]).into_iter().zip(column(&chunks["size"][0]));
            let places = column(&chunks["file"]).into_iter().zip(column(&chunks["offset"]));
            let found: Vec<_> = found.zip(places).map(|((a, b), (c, d))| (a, b, c, d)).collect();
            prop_assert_eq!(&found, rows);
        }
        prop_assert_eq!(document["files"].as_array().unwrap().len(), num_ranks);
    }
}
