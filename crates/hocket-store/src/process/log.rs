//! The log of this process: events of `tracing` that are kept until the caller passes them on.
//!
//! An event is written where it happens, often on an I/O thread, and only put into a queue there. The extension takes
//! the queue's events when a thread of Python's has the interpreter lock anyway.

use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{process, ptr};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Level, Metadata, Subscriber};

/// Events beyond these are counted and not kept.
const MOST_EVENTS: usize = 1000;

/// An event of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEvent {
    /// Its level.
    pub level: Level,
    /// The module that wrote it, such as `hocket_store::remote::retry`.
    pub target: &'static str,
    /// Its message.
    pub text: String,
}

/// The events of one process, and the number of those that were not kept.
struct EventQueue {
    pid: u32,
    events: Mutex<(VecDeque<LogEvent>, usize)>,
}

static QUEUE: AtomicPtr<EventQueue> = AtomicPtr::new(ptr::null_mut());
static HAS_EVENTS: AtomicBool = AtomicBool::new(false);

/// Returns the queue of this process. A forked child leaves its parent's alone: another thread may have held the lock.
fn queue() -> &'static EventQueue {
    let old = QUEUE.load(Ordering::Acquire);
    let pid = process::id();
    // SAFETY: the pointer is null or comes from `Box::leak`.
    if let Some(queue) = unsafe { old.as_ref() }
        && queue.pid == pid
    {
        return queue;
    }
    let new: &'static mut EventQueue = Box::leak(Box::new(EventQueue {
        pid,
        events: Mutex::default(),
    }));
    match QUEUE.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => new,
        // SAFETY: another thread of this process was quicker; its queue is never freed.
        Err(theirs) => unsafe { &*theirs },
    }
}

/// Has the events of all crates of Hocket kept from now on. Other programs that use these crates may install a
/// subscriber of their own instead.
pub fn keep_events() {
    // An error means that a subscriber is installed already.
    let _ = tracing::subscriber::set_global_default(Keeper);
}

/// Returns the oldest event and removes it from the queue. Without events it costs one load of a variable.
#[must_use]
pub fn take_event() -> Option<LogEvent> {
    if !HAS_EVENTS.load(Ordering::Relaxed) {
        return None;
    }
    let mut kept = (queue().events.lock()).unwrap_or_else(PoisonError::into_inner);
    let (events, dropped) = &mut *kept;
    let event = events.pop_front();
    if event.is_none() {
        HAS_EVENTS.store(false, Ordering::Relaxed);
        if *dropped > 0 {
            let text = format!("{dropped} more events were not kept");
            *dropped = 0;
            return Some(LogEvent {
                level: Level::WARN,
                target: module_path!(),
                text,
            });
        }
    }
    event
}

fn keep(event: LogEvent) {
    let mut kept = (queue().events.lock()).unwrap_or_else(PoisonError::into_inner);
    if kept.0.len() < MOST_EVENTS {
        kept.0.push_back(event);
    } else {
        kept.1 += 1;
    }
    HAS_EVENTS.store(true, Ordering::Relaxed);
}

/// The subscriber that puts events into the queue.
struct Keeper;

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target().starts_with("hocket_")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::DEBUG)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = EventText(String::new());
        event.record(&mut text);
        keep(LogEvent {
            level: *event.metadata().level(),
            target: event.metadata().target(),
            text: text.0,
        });
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1) // spans are not enabled
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The message of an event, followed by its other fields.
struct EventText(String);

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// One test, because the queue is the process's.
    #[test]
    fn events_of_this_crate_are_kept_in_order_up_to_the_limit() {
        keep_events();
        tracing::info!(target: "other", "not ours");
        let written = MOST_EVENTS + 3;
        std::thread::scope(|scope| {
            scope.spawn(|| (0..written).for_each(|number| tracing::info!(number, "event")));
        });
        let is_own = |event: &LogEvent| module_path!().starts_with(event.target);
        let own = || std::iter::from_fn(take_event).filter(is_own);
        let taken: Vec<LogEvent> = own().collect();
        // Other tests of this process may write events, too.
        assert!(taken.len() <= MOST_EVENTS + 1);
        assert_eq!(taken[0].text, "event number=0");
        assert_eq!(taken[1].level, Level::INFO);
        let last = taken.last().unwrap();
        assert!(last.text.ends_with("more events were not kept"), "{last:?}");
        assert_eq!(own().count(), 0);
    }
}
