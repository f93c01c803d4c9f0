//! The process table: the resources for I/O of one process, reset in a forked child.
//!
//! A forked child inherits memory, but neither the runtime's threads nor sole ownership of the sockets. The
//! child therefore leaks its parent's table without dropping it (a drop would wait for threads that do not
//! exist and close the parent's connections) and starts with an empty one. The forking thread holds the table's
//! lock during `fork`, so no other thread is in the middle of a change.

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// The values of this process, one of each type. The types belong to modules that depend on this one: the
/// runtime, the clients, memory stores, credentials, the byte budget and the counters.
struct ProcessTable {
    /// The process that filled the table.
    pid: u32,
    values: HashMap<TypeId, Box<dyn Any + Send>>,
}

static TABLE: Mutex<Option<ProcessTable>> = Mutex::new(None);
static HOOKS: Once = Once::new();

thread_local! {
    /// The guard of the table's lock, held by the forking thread from just before `fork` to just after it.
    static HELD: RefCell<Option<MutexGuard<'static, Option<ProcessTable>>>> = const { RefCell::new(None) };
}

/// Runs `act` on this process's value of type `T`, made at its first use, under the table's lock. `act` must not
/// call back into this module.
pub(crate) fn with<T: Any + Send + Default, R>(act: impl FnOnce(&mut T) -> R) -> R {
    // SAFETY: the three handlers are `extern "C"` functions that live as long as the library. They only take
    // and release our own lock and replace the table in the child.
    HOOKS.call_once(|| unsafe {
        libc::pthread_atfork(
            Some(before_fork),
            Some(after_fork_in_parent),
            Some(after_fork_in_child),
        );
    });
    let mut guard = lock();
    let pid = std::process::id();
    // The hooks reset the table in a child of `fork`; a raw `clone` bypasses them.
    if guard.as_ref().is_some_and(|table| table.pid != pid) {
        std::mem::forget(guard.take());
    }
    let table = guard.get_or_insert_with(|| ProcessTable {
        pid,
        values: HashMap::new(),
    });
    let value = table.values.entry(TypeId::of::<T>());
    match value.or_insert_with(|| Box::<T>::default()).downcast_mut() {
        Some(value) => act(value),
        None => unreachable!("the key of a value is its own type"),
    }
}

fn lock() -> MutexGuard<'static, Option<ProcessTable>> {
    // A panic elsewhere leaves the table consistent, because every change is a single insertion.
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn before_fork() {
    let guard = lock();
    HELD.with(|held| *held.borrow_mut() = Some(guard));
}

extern "C" fn after_fork_in_parent() {
    HELD.with(|held| drop(held.borrow_mut().take()));
}

extern "C" fn after_fork_in_child() {
    HELD.with(|held| {
        if let Some(mut guard) = held.borrow_mut().take() {
            std::mem::forget(guard.take());
        }
    });
}
