//! The supported S3 operations, implemented on [`Store`].

use std::sync::Arc;

use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use crate::blobs::hex;
use crate::pages::{encoder, list, parse_token, query};
use crate::store::{Condition, Store};
use crate::{multipart, objects};

/// The store as an `s3s` service.
#[derive(Clone)]
pub struct Service(pub Arc<Store>);

/// Limit of the parts on one page.
const MOST_PARTS: i32 = 1000;

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
        let object = multipart::complete(&self.0, request.input)?;
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
        let most = usize::try_from(input.max_parts.unwrap_or(MOST_PARTS).clamp(0, MOST_PARTS))
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
