//! The process's I/O runtime: runs futures and waits for them interruptibly (Ctrl-C).

use crate::error::{Result, StoreError};
use crate::process;
use std::future::Future;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;
use tokio::task::JoinHandle;

/// Interval at which a wait checks for an interrupt.
const POLL: Duration = Duration::from_millis(50);

/// Spawns `future` on this process's runtime (threads named `hocket-io`).
///
/// # Panics
/// Does not panic. If the operating system grants no thread, the process aborts.
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

/// Runs `future` on this process's runtime and blocks until it is done. Calls `interrupted` every 50 ms on the
/// calling thread, and aborts the future if it returns true. Safe from any thread, also in forked children;
/// must not be called from a task of the runtime.
///
/// # Errors
/// [`StoreError::Interrupted`]; [`StoreError::Io`] if the future panicked or no thread could be started.
pub fn wait<T, F>(future: F, interrupted: &dyn Fn() -> bool) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let (sender, receiver) = sync_channel(1);
    let task = process::runtime()?.spawn(async move {
        // Two statements, so that the future's resources are released before the caller is notified.
        let value = future.await;
        // The receiver is gone only if the wait was interrupted.
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
