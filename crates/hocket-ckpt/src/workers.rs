//! Worker threads that share a list of jobs while the calling thread checks for interrupts.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::error::{CkptError, Result};

/// A callback, called on the calling thread at least every 50 ms, that returns whether to stop.
pub type Interrupted<'a> = &'a dyn Fn() -> bool;

/// Interval between calls of `Interrupted`.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// Runs `job(state, index)` for every index below `count` on up to `workers` threads.
///
/// Each thread has its own state, created by `start` (a buffer, for example). After the first error or an
/// interrupt, the workers finish their current job and take no more. The memory that jobs point to can be freed
/// when this returns.
pub(crate) fn run<S>(
    workers: usize,
    count: usize,
    interrupted: Interrupted<'_>,
    start: impl Fn() -> Result<S> + Sync,
    job: impl Fn(&mut S, usize) -> Result<()> + Sync,
) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let (sender, receiver) = mpsc::channel::<Result<()>>();
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
            let name = format!("hocket-ckpt-{number}");
            if let Err(error) = std::thread::Builder::new()
                .name(name)
                .spawn_scoped(scope, body)
            {
                stop.store(true, Ordering::Relaxed);
                return Err(CkptError::process(format!(
                    "cannot start a worker: {error}"
                )));
            }
        }
        drop(sender);
        gather(&receiver, &stop, interrupted)
    })
}

/// Lowers the priority of the calling worker thread, so that a save beside a training job mostly uses idle
/// CPU time.
///
/// Not to the lowest priority: when all cores are busy, the thread still gets a tenth of one.
pub(crate) fn give_way() {
    const STEPS: i32 = 10;
    const LEAST: i32 = 19;
    // On other systems the priority applies to the whole process. If the call fails, the priority stays
    // unchanged.
    #[cfg(target_os = "linux")]
    if let Ok(priority) = rustix::process::getpriority_process(None) {
        let _ = rustix::process::setpriority_process(None, (priority + STEPS).min(LEAST));
    }
}

fn work<S>(
    next: &AtomicUsize,
    stop: &AtomicBool,
    count: usize,
    start: &(impl Fn() -> Result<S> + Sync),
    job: &(impl Fn(&mut S, usize) -> Result<()> + Sync),
) -> Result<()> {
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

fn gather(
    receiver: &mpsc::Receiver<Result<()>>,
    stop: &AtomicBool,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let mut outcome = Ok(());
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(result) => outcome = outcome.and(result),
            Err(RecvTimeoutError::Disconnected) => return outcome,
            Err(RecvTimeoutError::Timeout) => {
                if outcome.is_ok() && interrupted() {
                    stop.store(true, Ordering::Relaxed);
                    outcome = Err(CkptError::Interrupted);
                }
            }
        }
    }
}

/// Runs `job` on its own thread and waits for it; after an interrupt it finishes in the background.
///
/// For system calls that cannot be cancelled, such as a flush; the job owns everything that it uses.
pub(crate) fn detached<T: Send + 'static>(
    interrupted: Interrupted<'_>,
    job: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    let body = move || {
        // After an interrupt there is no receiver.
        let _ = sender.send(job());
    };
    let named = std::thread::Builder::new().name("hocket-ckpt-sync".to_owned());
    if let Err(error) = named.spawn(body) {
        return Err(CkptError::process(format!(
            "cannot start a worker: {error}"
        )));
    }
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) if interrupted() => return Err(CkptError::Interrupted),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(CkptError::process(
                    "a worker ended without an answer; this is a defect of Hocket",
                ));
            }
        }
    }
}
