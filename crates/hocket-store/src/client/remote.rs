//! A client of one bucket, with its permits and counters.

use super::hub::repository::HubRepository;
use super::key::ClientKey;
use super::lister::UploadLister;
use crate::process::counters::{self, RequestCounters};
use crate::service::Service;
use crate::values::handle::StoreHandle;
use crate::values::options::StoreOptions;
use object_store::ObjectStore;
use object_store::list::PaginatedListStore;
use object_store::memory::InMemory;
use object_store::multipart::MultipartStore;
use std::sync::Arc;
use tokio::sync::{Semaphore, SemaphorePermit};

/// A remote store: a service, or the in-memory store in its place.
pub(crate) struct StoreClient {
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// `None` for read-only stores.
    pub(crate) multipart: Option<Arc<dyn MultipartStore>>,
    /// The listing by pages, so that a retry repeats one page and not the whole listing.
    pub(crate) pages: Option<Arc<dyn PaginatedListStore>>,
    /// The repository of a hub.
    pub(crate) repository: Option<Arc<HubRepository>>,
    /// The listing of unfinished multipart uploads, where the service supports it.
    pub(crate) uploads: Option<UploadLister>,
    /// Whether conditional replaces use a generation instead of an ETag.
    pub(crate) has_generations: bool,
    /// The credentials profile whose keys this client uses, if its keys are renewed from outside.
    pub(crate) profile: Option<String>,
    /// The region that requests are signed for, on S3.
    pub(crate) region: Option<String>,
    /// The address of the service, as far as it depends on options, variables and profiles.
    pub(crate) address: String,
    /// The remedy named in a message when access is refused.
    pub(crate) credentials_help: &'static str,
    /// The process-wide counters.
    pub(crate) counters: Arc<RequestCounters>,
    pub(super) travels: bool,
    pub(super) requests: Semaphore,
}

impl StoreClient {
    /// Waits for a permit to make one more request.
    pub(crate) async fn room(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.requests.acquire().await.ok()
    }

    /// Returns whether requests cross a network; only those can fail transiently.
    pub(crate) fn is_http(&self) -> bool {
        self.travels
    }

    /// Updates the counters of a handle and of the process, if requests cross a network.
    pub(crate) fn count(&self, handle: &StoreHandle, note: impl Fn(&RequestCounters)) {
        if self.travels {
            note(handle.counters());
            note(&self.counters);
        }
    }

    pub(super) fn memory(store: Arc<InMemory>, options: &StoreOptions) -> Self {
        Self {
            objects: Arc::clone(&store) as _,
            multipart: Some(store),
            pages: None,
            repository: None,
            uploads: None,
            has_generations: false,
            profile: None,
            region: None,
            address: String::new(),
            credentials_help: "",
            counters: counters::of_process(),
            travels: false,
            requests: Semaphore::new(options.max_requests.min(Semaphore::MAX_PERMITS)),
        }
    }

    /// Builds a client for a service with all operations.
    pub(super) fn service<T>(store: Arc<T>, key: &ClientKey) -> Self
    where
        T: ObjectStore + MultipartStore + PaginatedListStore,
    {
        Self {
            multipart: Some(Arc::clone(&store) as _),
            pages: Some(Arc::clone(&store) as _),
            ..Self::reader(store, key)
        }
    }

    /// Builds a client for a service that can only be read.
    pub(super) fn reader(objects: Arc<dyn ObjectStore>, key: &ClientKey) -> Self {
        Self {
            objects,
            multipart: None,
            pages: None,
            repository: None,
            uploads: None,
            has_generations: key.bucket.service == Service::Gcs,
            profile: None,
            region: None,
            address: String::new(),
            credentials_help: key.bucket.service.credentials_help(),
            counters: counters::of_process(),
            travels: true,
            requests: Semaphore::new(key.max_requests.min(Semaphore::MAX_PERMITS)),
        }
    }
}

#[cfg(test)]
impl StoreClient {
    /// Returns a client for tests that make no request.
    pub(crate) fn test() -> Self {
        Self::reader(
            Arc::new(InMemory::new()),
            &ClientKey::test("s3://b", &[], None),
        )
    }
}
