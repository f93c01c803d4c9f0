//! Worker threads of a save, a read or a check, and their priority.

use hocket_store::execution;

use crate::error::Result;

pub use hocket_store::Interrupted;

/// Runs [`execution::run`] on threads of this crate.
pub(crate) fn run<S>(
    workers: usize,
    count: usize,
    interrupted: Interrupted<'_>,
    start: impl Fn() -> Result<S> + Sync,
    job: impl Fn(&mut S, usize) -> Result<()> + Sync,
) -> Result<()> {
    execution::run("hocket-ckpt", workers, count, interrupted, start, job)
}

/// Runs [`execution::detached`] on a thread of this crate.
pub(crate) fn detached<T: Send + 'static>(
    interrupted: Interrupted<'_>,
    job: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    execution::detached("hocket-ckpt-sync", interrupted, job)
}

/// Lowers the priority of the calling worker thread, so that a save beside a training job mostly uses idle
/// CPU time.
///
/// Not to the lowest priority: when all cores are busy, the thread still gets a tenth of one.
pub(crate) fn give_way() {
    // On other systems the priority applies to the whole process. If the call fails, the priority stays
    // unchanged.
    #[cfg(target_os = "linux")]
    {
        const STEPS: i32 = 10;
        const LEAST: i32 = 19;
        if let Ok(priority) = rustix::process::getpriority_process(None) {
            let _ = rustix::process::setpriority_process(None, (priority + STEPS).min(LEAST));
        }
    }
}
