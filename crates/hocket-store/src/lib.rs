//! Object stores for Hocket: parallel ranged reads, multipart and conditional writes, retries, byte budgets.
//!
//! A [`Store`] is a URI with options: `s3://bucket/prefix` (`gs://`, `az://`, `oci://`, and `https://` for
//! reading), a local directory, or `memory://name`. It owns no client, thread or socket, so it can be cloned,
//! sent between threads and kept across a `fork`. The resources for I/O live in one table per process
//! (`process`).
//!
//! ```
//! use hocket_store::{PutMode, Store, StoreOptions, runtime};
//!
//! # fn main() -> hocket_store::Result<()> {
//! let store = Store::open("memory://docs/run-1", StoreOptions::default())?;
//! let never = || false;
//! let handle = store.clone();
//! runtime::wait(async move { handle.put("a/b", "hello".into(), PutMode::Create).await }, &never)??;
//! let data = runtime::wait(async move { store.get_range("a/b", 1..4).await }, &never)??;
//! assert_eq!(&data[..], b"ell");
//! # Ok(())
//! # }
//! ```

mod backend;
mod budget;
mod client;
mod connect;
mod counters;
pub mod credentials;
pub mod durable;
mod env;
mod error;
pub mod execution;
mod handle;
mod http;
mod list;
mod local;
mod local_meta;
pub mod memory;
mod meta;
mod object;
mod options;
mod parts;
mod pin;
mod process;
mod ranges;
mod read;
mod remote;
mod requests;
mod retry;
pub mod runtime;
mod service;
mod staged;
mod store;
mod upload;
mod uploads;
mod uri;

pub use budget::bytes_in_flight;
pub use counters::{Counts, counts};
pub use error::{Result, StoreError, io_reason};
pub use execution::Interrupted;
pub use meta::{Listing, ObjectMeta, PutMode, Unfinished};
pub use object::Object;
pub use options::StoreOptions;
pub use store::Store;
pub use upload::Upload;
