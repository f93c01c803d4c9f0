//! The extension module `hocket.native._native`. It parses arguments, releases the interpreter lock, calls the
//! pure Rust crates, and wraps their results.

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
    foreign::register(module)?;
    // `hocket.native` defines what is public; a second list here would have to be kept equal.
    module.dict().del_item("__all__")
}
