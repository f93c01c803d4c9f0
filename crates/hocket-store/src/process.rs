//! The process table: the resources for I/O of one process, reset in a forked child.
//!
//! A forked child inherits memory, but neither the runtime's threads nor sole ownership of the sockets. The
//! child therefore leaks its parent's table without dropping it (a drop would wait for threads that do not
//! exist and close the parent's connections) and starts with an empty one. The forking thread holds the table's
//! lock during `fork`, so no other thread is in the middle of a change.

use crate::budget::Budget;
use crate::client::{ClientKey, Remote};
use crate::counters::Counters;
use crate::credentials::Profiles;
use crate::error::{Result, StoreError};
use object_store::memory::InMemory;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use tokio::runtime::{Builder, Runtime};

/// Runtime, clients, memory stores, credentials, the byte budget and the counters of this process.
#[derive(Default)]
pub(crate) struct Table {
    /// The process that filled the table.
    pid: u32,
    runtime: Option<&'static Runtime>,
    /// One client per bucket, options and credentials in the environment.
    pub(crate) clients: HashMap<ClientKey, Arc<Remote>>,
    pub(crate) memories: HashMap<String, Arc<InMemory>>,
    pub(crate) profiles: Profiles,
    budget: Arc<Budget>,
    counters: Arc<Counters>,
}

static TABLE: Mutex<Option<Table>> = Mutex::new(None);
static HOOKS: Once = Once::new();

thread_local! {
    /// The guard of the table's lock, held by the forking thread from just before `fork` to just after it.
    static HELD: RefCell<Option<MutexGuard<'static, Option<Table>>>> = const { RefCell::new(None) };
}

/// Runs `act` on this process's table, under its lock. `act` must not call back into this module.
pub(crate) fn with_table<T>(act: impl FnOnce(&mut Table) -> T) -> T {
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
    act(guard.get_or_insert_with(|| Table {
        pid,
        ..Table::default()
    }))
}

/// Returns the process's budget of bytes in flight.
pub(crate) fn budget() -> Arc<Budget> {
    with_table(|table| Arc::clone(&table.budget))
}

/// Returns the process's counters.
pub(crate) fn counters() -> Arc<Counters> {
    with_table(|table| Arc::clone(&table.counters))
}

/// Returns the process's runtime, which starts at first use and never stops.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    with_table(|table| {
        if let Some(runtime) = table.runtime {
            return Ok(runtime);
        }
        let workers =
            std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 4));
        let runtime = Builder::new_multi_thread()
            .worker_threads(workers)
            .max_blocking_threads(16)
            .thread_name("hocket-io")
            .enable_all()
            .build()
            .map_err(|error| {
                StoreError::io("hocket", format!("cannot start the I/O threads: {error}"))
            })?;
        Ok(*table.runtime.insert(Box::leak(Box::new(runtime))))
    })
}

fn lock() -> MutexGuard<'static, Option<Table>> {
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
