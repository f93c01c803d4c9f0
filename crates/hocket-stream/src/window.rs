//! The shards that are open or on their way, shared by the threads of one reader.

use std::collections::HashMap;
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
    /// Bytes of each shard that was asked for ahead of its first use.
    ahead: HashMap<u32, u64>,
    ahead_bytes: u64,
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
}

/// Which shards are open, which are coming, and how far ahead one may ask.
pub(crate) struct Window {
    state: Mutex<State>,
    changed: Condvar,
    budget_bytes: u64,
    pub(crate) stop: AtomicBool,
}

impl Window {
    pub(crate) fn new(wanted: Sender<u32>, budget_bytes: u64) -> Self {
        Self {
            state: Mutex::new(State {
                wanted: Some(wanted),
                ..State::default()
            }),
            changed: Condvar::new(),
            budget_bytes,
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
    /// unless the batch's turn has come.
    pub(crate) fn ask_ahead(&self, number: u32, bytes: u64, turn: u64) -> Result<()> {
        let mut state = self.lock();
        while turn > state.cursor
            && state.ahead_bytes > 0
            && state.ahead_bytes + bytes > self.budget_bytes
        {
            state = self.wait(state)?;
        }
        if state.ask(number) {
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

    /// The shards of batch `turn`, opened; waits for those that are still coming.
    pub(crate) fn take(&self, numbers: &[u32], turn: u64) -> Result<HashMap<u32, Arc<Shard>>> {
        let mut state = self.lock();
        state.cursor = turn;
        for number in numbers {
            if let Some(bytes) = state.ahead.remove(number) {
                state.ahead_bytes -= bytes;
            }
            state.ask(*number);
        }
        self.changed.notify_all();
        loop {
            if let Some(found) = collect(&mut state, numbers, turn)? {
                close_oldest(&mut state, numbers);
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
