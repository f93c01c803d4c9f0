//! The process's I/O runtime: runs futures and file operations, and waits for futures interruptibly (Ctrl-C).

use crate::error::{Result, StoreError};
use crate::process::caught::caught;
use crate::process::execution::{Interrupted, defect, receive};
use crate::process::table;
use std::future::Future;
use std::sync::Mutex;
use std::sync::mpsc::sync_channel;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

/// The runtime in the process table.
#[derive(Default)]
struct ProcessRuntime(Option<&'static Runtime>);

/// The time that an idle thread for file operations is kept: practically forever. Where the limit of threads is
/// reached, tokio queues an operation for the threads that exist, and there must be one.
const KEPT: Duration = Duration::from_secs(1 << 30);

/// Returns the process's runtime, which starts at first use and never stops. It has fewer threads where the
/// system does not grant as many.
pub(crate) fn current() -> Result<&'static Runtime> {
    table::with(|started: &mut ProcessRuntime| {
        if let Some(runtime) = started.0 {
            return Ok(runtime);
        }
        let workers =
            std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 4));
        let failed =
            |error| StoreError::io("hocket", format!("cannot start the I/O threads: {error}"));
        // One thread is for file operations.
        let granted = granted_threads(workers + 1)?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(granted - 1)
            .max_blocking_threads(16)
            .thread_keep_alive(KEPT)
            .thread_name("hocket-io")
            .enable_all()
            .build()
            .map_err(failed)?;
        runtime.spawn_blocking(|| ());
        Ok(*started.0.insert(Box::leak(Box::new(runtime))))
    })
}

/// Starts the runtime, for code that is about to take threads of its own: where few are left, it needs its share.
///
/// # Errors
/// [`StoreError::Io`], naming the limits, if the system grants fewer than two threads.
pub fn start() -> Result<()> {
    current().map(|_| ())
}

/// Returns how many of the `wanted` threads the system grants at a time. tokio panics where it gets none.
///
/// # Errors
/// [`StoreError::Io`], naming the limits, for fewer than two.
fn granted_threads(wanted: usize) -> Result<usize> {
    let gate = Mutex::new(());
    std::thread::scope(|scope| {
        let closed = gate.lock();
        let mut granted = 0;
        let mut refused = None;
        while granted < wanted && refused.is_none() {
            let waits = std::thread::Builder::new().name("hocket-io".into());
            match waits.spawn_scoped(scope, || drop(gate.lock())) {
                Ok(_) => granted += 1,
                Err(error) => refused = Some(error),
            }
        }
        drop(closed);
        match refused {
            Some(error) if granted >= 2 => {
                tracing::info!(
                    "the system grants {granted} threads for I/O in place of {wanted}: {error}"
                );
                Ok(granted)
            }
            Some(error) => Err(StoreError::io(
                "hocket",
                format!(
                    "the system grants {granted} more threads ({error}); expected at least 2 for I/O. Raise the limit of \
                     processes: `ulimit -u`, or `pids.max` of the cgroup (`--pids-limit` of a container)"
                ),
            )),
            None => Ok(granted),
        }
    })
}

/// Spawns `future` on this process's runtime (threads named `hocket-io`).
///
/// # Errors
/// [`StoreError::Io`] if the operating system grants no threads.
pub fn spawn<F>(future: F) -> Result<JoinHandle<F::Output>>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    Ok(current()?.spawn(future))
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
        let value = caught(future).await;
        // The receiver is gone only if the wait was interrupted.
        let _ = sender.send(value);
    });
    let received = receive(&receiver, interrupted).inspect_err(|_| task.abort())?;
    match received {
        Some(value) => value.map_err(|panic| {
            let reason = format!("an I/O task failed: {panic}; this is a defect of Hocket");
            StoreError::io("hocket", reason)
        }),
        None => Err(defect("an I/O task")),
    }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn a_panic_in_a_task_is_an_error_with_its_text() {
        let task = async { panic!("header {} is wrong", 7) };
        let error = wait::<(), _>(task, &|| false).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("header 7 is wrong (runtime.rs:"), "{text}");
        assert_eq!(wait(async { 7 }, &|| false).unwrap(), 7);
    }
}
