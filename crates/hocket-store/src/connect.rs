//! The choice of a store's implementation in this process.

use crate::backend::StoreBackend;
use crate::client;
use crate::error::Result;
use crate::local::LocalStore;
use crate::remote::requests::RemoteStore;
use crate::values::handle::StoreHandle;
use crate::values::uri::StoreLocation;

/// Returns the implementation behind `handle`; its client is made at first use.
pub(crate) async fn backend(handle: &StoreHandle) -> Result<Box<dyn StoreBackend>> {
    let client = match handle.location() {
        StoreLocation::Local { .. } => return Ok(Box::new(LocalStore(handle.clone()))),
        StoreLocation::Memory { name, .. } => client::memory(name, handle.options()),
        StoreLocation::Bucket { bucket, .. } => {
            client::open(bucket, handle.options(), handle.env()).await?
        }
    };
    let handle = handle.clone();
    Ok(Box::new(RemoteStore { handle, client }))
}
