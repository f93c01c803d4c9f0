//! The extension module `hocket.native._native`: it parses arguments, releases the interpreter
//! lock, calls the pure crates, wraps what they return.

use pyo3::prelude::*;

mod ckpt;
mod errors;
mod foreign;
mod store;
mod stream;
mod wait;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    store::register(module)?;
    stream::register(module)?;
    ckpt::register(module)?;
    foreign::register(module)?;
    // `hocket.native` says what is public; a second list here would only have to agree with it.
    module.dict().del_item("__all__")
}
