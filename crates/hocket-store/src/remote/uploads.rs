//! Unfinished multipart uploads: listing and aborting them.

use crate::client::{UploadLister, UploadPage};
use crate::error::{Result, StoreError};
use crate::remote::requests::{RemoteStore, found};
use crate::remote::retry::TransferBytes;
use crate::values::meta::OpenUpload;

impl RemoteStore {
    /// See [`Store::list_uploads`](crate::Store::list_uploads).
    pub(crate) async fn list_uploads(&self) -> Result<Vec<OpenUpload>> {
        let Some(lister) = &self.client.uploads else {
            return Ok(Vec::new());
        };
        let own = match self.handle.prefix() {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        };
        let mut found = Vec::new();
        let mut after = None;
        loop {
            let page = self.page_of_uploads(lister, &own, after).await?;
            for upload in page.uploads {
                let Some(key) = upload.key.strip_prefix(&own) else {
                    continue;
                };
                let initiated = chrono::DateTime::parse_from_rfc3339(&upload.initiated);
                let initiated = initiated.map_err(|error| {
                    StoreError::io(
                        self.handle.uri(),
                        format!(
                            "the start of an unfinished upload, `{}`, is not a valid time: {error}",
                            upload.initiated
                        ),
                    )
                })?;
                found.push(OpenUpload {
                    key: key.to_owned(),
                    id: upload.upload_id,
                    initiated_ms: initiated.timestamp_millis(),
                });
            }
            after = match (page.is_truncated, page.next_key_marker) {
                (true, Some(key)) => Some((key, page.next_upload_id_marker.unwrap_or_default())),
                _ => return Ok(found),
            };
        }
    }

    /// See [`Store::abort_upload`](crate::Store::abort_upload).
    pub(crate) async fn abort_upload(&self, key: &str, id: &str) -> Result<()> {
        let Some(multipart) = &self.client.multipart else {
            return Ok(());
        };
        let (path, id) = (self.handle.path(key)?, id.to_owned());
        let request = || multipart.abort_multipart(&path, &id);
        let aborted = self.with_retries(key, TransferBytes::None, request).await;
        found(aborted).map(Option::unwrap_or_default)
    }

    async fn page_of_uploads(
        &self,
        lister: &UploadLister,
        prefix: &str,
        after: Option<(String, String)>,
    ) -> Result<UploadPage> {
        let request = || lister.page(prefix, after.as_ref());
        let text = self.with_retries("", TransferBytes::None, request).await?;
        quick_xml::de::from_str(&text).map_err(|error| {
            let reason = format!("the listing of unfinished uploads is not valid S3 XML: {error}");
            StoreError::io(self.handle.uri(), reason)
        })
    }
}
