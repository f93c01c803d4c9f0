//! The choice of a store's implementation in this process.

use crate::backend::Backend;
use crate::client;
use crate::error::Result;
use crate::local::LocalStore;
use crate::remote::requests::Requests;
use crate::values::handle::Handle;
use crate::values::uri::Location;

/// Returns the implementation behind `handle`; its client is made at first use.
pub(crate) async fn backend(handle: &Handle) -> Result<Box<dyn Backend>> {
    let client = match handle.location() {
        Location::Local { .. } => return Ok(Box::new(LocalStore(handle.clone()))),
        Location::Memory { name, .. } => client::memory(name, handle.options()),
        Location::Bucket { bucket, .. } => {
            client::open(bucket, handle.options(), handle.env()).await?
        }
    };
    let handle = handle.clone();
    Ok(Box::new(Requests { handle, client }))
}
