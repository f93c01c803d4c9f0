//! Cancellation and worker threads: the calling thread checks for interrupts while the workers run.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::Builder;
use std::time::Duration;

use crate::error::{StoreError, thread_refused};

/// A callback, called on the calling thread at least every [`TICK`], that returns whether to stop.
pub type Interrupted<'a> = &'a dyn Fn() -> bool;

/// Interval between calls of [`Interrupted`].
pub const TICK: Duration = Duration::from_millis(50);

/// Waits for the next value, and checks for an interrupt every [`TICK`]; returns none if all senders are gone.
///
/// # Errors
/// [`StoreError::Interrupted`].
pub fn receive<T>(
    receiver: &mpsc::Receiver<T>,
    interrupted: Interrupted<'_>,
) -> Result<Option<T>, StoreError> {
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(value) => return Ok(Some(value)),
            Err(RecvTimeoutError::Timeout) if interrupted() => return Err(StoreError::Interrupted),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

/// Returns the error of a thread or a task that panicked.
#[must_use]
pub fn defect(what: &str) -> StoreError {
    StoreError::io(
        "hocket",
        format!("{what} ended without a result; this is a defect of Hocket"),
    )
}

/// Runs `job(state, index)` for every index below `count` on up to `workers` threads, named after `name`.
///
/// Each thread has its own state, created by `start` (a buffer, for example). After the first error or an
/// interrupt, the workers finish their current job and take no more. The memory that jobs point to can be freed
/// when this returns.
///
/// # Errors
/// The first error of `start` or of a job; [`StoreError::Interrupted`]; [`StoreError::Io`] if the system grants
/// no thread at all.
pub fn run<S, E: From<StoreError> + Send>(
    name: &str,
    workers: usize,
    count: usize,
    interrupted: Interrupted<'_>,
    start: impl Fn() -> Result<S, E> + Sync,
    job: impl Fn(&mut S, usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    if count == 0 {
        return Ok(());
    }
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let (sender, receiver) = mpsc::channel::<Result<(), E>>();
    std::thread::scope(|scope| {
        for number in 0..workers.clamp(1, count) {
            let sender = sender.clone();
            let (next, stop, start, job) = (&next, &stop, &start, &job);
            let body = move || {
                let outcome = work(next, stop, count, start, job);
                if outcome.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                // The receiver outlives every worker.
                let _ = sender.send(outcome);
            };
            let named = Builder::new().name(format!("{name}-{number}"));
            match named.spawn_scoped(scope, body) {
                Ok(_) => {}
                Err(error) if number == 0 => return Err(E::from(no_thread(&error))),
                Err(error) => {
                    let wanted = workers.clamp(1, count);
                    tracing::info!(
                        "`{name}` works with {number} threads in place of {wanted}: {error}"
                    );
                    break;
                }
            }
        }
        drop(sender);
        gather(&receiver, &stop, interrupted)
    })
}

fn work<S, E>(
    next: &AtomicUsize,
    stop: &AtomicBool,
    count: usize,
    start: &(impl Fn() -> Result<S, E> + Sync),
    job: &(impl Fn(&mut S, usize) -> Result<(), E> + Sync),
) -> Result<(), E> {
    let mut state = start()?;
    while !stop.load(Ordering::Relaxed) {
        let index = next.fetch_add(1, Ordering::Relaxed);
        if index >= count {
            break;
        }
        job(&mut state, index)?;
    }
    Ok(())
}

/// Waits until all workers have ended, also after an error or an interrupt.
fn gather<E: From<StoreError>>(
    receiver: &mpsc::Receiver<Result<(), E>>,
    stop: &AtomicBool,
    interrupted: Interrupted<'_>,
) -> Result<(), E> {
    let mut outcome = Ok(());
    loop {
        let is_ok = outcome.is_ok();
        match receive(receiver, &|| is_ok && interrupted()) {
            Ok(Some(result)) => outcome = outcome.and(result),
            Ok(None) => return outcome,
            Err(error) => {
                stop.store(true, Ordering::Relaxed);
                outcome = Err(E::from(error));
            }
        }
    }
}

/// Runs `job` on its own thread and waits for it; after an interrupt the job finishes in the background.
///
/// Intended for system calls that cannot be cancelled, such as a flush. The job owns everything that it uses.
///
/// # Errors
/// The error of the job; [`StoreError::Interrupted`]; [`StoreError::Io`] if the system grants no thread, or the
/// job panicked.
pub fn detached<T: Send + 'static, E: From<StoreError> + Send + 'static>(
    name: &str,
    interrupted: Interrupted<'_>,
    job: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    let (sender, receiver) = mpsc::channel();
    let body = move || {
        // After an interrupt there is no receiver.
        let _ = sender.send(job());
    };
    let started = Builder::new().name(name.to_owned()).spawn(body);
    started.map_err(|error| no_thread(&error))?;
    receive(&receiver, interrupted)?.ok_or_else(|| defect("a worker"))?
}

fn no_thread(error: &std::io::Error) -> StoreError {
    StoreError::io("hocket", thread_refused(error))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use std::cell::Cell;

    const NEVER: Interrupted<'static> = &|| false;

    #[test]
    fn each_index_runs_once_with_one_state_per_worker() {
        let done: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        let states = AtomicUsize::new(0);
        let start = || Ok(states.fetch_add(1, Ordering::Relaxed));
        let job = |_: &mut usize, index: usize| {
            done[index].fetch_add(1, Ordering::Relaxed);
            Ok::<(), StoreError>(())
        };
        run("test", 4, done.len(), NEVER, start, job).unwrap();
        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        assert!(states.into_inner() <= 4);
        run("test", 4, 0, NEVER, || panic!("no worker is needed"), job).unwrap();
    }

    #[test]
    fn an_error_or_an_interrupt_ends_the_work() {
        let done = AtomicUsize::new(0);
        let job = |(): &mut (), index: usize| {
            done.fetch_add(1, Ordering::Relaxed);
            if index == 3 {
                return Err(StoreError::config("index 3"));
            }
            Ok(())
        };
        let failed = run("test", 1, 1000, NEVER, || Ok(()), job).unwrap_err();
        assert_eq!(failed.to_string(), "index 3");
        assert_eq!(done.load(Ordering::Relaxed), 4);

        let was_called = Cell::new(false);
        let interrupted = || was_called.replace(true);
        let (sender, receiver) = mpsc::channel::<()>();
        let receiver = std::sync::Mutex::new(receiver);
        let job = |(): &mut (), _| {
            // Returns when the sender is dropped.
            let _ = receiver.lock().unwrap().recv_timeout(4 * TICK);
            Ok::<(), StoreError>(())
        };
        let stopped = run("test", 2, usize::MAX, &interrupted, || Ok(()), job).unwrap_err();
        assert!(matches!(stopped, StoreError::Interrupted));
        drop(sender);
    }

    #[test]
    fn a_detached_job_is_abandoned_after_an_interrupt_and_reported_after_a_panic() {
        let result: Result<u32, StoreError> = detached("test", NEVER, || Ok(7));
        assert_eq!(result.unwrap(), 7);
        let (sender, receiver) = mpsc::channel::<()>();
        let waits = move || {
            let _ = receiver.recv();
            Ok::<(), StoreError>(())
        };
        let left = detached("test", &|| true, waits).unwrap_err();
        assert!(matches!(left, StoreError::Interrupted));
        drop(sender);
        let panics = || -> Result<(), StoreError> { std::panic::resume_unwind(Box::new(())) };
        let failed = detached("test", NEVER, panics).unwrap_err();
        assert!(failed.to_string().contains("defect"), "{failed}");
    }
}
