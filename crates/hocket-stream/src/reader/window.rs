//! The window of shards that are open or being fetched, shared by the threads of one reader.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::Sender;

use crate::error::{Result, StreamError};
use crate::shard::Shard;

/// Interval at which every wait checks its condition, so that a missed notification cannot block it.
const WAKE: Duration = Duration::from_millis(50);

/// Limit of open shards. They are memory-mapped files, so the limit protects address space and kernel tables,
/// not memory.
const MAX_OPEN: usize = 1024;

/// Limit of open shards under a cache limit, where each takes one or two file descriptors: this many for later
/// batches, and as many for the batch being assembled.
const MAX_HELD: usize = 96;

enum ShardSlot {
    Coming,
    Open {
        shard: Arc<Shard>,
        used: u64,
    },
    /// Reported to the first batch that needs the shard, not to earlier batches.
    Failed(Option<StreamError>),
}

#[derive(Default)]
struct WindowState {
    slots: HashMap<u32, ShardSlot>,
    /// Bytes of each shard requested before its first use; under a limit, before its last use.
    ahead: HashMap<u32, u64>,
    ahead_bytes: u64,
    /// Under a limit: the last batch known to need a shard.
    needed: HashMap<u32, u64>,
    /// The number, in this reader's sequence, of the batch being assembled.
    cursor: u64,
    /// The queue of requests to the fetchers. It is dropped at the end, which wakes them at once.
    wanted: Option<Sender<u32>>,
}

impl WindowState {
    /// Requests a shard if it is neither open nor being fetched; returns whether it was requested.
    fn ask(&mut self, number: u32) -> bool {
        if self.slots.contains_key(&number) {
            return false;
        }
        self.slots.insert(number, ShardSlot::Coming);
        if let Some(wanted) = &self.wanted {
            let _ = wanted.send(number);
        }
        true
    }

    fn no_longer_ahead(&mut self, number: u32) {
        if let Some(bytes) = self.ahead.remove(&number) {
            self.ahead_bytes -= bytes;
        }
    }
}

/// The open shards, those being fetched, and the prefetch budget.
pub(crate) struct ShardWindow {
    state: Mutex<WindowState>,
    changed: Condvar,
    budget_bytes: u64,
    /// Whether open shards take up room under a cache limit.
    is_limited: bool,
    pub(crate) stop: AtomicBool,
}

impl ShardWindow {
    /// Creates a window. `limit_bytes` is the limit of the cache: with it, shards stay open only while
    /// requested batches need them, and prefetched shards stay within it.
    pub(crate) fn new(wanted: Sender<u32>, budget_bytes: u64, limit_bytes: Option<u64>) -> Self {
        Self {
            state: Mutex::new(WindowState {
                wanted: Some(wanted),
                ..WindowState::default()
            }),
            changed: Condvar::new(),
            budget_bytes: limit_bytes.map_or(budget_bytes, |limit| limit.min(budget_bytes)),
            is_limited: limit_bytes.is_some(),
            stop: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.lock().wanted = None;
        self.changed.notify_all();
    }

    /// Requests a shard that batch `turn` will use. Waits while the budget is used up, unless the batch's turn
    /// has come; under a limit, that batch then requests the rest itself.
    pub(crate) fn ask_ahead(&self, number: u32, bytes: u64, turn: u64) -> Result<()> {
        let mut state = self.lock();
        while turn > state.cursor && !self.has_room(&state, number, bytes) {
            state = self.wait(state)?;
        }
        // If its batch has passed, nothing would close the shard or return its bytes to the budget.
        if turn < state.cursor {
            return Ok(());
        }
        if self.is_limited {
            if !self.has_room(&state, number, bytes) {
                return Ok(());
            }
            state.needed.insert(number, turn);
        }
        let is_new = state.ask(number);
        // Under a limit, shards that a batch requested before they were planned count as well.
        if is_new || self.is_limited && !state.ahead.contains_key(&number) {
            state.ahead.insert(number, bytes);
            state.ahead_bytes += bytes;
        }
        Ok(())
    }

    /// Waits until batch `turn` is at most `distance` batches ahead.
    pub(crate) fn wait_for_turn(&self, turn: u64, distance: u64) -> Result<()> {
        let mut state = self.lock();
        while turn > state.cursor.saturating_add(distance) {
            state = self.wait(state)?;
        }
        Ok(())
    }

    /// Returns how many of the first `numbers`, shards of one batch, may be open together: all without a limit,
    /// else as many as the budget and the limit of open files allow, and at least one.
    pub(crate) fn room_for(&self, numbers: &[u32], bytes: impl Fn(u32) -> u64) -> usize {
        if !self.is_limited {
            return numbers.len();
        }
        let mut total = 0;
        let few = numbers.iter().take(MAX_HELD).enumerate();
        few.take_while(|(place, number)| {
            total += bytes(**number);
            *place == 0 || total <= self.budget_bytes
        })
        .count()
    }

    /// Returns opened shards of batch `turn`, and waits for those that are being fetched. `later` are further
    /// shards of the same batch, which are kept open if they are open.
    pub(crate) fn take(
        &self,
        numbers: &[u32],
        later: &[u32],
        turn: u64,
    ) -> Result<HashMap<u32, Arc<Shard>>> {
        let mut state = self.lock();
        state.cursor = turn;
        if self.is_limited {
            // Close shards before the new ones are requested, which may use the room.
            let keep: HashSet<u32> = numbers.iter().chain(later).copied().collect();
            close_unneeded(&mut state, &keep, turn);
        }
        for number in numbers {
            if !self.is_limited {
                state.no_longer_ahead(*number);
            }
            state.ask(*number);
        }
        self.changed.notify_all();
        loop {
            if let Some(found) = collect(&mut state, numbers, turn)? {
                if !self.is_limited {
                    close_oldest(&mut state, numbers);
                }
                return Ok(found);
            }
            state = self.wait(state)?;
        }
    }

    /// Stores the result of opening a shard.
    pub(crate) fn put(&self, number: u32, opened: Result<Shard>) {
        let mut state = self.lock();
        let slot = match opened {
            Ok(shard) => ShardSlot::Open {
                shard: Arc::new(shard),
                used: state.cursor,
            },
            Err(error) => ShardSlot::Failed(Some(error)),
        };
        state.slots.insert(number, slot);
        self.changed.notify_all();
    }

    /// Returns whether a shard of `bytes` may be requested before its turn.
    fn has_room(&self, state: &WindowState, number: u32, bytes: u64) -> bool {
        let is_here = self.is_limited && state.slots.contains_key(&number);
        let is_full = state.ahead_bytes + bytes > self.budget_bytes
            || self.is_limited && state.ahead.len() >= MAX_HELD;
        is_here || state.ahead_bytes == 0 || !is_full
    }

    fn lock(&self) -> MutexGuard<'_, WindowState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, WindowState>) -> Result<MutexGuard<'a, WindowState>> {
        if self.is_stopped() {
            return Err(StreamError::Closed);
        }
        let (state, _) = self
            .changed
            .wait_timeout(state, WAKE)
            .unwrap_or_else(PoisonError::into_inner);
        Ok(state)
    }
}

/// Returns all of `numbers` if all are open; fails once one of them cannot be opened.
fn collect(
    state: &mut WindowState,
    numbers: &[u32],
    turn: u64,
) -> Result<Option<HashMap<u32, Arc<Shard>>>> {
    let mut found = HashMap::with_capacity(numbers.len());
    let mut is_whole = true;
    for number in numbers {
        match state.slots.get_mut(number) {
            Some(ShardSlot::Open { shard, used }) => {
                *used = turn;
                found.insert(*number, shard.clone());
            }
            Some(ShardSlot::Failed(error)) => {
                return Err(error.take().unwrap_or(StreamError::Closed));
            }
            Some(ShardSlot::Coming) | None => is_whole = false,
        }
    }
    Ok(is_whole.then_some(found))
}

/// Closes the shards that no batch after `turn` is known to need.
fn close_unneeded(state: &mut WindowState, keep: &HashSet<u32>, turn: u64) {
    let idle: Vec<u32> = state
        .slots
        .iter()
        .filter(|(number, slot)| {
            let last = state.needed.get(number);
            matches!(slot, ShardSlot::Open { .. })
                && !keep.contains(number)
                && last.is_none_or(|&last| last <= turn)
        })
        .map(|(number, _)| *number)
        .collect();
    for number in idle {
        state.slots.remove(&number);
        state.needed.remove(&number);
        state.no_longer_ahead(number);
    }
}

/// Closes the least recently used shards if too many are open.
fn close_oldest(state: &mut WindowState, keep: &[u32]) {
    if state.slots.len() <= MAX_OPEN.max(2 * keep.len()) {
        return;
    }
    let mut idle: Vec<(u64, u32)> = state
        .slots
        .iter()
        .filter_map(|(number, slot)| match slot {
            ShardSlot::Open { used, .. }
                if !keep.contains(number) && !state.ahead.contains_key(number) =>
            {
                Some((*used, *number))
            }
            _ => None,
        })
        .collect();
    idle.sort_unstable();
    for (_, number) in idle.iter().take(idle.len() / 2 + 1) {
        state.slots.remove(number);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use crate::index::Index;
    use crossbeam_channel::{Receiver, unbounded};

    /// Returns a shard without samples.
    fn shard() -> Shard {
        let text = serde_json::json!({"version": 2, "shards": [{
            "column_encodings": ["int"], "column_names": ["a"], "column_sizes": [8], "compression": null,
            "format": "mds", "hashes": [], "samples": 0, "size_limit": null, "version": 2, "zip_data": null,
            "raw_data": {"basename": "s.mds", "bytes": 8, "hashes": {}},
        }]});
        let index = Index::parse(text.to_string().as_bytes(), "index.json").unwrap();
        let bytes = [0u32.to_le_bytes(), 8u32.to_le_bytes()].concat();
        Shard::open(&index.shard(0).unwrap(), "s.mds", Box::new(bytes), None).unwrap()
    }

    /// Opens every requested shard, as fetchers do, and returns their numbers.
    fn open_all(window: &ShardWindow, requests: &Receiver<u32>) -> Vec<u32> {
        let numbers: Vec<u32> = requests.try_iter().collect();
        for &number in &numbers {
            window.put(number, Ok(shard()));
        }
        numbers
    }

    #[test]
    fn under_a_limit_shards_close_after_the_last_batch_known_to_need_them() {
        for (limit, again) in [(None, vec![]), (Some(100), vec![1])] {
            let (wanted, requests) = unbounded();
            let window = ShardWindow::new(wanted, 1000, limit);
            for (turn, number) in [(0, 1), (0, 2), (1, 2), (2, 3)] {
                window.ask_ahead(number, 10, turn).unwrap();
            }
            assert_eq!(open_all(&window, &requests), [1, 2, 3]);
            window.take(&[1, 2], &[], 0).unwrap();
            // Batch 1 needs the second shard but not the first, which a later batch requests again.
            window.take(&[2], &[], 1).unwrap();
            window.ask_ahead(1, 10, 3).unwrap();
            window.ask_ahead(2, 10, 3).unwrap();
            assert_eq!(open_all(&window, &requests), again);
            window.take(&[3], &[], 2).unwrap();
            assert_eq!(window.take(&[1, 2], &[], 3).unwrap().len(), 2);
            assert!(requests.is_empty());
        }
    }

    #[test]
    fn a_limit_bounds_open_and_requested_shards() {
        let (wanted, requests) = unbounded();
        let window = ShardWindow::new(wanted, 1000, Some(25));
        std::thread::scope(|scope| {
            let planner = scope.spawn(|| {
                for (turn, number) in [(0, 1), (1, 2), (2, 3)] {
                    window.ask_ahead(number, 10, turn).unwrap();
                }
            });
            while requests.len() < 2 {
                std::thread::yield_now();
            }
            assert_eq!(open_all(&window, &requests), [1, 2]);
            std::thread::sleep(2 * WAKE);
            assert!(requests.is_empty(), "the third is over the limit");
            window.take(&[1], &[], 0).unwrap();
            window.take(&[2], &[], 1).unwrap();
            planner.join().unwrap();
            assert_eq!(open_all(&window, &requests), [3]);
        });
    }
    #[test]
    fn a_lagging_planner_requests_no_shards_of_past_batches() {
        let (wanted, requests) = unbounded();
        let window = ShardWindow::new(wanted, 15, None);
        let turns = 2 * MAX_OPEN as u32;
        for turn in 0..turns {
            window.put(turn, Ok(shard()));
            window.take(&[turn], &[], turn.into()).unwrap();
        }
        assert!(!window.lock().slots.contains_key(&0), "it was closed");
        window.ask_ahead(0, 10, 0).unwrap();
        assert!(requests.is_empty());
        assert_eq!(window.lock().ahead_bytes, 0, "nobody would take it");
    }
}
