//! The request that lists unfinished multipart uploads.
//!
//! `object_store` has no such listing, so the request is made here with the client's credentials. S3 and
//! Google's XML API use the same format.

use http::header::AUTHORIZATION;
use http::{Method, Request};
use object_store::aws::{AmazonS3, AwsAuthorizer};
use object_store::client::{HttpClient, HttpRequestBody};
use object_store::gcp::GoogleCloudStorage;
use object_store::path::Path as ObjectPath;
use object_store::signer::Signer;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use url::Url;

/// The additional state needed to list uploads.
#[derive(Debug)]
pub(crate) struct UploadLister {
    pub(crate) dialect: UploadApi,
    pub(crate) client: HttpClient,
}

/// The service that owns the bucket, which determines its URL and the signature of requests.
#[derive(Debug)]
pub(crate) enum UploadApi {
    S3 {
        store: Arc<AmazonS3>,
        region: String,
        requester_pays: bool,
    },
    Google {
        store: Arc<GoogleCloudStorage>,
        bucket_url: Url,
    },
}

/// One page of the response.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct UploadPage {
    #[serde(default, rename = "Upload")]
    pub(crate) uploads: Vec<ListedUpload>,
    #[serde(default)]
    pub(crate) is_truncated: bool,
    pub(crate) next_key_marker: Option<String>,
    pub(crate) next_upload_id_marker: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct ListedUpload {
    pub(crate) key: String,
    pub(crate) upload_id: String,
    pub(crate) initiated: String,
}

impl UploadLister {
    /// Fetches one page as XML.
    pub(crate) async fn page(
        &self,
        prefix: &str,
        after: Option<&(String, String)>,
    ) -> object_store::Result<String> {
        let mut url = self.bucket_url().await?;
        {
            let mut query = url.query_pairs_mut();
            query
                .append_pair("uploads", "")
                .append_pair("prefix", prefix);
            if let Some((key, id)) = after {
                query.append_pair("key-marker", key);
                query.append_pair("upload-id-marker", id);
            }
        }
        let mut request = Request::builder()
            .method(Method::GET)
            .uri(url.as_str())
            .body(HttpRequestBody::empty())
            .map_err(failed)?;
        match &self.dialect {
            UploadApi::S3 {
                store,
                region,
                requester_pays,
            } => {
                let credential = store.credentials().get_credential().await?;
                AwsAuthorizer::new(&credential, "s3", region)
                    .with_request_payer(*requester_pays)
                    .try_authorize(&mut request, None)?;
            }
            UploadApi::Google { store, .. } => {
                let credential = store.credentials().get_credential().await?;
                let token = format!("Bearer {}", credential.bearer);
                let token = token.parse().map_err(failed)?;
                request.headers_mut().insert(AUTHORIZATION, token);
            }
        }
        let answer = self.client.execute(request).await.map_err(failed)?;
        let status = answer.status();
        let body = answer.into_body().bytes().await.map_err(failed)?;
        let text = String::from_utf8_lossy(&body).into_owned();
        if status.is_success() {
            Ok(text)
        } else {
            let start: String = text.chars().take(400).collect();
            Err(failed(format!("{status}: {start}")))
        }
    }

    /// Returns the bucket's URL. S3's client exposes it only through signed URLs.
    async fn bucket_url(&self) -> object_store::Result<Url> {
        let store = match &self.dialect {
            UploadApi::S3 { store, .. } => store,
            UploadApi::Google { bucket_url, .. } => return Ok(bucket_url.clone()),
        };
        let name = "x";
        let path = ObjectPath::from(name);
        let mut url = store
            .signed_url(Method::GET, &path, Duration::from_secs(60))
            .await?;
        url.set_query(None);
        let path = url.path().strip_suffix(name).map(str::to_owned);
        url.set_path(&path.unwrap_or_default());
        Ok(url)
    }
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> object_store::Error {
    object_store::Error::Generic {
        store: "S3",
        source: error.into(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn empty_and_full_pages_are_parsed() {
        let empty = "<ListMultipartUploadsResult><Bucket>b</Bucket><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>";
        assert!(
            quick_xml::de::from_str::<UploadPage>(empty)
                .unwrap()
                .uploads
                .is_empty()
        );
        let two = "<ListMultipartUploadsResult><Upload><Key>a&amp;b</Key><UploadId>1</UploadId><Initiated>2026-01-01T00:00:00.000Z</Initiated></Upload>\
            <Upload><Key>c</Key><UploadId>2</UploadId><Initiated>2026-01-01T00:00:00.000Z</Initiated></Upload>\
            <IsTruncated>true</IsTruncated><NextKeyMarker>c</NextKeyMarker><NextUploadIdMarker>2</NextUploadIdMarker></ListMultipartUploadsResult>";
        let page: UploadPage = quick_xml::de::from_str(two).unwrap();
        assert_eq!(
            (page.uploads[0].key.as_str(), page.uploads.len()),
            ("a&b", 2)
        );
        assert!(page.is_truncated);
    }
}
