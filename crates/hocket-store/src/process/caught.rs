//! Panics inside a task, caught and returned in place of being printed.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::pin::pin;
use std::sync::Once;
use std::task::Poll;

thread_local! {
    /// The text and the place of a panic, while this thread runs a guarded call; `None` otherwise.
    static GUARDED: RefCell<Option<String>> = const { RefCell::new(None) };
}

static HOOK: Once = Once::new();

/// Runs `future`. A panic in it ends it, and its text with the place in the source becomes the error.
pub(crate) async fn caught<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let mut future = pin!(future);
    poll_fn(|context| {
        let polled = caught_call(|| future.as_mut().poll(context));
        polled.map_or_else(|text| Poll::Ready(Err(text)), |polled| polled.map(Ok))
    })
    .await
}

/// Calls `work`. A panic in it ends it, and its text with the place in the source becomes the error.
pub(crate) fn caught_call<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    HOOK.call_once(keep_text);
    let outer = GUARDED.replace(Some(String::new()));
    let done = catch_unwind(AssertUnwindSafe(work));
    let text = GUARDED.replace(outer).unwrap_or_default();
    done.map_err(|_| text)
}

/// Has panics inside guarded calls noted down, and all others treated as before.
fn keep_text() {
    let other = take_hook();
    set_hook(Box::new(move |panic| {
        let is_noted = GUARDED.with_borrow_mut(|guarded| {
            let payload = panic.payload();
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
            let text = text.unwrap_or("without a text");
            let file = panic.location().map_or("", |place| place.file());
            let line = panic.location().map_or(0, |place| place.line());
            let file = file.rsplit('/').next().unwrap_or(file);
            guarded
                .as_mut()
                .map(|kept| *kept = format!("{text} ({file}:{line})"))
                .is_some()
        });
        if !is_noted {
            other(panic);
        }
    }));
}
