//! Object stores for Hocket: parallel ranged reads, multipart and conditional writes, retries, byte budgets.
//!
//! A [`Store`] is a URI with options: `s3://bucket/prefix` (`gs://`, `az://`, `oci://`, and `https://` and `hf://` for
//! reading), a local directory, or `memory://name`. It owns no client, thread or socket, so it can be cloned,
//! sent between threads and kept across a `fork`. The resources for I/O live in one table per process
//! (`process`).
//!
//! | module | contents |
//! |---|---|
//! | `store`, `object`, `upload` | the handles that callers use, and their verbs |
//! | `connect` | the choice between local files and a service, at the first use of a handle |
//! | `local` | stores of local files |
//! | `remote` | stores behind a service: ranged reads, multipart uploads, listings, and the retry policy |
//! | `backend` | the interface of `local` and `remote` |
//! | `client` | one client per service and credentials: S3, Google, Azure, HTTP; keys from boto3 |
//! | `values` | plain values: URI, options, environment variables, versions, byte ranges |
//! | `process` | the resources of this process: runtime, workers, byte budget, counters, log, the table that a fork resets |
//! | [`durable`] | durable local files: folders, locks, hidden files, direct I/O |
//! | `service` | the services that a URI can name |
//! | `error` | the errors, by what the caller can do about them |
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
mod client;
mod connect;
pub mod durable;
mod error;
mod local;
mod object;
mod process;
mod remote;
mod service;
mod store;
mod upload;
mod values;

pub use client::credentials;
pub use error::{Result, StoreError, io_reason, thread_refused};
pub use object::Object;
pub use process::budget::bytes_in_flight;
pub use process::counters::{CounterSnapshot, counts};
pub use process::execution::Interrupted;
pub use process::{execution, log, memory, runtime};
pub use store::Store;
pub use upload::Upload;
pub use values::meta::{LevelListing, ObjectMeta, OpenUpload, PutMode};
pub use values::options::StoreOptions;
