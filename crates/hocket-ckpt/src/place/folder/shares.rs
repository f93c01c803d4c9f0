//! The division of a read among its workers.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The numbers below a count, divided among workers. Each worker takes the numbers of its own contiguous share
/// in order, so that it reads a file sequentially, and numbers of other shares when its own share is used up.
pub(super) struct WorkRanges {
    shares: Vec<WorkRange>,
    num_joined: AtomicUsize,
}

struct WorkRange {
    next: AtomicUsize,
    end: usize,
}

impl WorkRanges {
    /// Divides `count` numbers among at most `workers` workers.
    pub(super) fn new(count: usize, workers: usize) -> Self {
        let workers = workers.clamp(1, count.max(1));
        let share = |number: usize| WorkRange {
            next: AtomicUsize::new(count * number / workers),
            end: count * (number + 1) / workers,
        };
        Self {
            shares: (0..workers).map(share).collect(),
            num_joined: AtomicUsize::new(0),
        }
    }

    /// Returns the number of shares, one for each worker.
    pub(super) fn len(&self) -> usize {
        self.shares.len()
    }

    /// Returns the share of the calling worker.
    pub(super) fn join(&self) -> usize {
        self.num_joined.fetch_add(1, Ordering::Relaxed) % self.shares.len()
    }

    /// Returns the next number for the worker of `share`; none if all were taken.
    pub(super) fn take(&self, share: usize) -> Option<usize> {
        let (before, from) = self.shares.split_at(share);
        from.iter().chain(before).find_map(|share| {
            let number = share.next.fetch_add(1, Ordering::Relaxed);
            (number < share.end).then_some(number)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_taken_once_and_first_by_its_own_share() {
        for (count, workers) in [(0, 4), (1, 4), (7, 3), (100, 8)] {
            let shares = WorkRanges::new(count, workers);
            assert_eq!(shares.len(), workers.min(count.max(1)));
            let last = (0..shares.len())
                .map(|_| shares.join())
                .next_back()
                .unwrap_or(0);
            let taken: Vec<usize> = std::iter::from_fn(|| shares.take(last)).collect();
            let own = count * last / shares.len();
            let expected: Vec<usize> = (own..count).chain(0..own).collect();
            assert_eq!(taken, expected, "{count} numbers, {workers} workers");
            assert_eq!(shares.take(0), None);
        }
    }
}
