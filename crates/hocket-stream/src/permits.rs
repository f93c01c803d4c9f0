//! Of many threads, so many at a time.

use crossbeam_channel::{Receiver, Sender, bounded};

/// So many permits, which threads wait for and give back.
pub(crate) struct Permits {
    give: Sender<()>,
    take: Receiver<()>,
}

/// The right to go on, until it is dropped.
pub(crate) struct Permit<'a>(&'a Permits);

impl Permits {
    pub(crate) fn new(count: usize) -> Self {
        let (give, take) = bounded(count);
        for _ in 0..count {
            let _ = give.try_send(());
        }
        Self { give, take }
    }

    /// Waits for one.
    pub(crate) fn take(&self) -> Permit<'_> {
        // Never disconnected: both ends are here.
        let _ = self.take.recv();
        Permit(self)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let _ = self.0.give.try_send(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn no_more_than_so_many_go_on() {
        let permits = Permits::new(3);
        let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _permit = permits.take();
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
