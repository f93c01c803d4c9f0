//! The extension module `hocket.native._native`. It parses arguments, releases the interpreter lock, calls the
//! pure Rust crates, and wraps their results.
//!
//! | module | content |
//! |---|---|
//! | `checkpoint`, `ckpt`, `ckpt_removing`, `foreign` | hocket-ckpt: open checkpoints, saves, removal, other formats |
//! | `stream`, `order`, `shard_index`, `samples`, `stream_writer` | hocket-stream: reading, the order, indexes, writing |
//! | `store`, `credentials` | hocket-store: object stores, and their keys, which a Python thread looks up |
//! | `errors`, `log` | errors as Python's exceptions, and the log in Python's `logging` |
//! | `wait` | waits without the interpreter lock, which Ctrl-C ends |

use pyo3::prelude::*;

mod checkpoint;
mod ckpt;
mod ckpt_removing;
mod credentials;
mod errors;
mod foreign;
mod log;
mod order;
mod samples;
mod shard_index;
mod store;
mod stream;
mod stream_writer;
mod wait;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    log::register(module)?;
    store::register(module)?;
    credentials::register(module)?;
    stream::register(module)?;
    order::register(module)?;
    stream_writer::register(module)?;
    checkpoint::register(module)?;
    ckpt::register(module)?;
    ckpt::reports::register(module)?;
    ckpt_removing::register(module)?;
    ckpt::memory_file::register(module)?;
    foreign::register(module)?;
    // `hocket.native` defines what is public; a second list here would have to be kept equal.
    module.dict().del_item("__all__")
}
