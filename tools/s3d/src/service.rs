//! The S3 operations that this server speaks, over [`Store`].

use std::sync::Arc;

use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use crate::blobs::hex;
use crate::listing::{Entry, Query, page};
use crate::store::{Condition, Store};
use crate::{multipart, objects};

const MOST_KEYS: i32 = 1000;

/// The store as s3s wants to see it.
#[derive(Clone)]
pub struct Service(pub Arc<Store>);

type Answer<T> = S3Result<S3Response<T>>;

#[async_trait::async_trait]
impl S3 for Service {
    async fn create_bucket(
        &self,
        request: S3Request<CreateBucketInput>,
    ) -> Answer<CreateBucketOutput> {
        let bucket = request.input.bucket;
        if !self.0.create_bucket(&bucket)? {
            return Err(s3_error!(
                BucketAlreadyOwnedByYou,
                "there is a bucket `{bucket}`"
            ));
        }
        Ok(S3Response::new(CreateBucketOutput {
            location: Some(format!("/{bucket}")),
        }))
    }

    async fn delete_bucket(
        &self,
        request: S3Request<DeleteBucketInput>,
    ) -> Answer<DeleteBucketOutput> {
        self.0.delete_bucket(&request.input.bucket)?;
        Ok(S3Response::new(DeleteBucketOutput {}))
    }

    async fn head_bucket(&self, request: S3Request<HeadBucketInput>) -> Answer<HeadBucketOutput> {
        self.0.read(&request.input.bucket, |_| Ok(()))?;
        Ok(S3Response::new(HeadBucketOutput::default()))
    }

    async fn get_bucket_location(
        &self,
        request: S3Request<GetBucketLocationInput>,
    ) -> Answer<GetBucketLocationOutput> {
        self.0.read(&request.input.bucket, |_| Ok(()))?;
        Ok(S3Response::new(GetBucketLocationOutput::default()))
    }

    async fn list_buckets(&self, _: S3Request<ListBucketsInput>) -> Answer<ListBucketsOutput> {
        let buckets = self.0.bucket_names().into_iter().map(|name| Bucket {
            name: Some(name),
            ..Default::default()
        });
        Ok(S3Response::new(ListBucketsOutput {
            buckets: Some(buckets.collect()),
            ..Default::default()
        }))
    }

    async fn list_objects(
        &self,
        request: S3Request<ListObjectsInput>,
    ) -> Answer<ListObjectsOutput> {
        let marker = request.input.marker.clone();
        let input = ListObjectsV2Input::from(request.input);
        let query = query(&input, marker.clone());
        let listed = list(&self.0, &input, &query)?;
        Ok(S3Response::new(ListObjectsOutput {
            name: Some(input.bucket),
            prefix: listed.prefix,
            marker,
            max_keys: listed.max_keys,
            is_truncated: listed.is_truncated,
            next_marker: listed
                .is_truncated
                .is_some_and(|cut| cut)
                .then_some(listed.last)
                .flatten(),
            contents: listed.contents,
            common_prefixes: listed.common_prefixes,
            delimiter: listed.delimiter,
            encoding_type: input.encoding_type,
            ..Default::default()
        }))
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> Answer<ListObjectsV2Output> {
        let input = request.input;
        let token = input
            .continuation_token
            .as_deref()
            .map(parse_token)
            .transpose()?;
        let query = query(&input, token.or_else(|| input.start_after.clone()));
        let listed = list(&self.0, &input, &query)?;
        let next = listed
            .is_truncated
            .is_some_and(|cut| cut)
            .then_some(listed.raw_last)
            .flatten();
        Ok(S3Response::new(ListObjectsV2Output {
            key_count: listed.count,
            name: Some(input.bucket),
            prefix: listed.prefix,
            max_keys: listed.max_keys,
            is_truncated: listed.is_truncated,
            continuation_token: input.continuation_token,
            next_continuation_token: next.map(|key| hex(key.as_bytes())),
            contents: listed.contents,
            common_prefixes: listed.common_prefixes,
            delimiter: listed.delimiter,
            start_after: input.start_after,
            encoding_type: input.encoding_type,
            ..Default::default()
        }))
    }

    async fn put_object(&self, request: S3Request<PutObjectInput>) -> Answer<PutObjectOutput> {
        Ok(S3Response::new(objects::put(&self.0, request).await?))
    }

    async fn get_object(&self, request: S3Request<GetObjectInput>) -> Answer<GetObjectOutput> {
        Ok(S3Response::new(objects::get(&self.0, request.input).await?))
    }

    async fn head_object(&self, request: S3Request<HeadObjectInput>) -> Answer<HeadObjectOutput> {
        Ok(S3Response::new(objects::head(&self.0, request.input)?))
    }

    async fn copy_object(&self, request: S3Request<CopyObjectInput>) -> Answer<CopyObjectOutput> {
        let object = objects::copy(&self.0, request.input).await?;
        let result = CopyObjectResult {
            e_tag: Some(ETag::Strong(object.etag)),
            last_modified: Some(objects::timestamp(object.modified_ms)),
            ..Default::default()
        };
        Ok(S3Response::new(CopyObjectOutput {
            copy_object_result: Some(result),
            ..Default::default()
        }))
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> Answer<DeleteObjectOutput> {
        let input = request.input;
        let condition = Condition {
            if_match: input.if_match,
            if_none_match: None,
        };
        self.0.delete(&input.bucket, &input.key, &condition)?;
        Ok(S3Response::with_status(
            DeleteObjectOutput::default(),
            http::StatusCode::NO_CONTENT,
        ))
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> Answer<DeleteObjectsOutput> {
        let DeleteObjectsInput { bucket, delete, .. } = request.input;
        if delete.objects.len() > 1000 {
            return Err(s3_error!(
                MalformedXML,
                "{} keys; expected at most 1000",
                delete.objects.len()
            ));
        }
        let mut deleted = Vec::new();
        for object in delete.objects {
            self.0.delete(&bucket, &object.key, &Condition::default())?;
            deleted.push(DeletedObject {
                key: Some(object.key),
                ..Default::default()
            });
        }
        let deleted = (!delete.quiet.unwrap_or_default()).then_some(deleted);
        Ok(S3Response::new(DeleteObjectsOutput {
            deleted,
            ..Default::default()
        }))
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> Answer<CreateMultipartUploadOutput> {
        let (bucket, key) = (request.input.bucket.clone(), request.input.key.clone());
        let (algorithm, kind) = (
            request.input.checksum_algorithm.clone(),
            request.input.checksum_type.clone(),
        );
        Ok(S3Response::new(CreateMultipartUploadOutput {
            upload_id: Some(multipart::create(&self.0, request.input)?),
            bucket: Some(bucket),
            key: Some(key),
            checksum_algorithm: algorithm,
            checksum_type: kind,
            ..Default::default()
        }))
    }

    async fn upload_part(&self, request: S3Request<UploadPartInput>) -> Answer<UploadPartOutput> {
        Ok(S3Response::new(
            multipart::upload_part(&self.0, request).await?,
        ))
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> Answer<CompleteMultipartUploadOutput> {
        let (bucket, key) = (request.input.bucket.clone(), request.input.key.clone());
        let object = multipart::complete(&self.0, request.input).await?;
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            location: Some(format!("/{bucket}/{key}")),
            bucket: Some(bucket),
            key: Some(key),
            e_tag: Some(ETag::Strong(object.etag)),
            ..Default::default()
        }))
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> Answer<AbortMultipartUploadOutput> {
        let input = request.input;
        multipart::abort(&self.0, &input.bucket, &input.key, &input.upload_id)?;
        Ok(S3Response::with_status(
            AbortMultipartUploadOutput::default(),
            http::StatusCode::NO_CONTENT,
        ))
    }

    async fn list_parts(&self, request: S3Request<ListPartsInput>) -> Answer<ListPartsOutput> {
        let input = request.input;
        let after = input.part_number_marker.unwrap_or_default();
        let most = usize::try_from(input.max_parts.unwrap_or(MOST_KEYS).clamp(0, MOST_KEYS))
            .unwrap_or_default();
        let mut parts: Vec<Part> =
            self.0
                .with_upload(&input.bucket, &input.key, &input.upload_id, |upload| {
                    let listed = upload
                        .parts
                        .range(after.saturating_add(1)..)
                        .take(most + 1)
                        .map(|(number, part)| Part {
                            part_number: Some(*number),
                            size: i64::try_from(part.size).ok(),
                            e_tag: Some(ETag::Strong(hex(&part.md5))),
                            last_modified: Some(objects::timestamp(part.modified_ms)),
                            ..Default::default()
                        });
                    Ok(listed.collect())
                })?;
        let is_truncated = parts.len() > most;
        parts.truncate(most);
        Ok(S3Response::new(ListPartsOutput {
            is_truncated: Some(is_truncated),
            next_part_number_marker: parts
                .last()
                .and_then(|part| part.part_number)
                .filter(|_| is_truncated),
            part_number_marker: Some(after),
            parts: Some(parts),
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            ..Default::default()
        }))
    }

    async fn list_multipart_uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> Answer<ListMultipartUploadsOutput> {
        let input = request.input;
        let found = self
            .0
            .uploads(&input.bucket, input.prefix.as_deref().unwrap_or(""))?;
        let encode = encoder(input.encoding_type.as_ref());
        let uploads = found
            .into_iter()
            .map(|(key, id, created_ms)| MultipartUpload {
                key: Some(encode(&key)),
                upload_id: Some(id),
                initiated: Some(objects::timestamp(created_ms)),
                ..Default::default()
            });
        Ok(S3Response::new(ListMultipartUploadsOutput {
            uploads: Some(uploads.collect()),
            is_truncated: Some(false),
            encoding_type: input.encoding_type,
            prefix: input.prefix,
            bucket: Some(input.bucket),
            ..Default::default()
        }))
    }
}

/// A page of either version of the operation.
struct Listed {
    count: Option<i32>,
    contents: Option<Vec<Object>>,
    common_prefixes: Option<Vec<CommonPrefix>>,
    prefix: Option<String>,
    delimiter: Option<String>,
    max_keys: Option<i32>,
    is_truncated: Option<bool>,
    last: Option<String>,
    raw_last: Option<String>,
}

fn query(input: &ListObjectsV2Input, after: Option<String>) -> Query {
    Query {
        prefix: input.prefix.clone().unwrap_or_default(),
        delimiter: input.delimiter.clone(),
        after,
        limit: usize::try_from(max_keys(input)).unwrap_or_default(),
    }
}

fn max_keys(input: &ListObjectsV2Input) -> i32 {
    input.max_keys.unwrap_or(MOST_KEYS).clamp(0, MOST_KEYS)
}

fn list(store: &Store, input: &ListObjectsV2Input, query: &Query) -> S3Result<Listed> {
    let encode = encoder(input.encoding_type.as_ref());
    store.read(&input.bucket, |objects| {
        let (entries, is_truncated) = page(objects, query);
        let raw_last = entries.last().map(|entry| entry.name().to_owned());
        let (mut contents, mut groups) = (Vec::new(), Vec::new());
        let count = i32::try_from(entries.len()).ok();
        for entry in entries {
            match entry {
                Entry::Group(prefix) => groups.push(CommonPrefix {
                    prefix: Some(encode(&prefix)),
                }),
                Entry::Object(key, object) => contents.push(Object {
                    key: Some(encode(key)),
                    size: i64::try_from(object.size).ok(),
                    e_tag: Some(ETag::Strong(object.etag.clone())),
                    last_modified: Some(objects::timestamp(object.modified_ms)),
                    ..Default::default()
                }),
            }
        }
        Ok(Listed {
            count,
            contents: Some(contents),
            common_prefixes: Some(groups),
            prefix: input.prefix.as_deref().map(&encode),
            delimiter: input.delimiter.as_deref().map(&encode),
            max_keys: Some(max_keys(input)),
            is_truncated: Some(is_truncated),
            last: raw_last.as_deref().map(&encode),
            raw_last,
        })
    })
}

/// Keys as an answer carries them: percent-encoded where the client asked for it, since XML cannot hold every key.
fn encoder(encoding: Option<&EncodingType>) -> impl Fn(&str) -> String + use<> {
    let is_url = encoding.is_some_and(|encoding| encoding.as_str() == EncodingType::URL);
    move |text| {
        if !is_url {
            return text.to_owned();
        }
        let mut encoded = String::with_capacity(text.len());
        for byte in text.bytes() {
            if byte.is_ascii_alphanumeric() || b"-_.~/*".contains(&byte) {
                encoded.push(char::from(byte));
            } else {
                encoded.push_str(&format!("%{byte:02X}"));
            }
        }
        encoded
    }
}

fn parse_token(token: &str) -> S3Result<String> {
    let bytes = token.as_bytes().chunks(2).map(|pair| {
        let digits = std::str::from_utf8(pair)
            .ok()
            .filter(|digits| digits.len() == 2)?;
        u8::from_str_radix(digits, 16).ok()
    });
    let key = bytes
        .collect::<Option<Vec<u8>>>()
        .and_then(|bytes| String::from_utf8(bytes).ok());
    key.ok_or_else(|| {
        s3_error!(
            InvalidArgument,
            "the continuation token is none of this server's"
        )
    })
}
