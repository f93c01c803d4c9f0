//! Paginated listing of a remote store.

use crate::error::{Result, StoreError};
use crate::remote::requests::RemoteStore;
use crate::remote::retry::TransferBytes;
use crate::values::meta::LevelListing;
use futures::TryStreamExt;
use object_store::list::PaginatedListOptions;
use object_store::path::Path as ObjectPath;
use object_store::{ListResult, ObjectStore};

impl RemoteStore {
    /// Lists the objects below `prefix`, or one level; the result is unsorted.
    pub(crate) async fn list(&self, prefix: &str, one_level: bool) -> Result<LevelListing> {
        let uri = self.handle.object_uri(prefix);
        let path = self.handle.path(prefix)?;
        let from = (!path.as_ref().is_empty()).then_some(&path);
        let mut listing = LevelListing::default();
        let Some(pages) = &self.client.pages else {
            let found = list_memory(&*self.client.objects, from, one_level).await;
            self.add_page(
                &mut listing,
                found.map_err(|error| StoreError::io(uri, error.to_string()))?,
            );
            return Ok(listing);
        };
        let full = from.map(|path| format!("{path}/"));
        let mut token = None;
        loop {
            let request = || {
                let options = PaginatedListOptions {
                    delimiter: one_level.then(|| "/".into()),
                    page_token: token.clone(),
                    ..PaginatedListOptions::default()
                };
                pages.list_paginated(full.as_deref(), options)
            };
            let page = self.with_retries(prefix, TransferBytes::None, request);
            let mut page = match page.await {
                // A hub answers so for a folder without files; a missing repository is another error.
                Err(StoreError::NotFound { .. })
                    if self.client.repository.is_some() && token.is_none() =>
                {
                    return Ok(listing);
                }
                page => page?,
            };
            page.result.objects.iter_mut().for_each(quote);
            self.add_page(&mut listing, page.result);
            token = page.page_token;
            if token.is_none() {
                return Ok(listing);
            }
        }
    }

    fn add_page(&self, listing: &mut LevelListing, page: ListResult) {
        let own = self.handle.prefix();
        let strip = |path: &ObjectPath| {
            path.as_ref()
                .strip_prefix(own)
                .map(|key| key.trim_start_matches('/').to_owned())
        };
        listing
            .dirs
            .extend(page.common_prefixes.iter().filter_map(strip));
        let objects = page
            .objects
            .iter()
            .filter_map(|meta| Some(self.handle.meta(&strip(&meta.location)?, meta)));
        listing
            .objects
            .extend(objects.filter(|meta| !meta.key.is_empty()));
    }
}

/// Adds the quotes to ETags in Azure's listings; every other response has them.
fn quote(meta: &mut object_store::ObjectMeta) {
    if let Some(tag) = &mut meta.e_tag
        && !tag.ends_with('"')
    {
        *tag = format!("\"{tag}\"");
    }
}

async fn list_memory(
    objects: &dyn ObjectStore,
    prefix: Option<&ObjectPath>,
    one_level: bool,
) -> object_store::Result<ListResult> {
    if one_level {
        return objects.list_with_delimiter(prefix).await;
    }
    let objects = objects.list(prefix).try_collect().await?;
    Ok(ListResult {
        common_prefixes: Vec::new(),
        objects,
        extensions: Default::default(),
    })
}
