//! The process's I/O runtime: runs futures and file operations, and waits for futures interruptibly (Ctrl-C).

use crate::error::{Result, StoreError};
use crate::process::caught::{caught, caught_call};
use crate::process::execution::{Interrupted, TICK, defect, receive};
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

/// The times after which a thread that has not begun to run counts as refused: at first, and at last.
const SOON: Duration = Duration::from_secs(1);
const LATE: Duration = Duration::from_secs(10);

/// Returns the process's runtime, which starts at first use and never stops. It has fewer threads where the
/// system does not grant as many.
pub(crate) fn current() -> Result<&'static Runtime> {
    table::with(|started: &mut ProcessRuntime| {
        if let Some(runtime) = started.0 {
            return Ok(runtime);
        }
        let workers =
            std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 4));
        // One thread is for file operations, and one starts the others.
        let attempt = |wait| {
            let granted = granted_threads(workers + 2)?;
            launch(if granted < workers + 2 { 1 } else { workers }, wait)
        };
        let runtime = attempt(SOON).or_else(|_| {
            // A thread counts for the system until a moment after its end.
            std::thread::sleep(TICK);
            attempt(LATE)
        })?;
        Ok(*started.0.insert(runtime))
    })
}

/// Starts a runtime with this many workers, or with one where the system refuses others meanwhile: another process
/// may take the threads that [`granted_threads`] counted.
///
/// # Errors
/// [`StoreError::Io`], naming the limits, if the system does not grant two threads.
fn launch(workers: usize, wait: Duration) -> Result<&'static Runtime> {
    if workers > 1 {
        // tokio panics where a worker is refused, and waits forever for those that it has: on a thread that can be
        // left behind.
        let (sender, receiver) = sync_channel(1);
        let starts = move || {
            let _ = sender.send(build(workers, SOON));
        };
        let named = std::thread::Builder::new().name("hocket-io".into());
        if named.spawn(starts).is_ok()
            && let Ok(Ok(runtime)) = receiver.recv_timeout(2 * SOON)
        {
            return Ok(runtime);
        }
        tracing::info!("the system does not grant {workers} threads for I/O; one is tried");
    }
    build(1, wait)
}

fn build(workers: usize, wait: Duration) -> Result<&'static Runtime> {
    let (sender, receiver) = sync_channel(1);
    let built = caught_call(|| {
        let runtime = Builder::new_multi_thread()
            .worker_threads(workers)
            .max_blocking_threads(16)
            .thread_keep_alive(KEPT)
            .thread_name("hocket-io")
            .enable_all()
            .build()?;
        runtime.spawn_blocking(move || sender.send(()));
        Ok::<_, std::io::Error>(runtime)
    });
    let runtime = built
        .map_err(|panic| too_few(&panic))?
        .map_err(|error| too_few(&error.to_string()))?;
    // Where the last thread is refused, tokio queues its work for the others, which are workers and never end.
    if receiver.recv_timeout(wait).is_err() {
        runtime.shutdown_background();
        return Err(too_few("a thread was refused"));
    }
    Ok(Box::leak(Box::new(runtime)))
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
            Some(error) => Err(too_few(&format!(
                "the system grants {granted} more ({error})"
            ))),
            None => Ok(granted),
        }
    })
}

/// Returns the error of too few threads, with the limits to raise.
fn too_few(reason: &str) -> StoreError {
    StoreError::io(
        "hocket",
        format!(
            "too few threads: {reason}; expected at least 2 for I/O. Raise the limit of processes: `ulimit -u`, or \
             `pids.max` of the cgroup (`--pids-limit` of a container)"
        ),
    )
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
    use std::process::Command;

    /// The variable with the threads that a process of the test may start, and those that it asks for.
    const THREADS: &str = "HOCKET_TEST_THREADS";

    #[test]
    fn threads_refused_after_they_were_counted_are_an_error_that_names_the_limit() {
        // The superuser has no such limit. Another user has as many processes as it has.
        // SAFETY: the call has no conditions.
        if unsafe { libc::getuid() } != 0 {
            return;
        }
        if let Ok(numbers) = std::env::var(THREADS) {
            let numbers: Vec<usize> = numbers.split(' ').map(|n| n.parse().unwrap()).collect();
            let own = std::fs::read_dir("/proc/self/task").unwrap().count();
            limit_threads((own + numbers[0]) as u64);
            match launch(numbers[1], SOON) {
                Ok(runtime) => assert_eq!(runtime.block_on(blocking(|| Ok(7))).unwrap(), 7),
                Err(error) => assert!(error.to_string().contains("`ulimit -u`"), "{error}"),
            }
            return;
        }
        let name = "process::runtime::tests::threads_refused_after_they_were_counted_are_an_error_that_names_the_limit";
        // The threads that a process may start, and the workers that it tries: 2 are enough for one worker.
        for numbers in [
            "0 1", "1 1", "2 1", "0 3", "1 3", "2 3", "3 3", "4 3", "5 3",
        ] {
            let mut run = Command::new(std::env::current_exe().unwrap());
            run.args(["--exact", name]).env(THREADS, numbers);
            let done = run.output().unwrap();
            let told = String::from_utf8_lossy(&done.stdout);
            let is_ended = done.status.success() && told.contains("1 passed");
            assert!(is_ended, "{numbers}: {told}");
        }
    }

    /// Makes this process one of a user with no other, who may have `most` threads.
    fn limit_threads(most: u64) {
        let limit = libc::rlimit {
            rlim_cur: most,
            rlim_max: most,
        };
        // SAFETY: neither call uses memory of this process but `limit`.
        unsafe {
            assert_eq!(libc::setresuid(54323, 54323, 54323), 0);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit), 0);
        }
    }

    #[test]
    fn a_panic_in_a_task_is_an_error_with_its_text() {
        let task = async { panic!("header {} is wrong", 7) };
        let error = wait::<(), _>(task, &|| false).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("header 7 is wrong (runtime.rs:"), "{text}");
        assert_eq!(wait(async { 7 }, &|| false).unwrap(), 7);
    }
}
