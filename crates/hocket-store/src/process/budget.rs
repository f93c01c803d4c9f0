//! The process-wide budget of bytes in flight.

use crate::process::table;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{Mutex, Notify};

/// A counter of bytes in flight. Waiters are served first come, first served, so that small transfers do not
/// starve a large one.
#[derive(Debug, Default)]
pub(crate) struct TransferBudget {
    turn: Mutex<()>,
    in_flight: AtomicU64,
    most: AtomicU64,
    freed: Notify,
}

impl TransferBudget {
    /// Waits until `bytes` more keep the process within `limit`. A transfer larger than the limit runs alone.
    pub(crate) async fn take(self: &Arc<Self>, bytes: u64, limit: u64) -> BudgetShare {
        let bytes = bytes.min(limit);
        let _turn = self.turn.lock().await;
        // Only the holder of the queue lock adds, so bytes that fit at the check still fit at the addition.
        while self.in_flight.load(Ordering::Acquire).saturating_add(bytes) > limit {
            self.freed.notified().await;
        }
        let now = self.in_flight.fetch_add(bytes, Ordering::AcqRel) + bytes;
        self.most.fetch_max(now, Ordering::AcqRel);
        BudgetShare {
            budget: Arc::clone(self),
            bytes,
        }
    }

    /// Returns the bytes in flight now and their highest value so far.
    pub(crate) fn now(&self) -> (u64, u64) {
        let now = self.in_flight.load(Ordering::Acquire);
        (now, self.most.load(Ordering::Acquire))
    }
}

/// A share of the budget, returned when dropped.
#[derive(Debug)]
pub(crate) struct BudgetShare {
    budget: Arc<TransferBudget>,
    bytes: u64,
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.budget
            .in_flight
            .fetch_sub(self.bytes, Ordering::AcqRel);
        // Without a waiter, `Notify` keeps this as a permit; the next waiter then does one check too many.
        self.budget.freed.notify_one();
    }
}

/// Returns the process's budget.
pub(crate) fn of_process() -> Arc<TransferBudget> {
    table::with(|budget: &mut Arc<TransferBudget>| Arc::clone(budget))
}

/// Returns the bytes in flight in this process now and their highest value so far.
pub fn bytes_in_flight() -> (u64, u64) {
    of_process().now()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn the_budget_is_never_exceeded_and_every_waiter_is_served() {
        let budget = Arc::new(TransferBudget::default());
        let mut tasks = tokio::task::JoinSet::new();
        for index in 0..60u64 {
            let budget = Arc::clone(&budget);
            tasks.spawn(async move {
                // 150 exceeds the whole limit, so that transfer runs alone.
                let hold = budget.take([10, 40, 150][index as usize % 3], 100).await;
                tokio::time::sleep(Duration::from_micros(200)).await;
                drop(hold);
            });
        }
        tokio::time::timeout(Duration::from_secs(10), tasks.join_all())
            .await
            .unwrap();
        let (now, most) = budget.now();
        assert_eq!(now, 0);
        assert!((50..=100).contains(&most), "{most}");
    }

    #[tokio::test]
    async fn a_cancelled_waiter_holds_no_budget() {
        let budget = Arc::new(TransferBudget::default());
        let all = budget.take(100, 100).await;
        let waiting = tokio::time::timeout(Duration::from_millis(10), budget.take(1, 100)).await;
        assert!(waiting.is_err());
        drop(all);
        let _again = tokio::time::timeout(Duration::from_secs(1), budget.take(100, 100))
            .await
            .unwrap();
    }
}
