//! The shards that are open or on their way, shared by the threads of one reader.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::Sender;

use crate::error::{Result, StreamError};
use crate::shard::Shard;

/// Every wait looks up this often, so that nothing rests on a notification alone.
const WAKE: Duration = Duration::from_millis(50);

/// Open shards are maps of files: the bound is on address space and kernel tables, not on memory.
const MAX_OPEN: usize = 1024;

/// Under a limit, open shards are open files, one or two each, of which a process may have so many. So many shards
/// are held for batches to come, and so many for the one being assembled.
const MAX_HELD: usize = 96;

enum Slot {
    Coming,
    Open {
        shard: Arc<Shard>,
        used: u64,
    },
    /// Told to the first batch that needs the shard, not to earlier ones that do not.
    Failed(Option<StreamError>),
}

#[derive(Default)]
struct State {
    slots: HashMap<u32, Slot>,
    /// Bytes of each shard that was asked for ahead of its first use; under a limit, of its last.
    ahead: HashMap<u32, u64>,
    ahead_bytes: u64,
    /// Under a limit: the last batch known to need a shard.
    needed: HashMap<u32, u64>,
    /// The number, in this reader's sequence, of the batch being assembled.
    cursor: u64,
    /// Where fetchers hear of shards; gone once all is over, which wakes them at once.
    wanted: Option<Sender<u32>>,
}

impl State {
    /// Asks the fetchers for a shard that is neither open nor coming; whether it was not.
    fn ask(&mut self, number: u32) -> bool {
        if self.slots.contains_key(&number) {
            return false;
        }
        self.slots.insert(number, Slot::Coming);
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

/// Which shards are open, which are coming, and how far ahead one may ask.
pub(crate) struct Window {
    state: Mutex<State>,
    changed: Condvar,
    budget_bytes: u64,
    /// Whether open shards take room that others wait for.
    is_limited: bool,
    pub(crate) stop: AtomicBool,
}

impl Window {
    /// `limit_bytes` is what the cache may have: shards are then open only while batches that were asked for
    /// need them, and those ahead are no more than it.
    pub(crate) fn new(wanted: Sender<u32>, budget_bytes: u64, limit_bytes: Option<u64>) -> Self {
        Self {
            state: Mutex::new(State {
                wanted: Some(wanted),
                ..State::default()
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

    /// Asks for a shard that batch `turn` will use. Waits while as much as the budget is ahead already,
    /// unless the batch's turn has come; under a limit, that batch asks for the rest itself.
    pub(crate) fn ask_ahead(&self, number: u32, bytes: u64, turn: u64) -> Result<()> {
        let mut state = self.lock();
        while turn > state.cursor && !self.has_room(&state, number, bytes) {
            state = self.wait(state)?;
        }
        // If its batch went by, nobody would close it, nor give its bytes back.
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
        // Under a limit those count, too, that a batch asked for before they were planned.
        if is_new || self.is_limited && !state.ahead.contains_key(&number) {
            state.ahead.insert(number, bytes);
            state.ahead_bytes += bytes;
        }
        Ok(())
    }

    /// Waits until batch `turn` is no further than `distance` batches ahead.
    pub(crate) fn wait_for_turn(&self, turn: u64, distance: u64) -> Result<()> {
        let mut state = self.lock();
        while turn > state.cursor.saturating_add(distance) {
            state = self.wait(state)?;
        }
        Ok(())
    }

    /// How many of the first of `numbers`, shards of one batch, may be open together: all if nothing limits them,
    /// else as many as the budget and the files of a process allow, and at least one.
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

    /// Shards of batch `turn`, opened; waits for those that are still coming. `later` are more of the same batch,
    /// which are asked for another time and stay open if they are.
    pub(crate) fn take(
        &self,
        numbers: &[u32],
        later: &[u32],
        turn: u64,
    ) -> Result<HashMap<u32, Arc<Shard>>> {
        let mut state = self.lock();
        state.cursor = turn;
        if self.is_limited {
            // Before the new ones are asked for, which may get the room.
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

    /// A shard has come, or cannot.
    pub(crate) fn put(&self, number: u32, opened: Result<Shard>) {
        let mut state = self.lock();
        let slot = match opened {
            Ok(shard) => Slot::Open {
                shard: Arc::new(shard),
                used: state.cursor,
            },
            Err(error) => Slot::Failed(Some(error)),
        };
        state.slots.insert(number, slot);
        self.changed.notify_all();
    }

    /// Whether a shard of `bytes` may be asked for ahead of its turn.
    fn has_room(&self, state: &State, number: u32, bytes: u64) -> bool {
        let is_here = self.is_limited && state.slots.contains_key(&number);
        let is_full = state.ahead_bytes + bytes > self.budget_bytes
            || self.is_limited && state.ahead.len() >= MAX_HELD;
        is_here || state.ahead_bytes == 0 || !is_full
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> Result<MutexGuard<'a, State>> {
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

/// All of `numbers`, if all are open; an error once one of them cannot be.
fn collect(
    state: &mut State,
    numbers: &[u32],
    turn: u64,
) -> Result<Option<HashMap<u32, Arc<Shard>>>> {
    let mut found = HashMap::with_capacity(numbers.len());
    let mut is_whole = true;
    for number in numbers {
        match state.slots.get_mut(number) {
            Some(Slot::Open { shard, used }) => {
                *used = turn;
                found.insert(*number, shard.clone());
            }
            Some(Slot::Failed(error)) => return Err(error.take().unwrap_or(StreamError::Closed)),
            Some(Slot::Coming) | None => is_whole = false,
        }
    }
    Ok(is_whole.then_some(found))
}

/// Closes the shards that no batch after `turn` is known to need.
fn close_unneeded(state: &mut State, keep: &HashSet<u32>, turn: u64) {
    let idle: Vec<u32> = state
        .slots
        .iter()
        .filter(|(number, slot)| {
            let last = state.needed.get(number);
            matches!(slot, Slot::Open { .. })
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

/// Closes the shards that were used longest ago where there are too many.
fn close_oldest(state: &mut State, keep: &[u32]) {
    if state.slots.len() <= MAX_OPEN.max(2 * keep.len()) {
        return;
    }
    let mut idle: Vec<(u64, u32)> = state
        .slots
        .iter()
        .filter_map(|(number, slot)| match slot {
            Slot::Open { used, .. }
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

    /// A shard without samples.
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

    /// Opens whatever was asked for, as fetchers do; says what that was.
    fn open_all(window: &Window, requests: &Receiver<u32>) -> Vec<u32> {
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
            let window = Window::new(wanted, 1000, limit);
            for (turn, number) in [(0, 1), (0, 2), (1, 2), (2, 3)] {
                window.ask_ahead(number, 10, turn).unwrap();
            }
            assert_eq!(open_all(&window, &requests), [1, 2, 3]);
            window.take(&[1, 2], &[], 0).unwrap();
            // Batch 1 needs the second and not the first, which a later batch asks for anew.
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
    fn a_limit_bounds_what_is_open_or_coming() {
        let (wanted, requests) = unbounded();
        let window = Window::new(wanted, 1000, Some(25));
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
    fn a_planner_that_lags_asks_for_nothing_that_went_by() {
        let (wanted, requests) = unbounded();
        let window = Window::new(wanted, 15, None);
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
