//! The process's I/O runtime: runs futures and file operations, and waits for futures interruptibly (Ctrl-C).

use crate::error::{Result, StoreError};
use crate::process::execution::{Interrupted, defect, receive};
use crate::process::table;
use std::future::Future;
use std::sync::mpsc::sync_channel;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

/// The runtime in the process table.
#[derive(Default)]
struct ProcessRuntime(Option<&'static Runtime>);

/// Returns the process's runtime, which starts at first use and never stops.
pub(crate) fn current() -> Result<&'static Runtime> {
    table::with(|started: &mut ProcessRuntime| {
        if let Some(runtime) = started.0 {
            return Ok(runtime);
        }
        let workers =
            std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 4));
        let runtime = Builder::new_multi_thread()
            .worker_threads(workers)
            .max_blocking_threads(16)
            .thread_name("hocket-io")
            .enable_all()
            .build()
            .map_err(|error| {
                StoreError::io("hocket", format!("cannot start the I/O threads: {error}"))
            })?;
        Ok(*started.0.insert(Box::leak(Box::new(runtime))))
    })
}

/// Spawns `future` on this process's runtime (threads named `hocket-io`).
///
/// # Panics
/// Does not panic. If the operating system grants no thread, the process aborts.
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    match current() {
        Ok(runtime) => runtime.spawn(future),
        Err(error) => {
            eprintln!("hocket: {error}");
            std::process::abort()
        }
    }
}

/// Runs `future` on this process's runtime and blocks until it is done. Calls `interrupted` every 50 ms on the
/// calling thread, and aborts the future if it returns true. Safe from any thread, also in forked children;
/// must not be called from a task of the runtime.
///
/// # Errors
/// [`StoreError::Interrupted`]; [`StoreError::Io`] if the future panicked or no thread could be started.
pub fn wait<T, F>(future: F, interrupted: Interrupted<'_>) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let (sender, receiver) = sync_channel(1);
    let task = current()?.spawn(async move {
        // Two statements, so that the future's resources are released before the caller is notified.
        let value = future.await;
        // The receiver is gone only if the wait was interrupted.
        let _ = sender.send(value);
    });
    let received = receive(&receiver, interrupted).inspect_err(|_| task.abort())?;
    received.ok_or_else(|| defect("an I/O task"))
}

/// Runs file operations on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => Err(StoreError::io(
            "hocket",
            format!("a file operation ended without a result: {error}"),
        )),
    }
}
