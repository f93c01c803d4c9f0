//! The clients behind store handles, created at first use and kept in the process table.

mod azure;
pub mod credentials;
mod gcs;
pub(crate) mod http;
pub(crate) mod hub;
mod key;
mod lister;
mod proxy;
mod remote;
mod s3;
mod shared_config;
mod web;

pub(crate) use lister::{UploadLister, UploadPage};
pub(crate) use remote::StoreClient;

use crate::error::Result;
use crate::process::table;
use crate::service::Service;
use crate::values::bucket::Bucket;
use crate::values::env::EnvSnapshot;
use crate::values::options::StoreOptions;
use key::ClientKey;
use object_store::memory::InMemory;
use std::collections::HashMap;
use std::sync::Arc;

/// One client per bucket, options and credentials in the environment.
#[derive(Default)]
struct ServiceClients(HashMap<ClientKey, Arc<StoreClient>>);

/// The memory stores by name.
#[derive(Default)]
struct MemoryStores(HashMap<String, Arc<InMemory>>);

/// Returns the memory store `name` of this process.
pub(crate) fn memory(name: &str, options: &StoreOptions) -> Arc<StoreClient> {
    let store = table::with(|memories: &mut MemoryStores| {
        Arc::clone(memories.0.entry(name.to_owned()).or_default())
    });
    Arc::new(StoreClient::memory(store, options))
}

/// Returns the client of `bucket` for the credentials in `env`.
pub(crate) async fn open(
    bucket: &Bucket,
    options: &StoreOptions,
    env: &EnvSnapshot,
) -> Result<Arc<StoreClient>> {
    let key = ClientKey::new(bucket, options, env);
    if let Some(remote) = table::with(|clients: &mut ServiceClients| clients.0.get(&key).cloned()) {
        return Ok(remote);
    }
    let remote = Arc::new(match bucket.service {
        Service::S3 | Service::Oci => s3::connect(&key).await?,
        Service::Gcs => gcs::connect(&key)?,
        Service::Azure => azure::connect(&key)?,
        Service::Http | Service::Https => web::connect(&key)?,
        Service::Hub => hub::connect(&key)?,
    });
    // If two threads created a client at once, the table keeps one of them.
    Ok(table::with(|clients: &mut ServiceClients| {
        Arc::clone(clients.0.entry(key).or_insert(remote))
    }))
}
