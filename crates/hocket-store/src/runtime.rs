//! Running futures on this process's I/O threads, and waiting for them so that Ctrl-C is heard.

use crate::error::{Result, StoreError};
use crate::process;
use std::future::Future;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;
use tokio::task::JoinHandle;

/// How often a wait looks whether it was interrupted.
const POLL: Duration = Duration::from_millis(50);

/// Starts `future` on this process's runtime (threads named `hocket-io`).
///
/// # Panics
/// Never by itself; where the operating system grants no thread, the process is beyond help and aborts.
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    match process::runtime() {
        Ok(runtime) => runtime.spawn(future),
        Err(error) => {
            eprintln!("hocket: {error}");
            std::process::abort()
        }
    }
}

/// Runs `future` on this process's runtime and blocks until it is done. `interrupted` is asked every 50 ms on
/// the calling thread; when it says yes, the future is aborted. Safe from any thread, also in forked children;
/// never to be called from a task of the runtime.
///
/// # Errors
/// [`StoreError::Interrupted`]; [`StoreError::Io`] when the future panicked or no thread could be started.
pub fn wait<T, F>(future: F, interrupted: &dyn Fn() -> bool) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let (sender, receiver) = sync_channel(1);
    let task = process::runtime()?.spawn(async move {
        // In two steps: what the future holds is let go before the caller hears of the end.
        let value = future.await;
        // The receiver is gone only when the wait was interrupted.
        let _ = sender.send(value);
    });
    loop {
        match receiver.recv_timeout(POLL) {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) if interrupted() => {
                task.abort();
                return Err(StoreError::Interrupted);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(StoreError::io(
                    "hocket",
                    "an I/O task ended without an answer; this is a defect of Hocket",
                ));
            }
        }
    }
}
