//! Paginated listing of a store.

use crate::client::Remote;
use crate::error::{Result, StoreError};
use crate::local;
use crate::meta::{Listing, ObjectMeta};
use crate::retry::{Load, Tries};
use crate::store::{Backend, Store};
use crate::uri::check_segments;
use futures::TryStreamExt;
use object_store::list::PaginatedListOptions;
use object_store::path::Path as ObjectPath;
use object_store::{ListResult, ObjectStore};

impl Store {
    /// Lists all objects below `prefix`, sorted by key. The prefix matches whole path segments: `a` matches
    /// `a/b`, not `ab`.
    ///
    /// # Errors
    /// As [`head`](Self::head). A prefix without objects gives an empty list.
    pub async fn list(&self, prefix: &str) -> Result<Vec<ObjectMeta>> {
        Ok(self.list_level(prefix, false).await?.objects)
    }

    /// Lists one level below `prefix`.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    pub async fn list_dirs(&self, prefix: &str) -> Result<Listing> {
        self.list_level(prefix, true).await
    }

    async fn list_level(&self, prefix: &str, one_level: bool) -> Result<Listing> {
        let prefix = prefix.trim_end_matches('/');
        check_segments(self.uri(), prefix)?;
        self.check_verb("list")?;
        let mut listing = match self.backend().await? {
            Backend::Local => local::list(self.clone(), prefix.to_owned(), one_level).await?,
            Backend::Remote(remote) => self.list_remote(&remote, prefix, one_level).await?,
        };
        listing.dirs.sort_unstable();
        listing
            .objects
            .sort_unstable_by(|left, right| left.key.cmp(&right.key));
        Ok(listing)
    }

    async fn list_remote(&self, remote: &Remote, prefix: &str, one_level: bool) -> Result<Listing> {
        let uri = self.object_uri(prefix);
        let path = self.path(prefix)?;
        let from = (!path.as_ref().is_empty()).then_some(&path);
        let mut listing = Listing::default();
        let Some(pages) = &remote.pages else {
            let found = list_memory(&*remote.objects, from, one_level).await;
            self.add_page(
                &mut listing,
                found.map_err(|error| StoreError::io(uri, error.to_string()))?,
            );
            return Ok(listing);
        };
        let full = from.map(|path| format!("{path}/"));
        let mut token = None;
        loop {
            let mut tries = Tries::new(self, prefix, Load::None);
            let page = loop {
                let options = PaginatedListOptions {
                    delimiter: one_level.then(|| "/".into()),
                    page_token: token.clone(),
                    ..PaginatedListOptions::default()
                };
                match tries
                    .attempt(remote, pages.list_paginated(full.as_deref(), options))
                    .await
                {
                    Ok(mut page) => {
                        page.result.objects.iter_mut().for_each(quote);
                        break page;
                    }
                    Err(fault) => tries.pause(fault).await?,
                }
            };
            self.add_page(&mut listing, page.result);
            token = page.page_token;
            if token.is_none() {
                return Ok(listing);
            }
        }
    }

    fn add_page(&self, listing: &mut Listing, page: ListResult) {
        let own = self.prefix();
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
            .filter_map(|meta| Some(self.meta(&strip(&meta.location)?, meta)));
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
