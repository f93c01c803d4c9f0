//! A counting semaphore that limits concurrent threads.

use crossbeam_channel::{Receiver, Sender, bounded};

/// A fixed number of permits, each held by one thread at a time.
pub(crate) struct Semaphore {
    give: Sender<()>,
    take: Receiver<()>,
}

/// A permit of a [`Semaphore`], given back when it is dropped.
pub(crate) struct ThreadPermit<'a>(&'a Semaphore);

impl Semaphore {
    /// Makes a semaphore with `count` permits.
    pub(crate) fn new(count: usize) -> Self {
        let (give, take) = bounded(count);
        for _ in 0..count {
            let _ = give.try_send(());
        }
        Self { give, take }
    }

    /// Waits for a free permit and takes it.
    pub(crate) fn acquire(&self) -> ThreadPermit<'_> {
        // Never disconnected: this struct owns both ends.
        let _ = self.take.recv();
        ThreadPermit(self)
    }
}

impl Drop for ThreadPermit<'_> {
    fn drop(&mut self) {
        let _ = self.0.give.try_send(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn concurrency_stays_within_the_number_of_permits() {
        let semaphore = Semaphore::new(3);
        let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _permit = semaphore.acquire();
                        let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(now, Ordering::SeqCst);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!((1..=3).contains(&most.into_inner()));
    }
}
