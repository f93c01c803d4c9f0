//! A repository as a store of objects: its files, whole or in ranges, and its folders page by page.

use super::repository::{HubRepository, STORE, encoded_path, failed, parsed};
use super::response::{FileVersion, content_range, next_cursor, quoted};
use crate::error::StoreError;
use async_trait::async_trait;
use bytes::Bytes;
use chrono::DateTime;
use futures::StreamExt;
use futures::stream::BoxStream;
use http::{Method, StatusCode};
use object_store::client::HttpResponse;
use object_store::list::{PaginatedListOptions, PaginatedListResult, PaginatedListStore};
use object_store::path::Path as ObjectPath;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};
use serde::Deserialize;
use std::ops::Range;

/// The largest file that is read whole if a server ignores a range. Larger files are in a storage, which does not.
const WHOLE_BYTES: u64 = 16 << 20;

#[derive(Deserialize)]
struct TreeEntry {
    r#type: String,
    path: String,
    oid: String,
    #[serde(default)]
    size: u64,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    oid: String,
}

impl HubRepository {
    /// Requests one page of a listing.
    async fn page_of_tree(
        &self,
        folder: &str,
        options: &PaginatedListOptions,
    ) -> Result<PaginatedListResult> {
        let folder = encoded_path(folder.trim_end_matches('/'));
        let commit = self.commit().await?;
        let mut url = self.url(&["api", &self.name, "tree", commit, &folder]);
        let is_recursive = options.delimiter.is_none();
        url.query_pairs_mut()
            .append_pair("recursive", if is_recursive { "true" } else { "false" })
            .append_pair("expand", "false");
        if let Some(cursor) = &options.page_token {
            url.query_pairs_mut().append_pair("cursor", cursor);
        }
        let (answer, url) = self
            .follow(Method::GET, url, None, &mut FileVersion::default())
            .await?;
        let page_token = next_cursor(&answer, &url).map_err(failed)?;
        let body = answer.into_body().bytes().await.map_err(failed)?;
        let (mut common_prefixes, mut objects) = (Vec::new(), Vec::new());
        for entry in parsed::<Vec<TreeEntry>>(&body, &url)? {
            let location = ObjectPath::parse(&entry.path)?;
            match entry.r#type.as_str() {
                "directory" if is_recursive => {}
                "directory" => common_prefixes.push(location),
                _ => objects.push(meta(
                    location,
                    Some(quoted(
                        entry.lfs.as_ref().map_or(&entry.oid, |file| &file.oid),
                    )),
                    entry.size,
                )),
            }
        }
        let result = ListResult {
            common_prefixes,
            objects,
            extensions: Default::default(),
        };
        Ok(PaginatedListResult { result, page_token })
    }
}

#[async_trait]
impl PaginatedListStore for HubRepository {
    async fn list_paginated(
        &self,
        prefix: Option<&str>,
        options: PaginatedListOptions,
    ) -> Result<PaginatedListResult> {
        self.page_of_tree(prefix.unwrap_or_default(), &options)
            .await
    }
}

#[async_trait]
impl ObjectStore for HubRepository {
    async fn get_opts(&self, location: &ObjectPath, options: GetOptions) -> Result<GetResult> {
        let method = if options.head {
            Method::HEAD
        } else {
            Method::GET
        };
        let range = options.range.as_ref();
        let (answer, version) = self.file(location.as_ref(), method, range).await?;
        let Some(size) = version.size else {
            return Err(failed(StoreError::io(
                format!("{}/{location}", self.page()),
                "the response has no size; check `HF_ENDPOINT` and the proxy",
            )));
        };
        let meta = meta(location.clone(), version.etag, size);
        // The tag of a storage may be another one, so the condition is not sent.
        if options.if_match.is_some() && options.if_match != meta.e_tag {
            return Err(Error::Precondition {
                path: location.to_string(),
                source: "another entity tag".into(),
            });
        }
        let (range, payload) = if options.head {
            (0..0, futures::stream::empty().boxed())
        } else {
            body(answer, range, size).await?
        };
        Ok(GetResult {
            payload: GetResultPayload::Stream(payload),
            meta,
            range,
            attributes: Default::default(),
            extensions: Default::default(),
        })
    }

    async fn put_opts(&self, _: &ObjectPath, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        Err(read_only("put"))
    }

    async fn put_multipart_opts(
        &self,
        _: &ObjectPath,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(read_only("upload"))
    }

    fn delete_stream(
        &self,
        _: BoxStream<'static, Result<ObjectPath>>,
    ) -> BoxStream<'static, Result<ObjectPath>> {
        futures::stream::once(async { Err(read_only("delete")) }).boxed()
    }

    fn list(&self, _: Option<&ObjectPath>) -> BoxStream<'static, Result<ObjectMeta>> {
        futures::stream::once(async { Err(read_only("list without pages")) }).boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&ObjectPath>) -> Result<ListResult> {
        Err(read_only("list without pages"))
    }

    async fn copy_opts(&self, _: &ObjectPath, _: &ObjectPath, _: CopyOptions) -> Result<()> {
        Err(read_only("copy"))
    }
}

/// Returns the bytes of a response, and their range in the file of `size` bytes. A whole file is cut to the
/// range if the server has ignored it.
async fn body(
    answer: HttpResponse,
    asked: Option<&GetRange>,
    size: u64,
) -> Result<(Range<u64>, BoxStream<'static, Result<Bytes>>)> {
    if answer.status() == StatusCode::PARTIAL_CONTENT {
        let found = content_range(&answer).map(|(range, _)| range);
        let range = found.filter(|found| match asked {
            Some(GetRange::Bounded(asked)) => *found == (asked.start..asked.end.min(size)),
            _ => true,
        });
        return match range {
            Some(range) => Ok((range, stream(answer))),
            None => Err(failed("the response has another range than the request")),
        };
    }
    let Some(GetRange::Bounded(asked)) = asked else {
        return Ok((0..size, stream(answer)));
    };
    let range = asked.start.min(size)..asked.end.min(size);
    if range == (0..size) {
        return Ok((range, stream(answer)));
    }
    if size > WHOLE_BYTES {
        return Err(Error::NotSupported {
            source: "the server ignores ranges".into(),
        });
    }
    let whole = answer.into_body().bytes().await.map_err(failed)?;
    let end = (range.end as usize).min(whole.len());
    let cut = whole.slice((range.start as usize).min(end)..end);
    Ok((range, futures::stream::once(async { Ok(cut) }).boxed()))
}

fn stream(answer: HttpResponse) -> BoxStream<'static, Result<Bytes>> {
    let chunks = answer.into_body().bytes_stream();
    chunks.map(|chunk| chunk.map_err(failed)).boxed()
}

/// Returns the metadata of a file. A commit's files never change, and have no time of their own.
fn meta(location: ObjectPath, e_tag: Option<String>, size: u64) -> ObjectMeta {
    ObjectMeta {
        location,
        last_modified: DateTime::UNIX_EPOCH,
        size,
        e_tag,
        version: None,
    }
}

fn read_only(verb: &str) -> Error {
    Error::NotImplemented {
        operation: verb.to_owned(),
        implementer: STORE.to_owned(),
    }
}
