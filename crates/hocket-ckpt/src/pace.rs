//! Workers that share a list of jobs while the calling thread watches for interrupts.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::error::{CkptError, Result};

/// Asked on the calling thread, at least every 50 ms, whether to give up.
pub type Interrupted<'a> = &'a dyn Fn() -> bool;

/// How often `Interrupted` is asked.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// Runs `job(state, index)` for every index below `count` on up to `workers` threads.
///
/// Each thread has a state of its own, made by `start` (a buffer, say). The first error, or an
/// interrupt, lets the others finish the job in hand and take no more: memory that jobs point to
/// is safe to free when this returns.
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

/// Has the calling thread, a worker, give way to all that does not: a write beside a training job takes what that
/// leaves.
///
/// Not to the utmost: where every core is busy it still gets a tenth of one.
pub(crate) fn give_way() {
    const STEPS: i32 = 10;
    const LEAST: i32 = 19;
    // Elsewhere a priority is the process's, not the thread's. Refused, it is forgone.
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

/// Runs `job` on a thread of its own and waits for it; an interrupt leaves it to finish alone.
///
/// For system calls that cannot be cut short, such as a flush: the job owns all that it touches.
pub(crate) fn detached<T: Send + 'static>(
    interrupted: Interrupted<'_>,
    job: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    let body = move || {
        // Nobody listens after an interrupt.
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
