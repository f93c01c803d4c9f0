//! The public methods of file and memory stores, as another crate uses them.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::single_range_in_vec_init
)]

use bytes::Bytes;
use hocket_store::{PutMode, Result, Store, StoreError, StoreOptions, runtime};
use proptest::prelude::*;
use std::ffi::CString;
use std::future::Future;
use std::path::Path;
use std::time::{Duration, Instant};

fn wait<T: Send + 'static>(verb: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    runtime::wait(verb, &|| false)?
}

fn open(uri: &str) -> Store {
    Store::open(uri, StoreOptions::default()).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn pattern(size: usize) -> Bytes {
    (0..size)
        .map(|index| (index % 251) as u8)
        .collect::<Vec<_>>()
        .into()
}

#[test]
fn an_upload_in_odd_pieces_appears_whole_when_finished() {
    let dir = tempfile::tempdir().unwrap();
    let uris = [
        "memory://upload/p".to_owned(),
        dir.path().to_str().unwrap().to_owned(),
    ];
    let whole = pattern((20 << 20) + 7);
    for uri in uris {
        let (store, data) = (open(&uri), whole.clone());
        wait(async move {
            let mut upload = store.upload("a/k", None).await?;
            let mut rest = data.clone();
            for size in [1, 0, 9 << 20, 77, 8 << 20, usize::MAX] {
                upload.write(rest.split_to(size.min(rest.len()))).await?;
                assert!(matches!(
                    store.head("a/k").await,
                    Err(StoreError::NotFound { .. })
                ));
                assert!(store.list("").await?.is_empty());
            }
            let meta = upload.finish().await?;
            let head = store.head("a/k").await?;
            assert_eq!((meta.size, &meta.etag), (head.size, &head.etag));
            assert_eq!(store.get("a/k").await?, data);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn an_abandoned_upload_keeps_the_old_object() {
    let dir = tempfile::tempdir().unwrap();
    for uri in ["memory://given-up", dir.path().to_str().unwrap()] {
        let store = open(uri);
        wait(async move {
            store.put("k", "old".into(), PutMode::Overwrite).await?;
            let mut aborted = store.upload("k", None).await?;
            aborted.write(pattern(9 << 20)).await?;
            aborted.abort().await?;
            let mut dropped = store.upload("k", None).await?;
            dropped.write(pattern(9 << 20)).await?;
            drop(dropped);
            assert_eq!(store.get("k").await?, "old");
            Ok(())
        })
        .unwrap();
    }
    assert_eq!(names(dir.path()), ["k"]);
}

#[test]
fn a_failed_write_leaves_no_hidden_file() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path().to_str().unwrap());
    wait(async move {
        let etag = store
            .put("k", "one".into(), PutMode::Create)
            .await?
            .unwrap();
        let taken = store.put("k", "two".into(), PutMode::Create).await;
        assert!(matches!(taken, Err(StoreError::Exists { .. })));
        let wrong = store
            .put("k", "two".into(), PutMode::Match("other".into()))
            .await;
        assert!(matches!(wrong, Err(StoreError::Changed { actual, .. }) if actual == etag));
        let below = store.put("k/below", "two".into(), PutMode::Overwrite).await;
        assert!(matches!(below, Err(StoreError::Io { .. })), "{below:?}");
        Ok(())
    })
    .unwrap();
    assert_eq!(names(dir.path()), ["k"]);
}

#[test]
fn reads_of_another_version_than_the_first_one_fail() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    let root = dir.path().join("root");
    for uri in ["memory://versions", root.to_str().unwrap()] {
        let (store, to) = (open(uri), to.clone());
        wait(async move {
            let object = store.object("k");
            assert!(matches!(
                object.get(None).await,
                Err(StoreError::NotFound { .. })
            ));
            assert_eq!(object.size(), None);
            store.put("k", "one".into(), PutMode::Overwrite).await?;
            assert_eq!(object.get_ranges(&[0..1, 2..3]).await?, ["o", "e"]);
            assert_eq!(object.size(), Some(3));
            assert_eq!(object.clone().get(None).await?, "one");
            object.download(&to, Some(3)).await?;
            store.put("k", "two".into(), PutMode::Overwrite).await?;
            let changed = [
                object.get(None).await.map(drop),
                object.get_ranges(&[0..1]).await.map(drop),
                object.get_ranges(&[3..3]).await.map(drop),
                object.download(&to, Some(3)).await.map(drop),
            ];
            for outcome in changed {
                assert!(
                    matches!(outcome, Err(StoreError::Changed { .. })),
                    "{outcome:?}"
                );
            }
            assert_eq!(store.object("k").get(None).await?, "two");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn an_object_of_another_size_is_an_error_before_it_is_copied() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    let root = dir.path().join("root");
    for uri in ["memory://sizes", root.to_str().unwrap()] {
        let (store, to) = (open(uri), to.clone());
        wait(async move {
            store.put("k", pattern(1000), PutMode::Overwrite).await?;
            for known in [0, 999, 1001, 64 << 20] {
                std::fs::write(&to, b"").unwrap();
                let error = store.download("k", &to, Some(known)).await.unwrap_err();
                assert!(
                    matches!(error, StoreError::Size { expected, actual: 1000, .. } if expected == known),
                    "{error}"
                );
                assert_eq!(std::fs::metadata(&to).unwrap().len(), 0);
            }
            for known in [None, Some(1000)] {
                store.download("k", &to, known).await?;
                assert_eq!(std::fs::read(&to).unwrap(), pattern(1000));
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn nothing_is_written_after_a_failed_download() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    let store = open("memory://failed-download");
    wait(async move {
        let size = 64 << 20;
        store.put("k", pattern(size), PutMode::Overwrite).await?;
        for _ in 0..20 {
            let known = Some(size as u64 + 1);
            let error = store.download("k", &to, known).await.unwrap_err();
            assert!(matches!(error, StoreError::Size { .. }), "{error}");
            std::fs::write(&to, b"").unwrap();
            tokio::time::sleep(Duration::from_millis(30)).await;
            assert_eq!(std::fs::metadata(&to).unwrap().len(), 0);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn one_of_several_racing_conditional_writers_wins_each_round() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path().to_str().unwrap());
    wait(async move {
        let mut etag = store.put("k", "0".into(), PutMode::Create).await?.unwrap();
        for round in 0..5 {
            let writers = (0..6).map(|writer| {
                let (store, mode) = (store.clone(), PutMode::Match(etag.clone()));
                tokio::spawn(async move {
                    store
                        .put("k", format!("{round}-{writer}").into(), mode)
                        .await
                })
            });
            let outcomes = futures::future::join_all(writers).await;
            let won: Vec<_> = outcomes
                .into_iter()
                .filter_map(|outcome| outcome.unwrap().ok())
                .collect();
            assert_eq!(won.len(), 1);
            etag = won[0].clone().unwrap();
            assert_eq!(store.head("k").await?.etag.as_deref(), Some(etag.as_str()));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn deleting_the_last_object_of_a_directory_removes_it_but_never_the_root() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    let store = open(root.to_str().unwrap());
    let handle = store.clone();
    wait(async move {
        handle.put("a/b/1", "x".into(), PutMode::Overwrite).await?;
        handle.put("a/2", "x".into(), PutMode::Overwrite).await?;
        handle.delete("a/b/1").await
    })
    .unwrap();
    assert_eq!(names(&root.join("a")), ["2"]);
    wait(async move { store.delete("a/2").await }).unwrap();
    assert_eq!(names(&root), [""; 0]);
}

#[test]
fn a_directory_is_no_object() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path().to_str().unwrap());
    wait(async move {
        store.put("a/1", "x".into(), PutMode::Overwrite).await?;
        assert!(matches!(
            store.head("a").await,
            Err(StoreError::NotFound { .. })
        ));
        assert!(matches!(
            store.get("a").await,
            Err(StoreError::NotFound { .. })
        ));
        store.delete("a").await?;
        assert_eq!(store.get("a/1").await?, "x");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_named_pipe_is_no_object_and_blocks_no_reader() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = CString::new(dir.path().join("k").to_str().unwrap()).unwrap();
    // SAFETY: the path ends with a zero byte and outlives the call.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    let (store, to) = (open(dir.path().to_str().unwrap()), dir.path().join("copy"));
    let reads = async move {
        assert!(store.list("").await?.is_empty());
        let answers = [
            store.head("k").await.map(|_| ()),
            store.get("k").await.map(|_| ()),
            store.get_ranges("k", &[0..1]).await.map(|_| ()),
            store.download("k", &to, None).await.map(|_| ()),
        ];
        for answer in answers {
            assert!(
                matches!(answer, Err(StoreError::NotFound { .. })),
                "{answer:?}"
            );
        }
        assert!(!to.exists());
        Ok::<_, StoreError>(())
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    runtime::wait(reads, &|| Instant::now() > deadline)
        .unwrap()
        .unwrap();
}

#[test]
fn a_loop_of_links_ends_a_listing() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("a")).unwrap();
    std::fs::write(dir.path().join("a/1"), "x").unwrap();
    std::os::unix::fs::symlink("..", dir.path().join("a/up")).unwrap();
    let store = open(dir.path().to_str().unwrap());
    let keys: Vec<String> = wait(async move { store.list("").await })
        .unwrap()
        .into_iter()
        .map(|meta| meta.key)
        .collect();
    assert_eq!(keys, ["a/1"]);
}

#[test]
fn an_interrupted_wait_ends_at_once_and_stops_the_work() {
    let dropped = std::sync::Arc::new(());
    let held = std::sync::Arc::clone(&dropped);
    let work = async move {
        tokio::time::sleep(Duration::from_secs(6)).await;
        drop(held);
    };
    let started = Instant::now();
    let outcome = runtime::wait(work, &|| true);
    assert!(matches!(outcome, Err(StoreError::Interrupted)));
    assert!(started.elapsed() < Duration::from_millis(500));
    let deadline = Instant::now() + Duration::from_secs(5);
    while std::sync::Arc::strong_count(&dropped) > 1 {
        assert!(Instant::now() < deadline, "the work goes on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn ranges_return_slices_of_the_object(
        size in 0u64..3_000_000,
        cuts in prop::collection::vec((0.0f64..1.0, 0.0f64..1.0), 0..12),
        part_bytes in 4096u64..900_000,
    ) {
        let options = StoreOptions { part_bytes, ..StoreOptions::default() };
        let store = Store::open("memory://ranges", options).unwrap();
        let data = pattern(size as usize);
        let at = |share: f64| (share * size as f64) as u64;
        let ranges: Vec<_> = cuts.iter().map(|(a, b)| at(a.min(*b))..at(a.max(*b))).collect();
        let (asked, content) = (ranges.clone(), data.clone());
        let pieces = wait(async move {
            store.put("k", content, PutMode::Overwrite).await?;
            store.get_ranges("k", &asked).await
        })
        .unwrap();
        prop_assert_eq!(pieces.len(), ranges.len());
        for (piece, range) in pieces.iter().zip(&ranges) {
            prop_assert!(*piece == data[range.start as usize..range.end as usize], "{range:?}");
        }
    }
}
