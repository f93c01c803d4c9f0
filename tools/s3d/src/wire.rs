//! A connection with an optional bandwidth limit, which can be reset.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::faults::Faults;

/// Limit of a timer's lateness that a throttled direction compensates for.
const CATCH_UP: Duration = Duration::from_millis(10);

/// The controls of a connection, set by its requests.
#[derive(Default)]
pub struct Control {
    /// Bandwidth of each direction in bytes per second; 0 is unlimited.
    pub bandwidth: AtomicU64,
    /// Whether closing sends a reset instead of an orderly shutdown.
    pub is_reset: AtomicBool,
}

/// A connection.
pub struct Wire {
    stream: TcpStream,
    control: Arc<Control>,
    faults: Arc<Faults>,
    reading: Pace,
    writing: Pace,
}

impl Wire {
    /// Wraps a new connection.
    pub fn new(stream: TcpStream, control: Arc<Control>, faults: Arc<Faults>) -> Self {
        Self {
            stream,
            control,
            faults,
            reading: Pace::new(),
            writing: Pace::new(),
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if self.control.is_reset.load(Ordering::Relaxed) {
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let limit = this.control.bandwidth.load(Ordering::Relaxed);
        let before = buffer.filled().len();
        if limit == 0 {
            ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
        } else {
            ready!(this.reading.poll_ready(context));
            let mut bytes = [0; 16 << 10];
            let most = Pace::most(limit).min(bytes.len()).min(buffer.remaining());
            let mut part = ReadBuf::new(&mut bytes[..most]);
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut part))?;
            buffer.put_slice(part.filled());
            this.reading.spend(part.filled().len(), limit);
        }
        let count = buffer.filled().len() - before;
        this.faults
            .bytes_received
            .fetch_add(count as u64, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let limit = this.control.bandwidth.load(Ordering::Relaxed);
        let mut most = bytes.len();
        if limit > 0 {
            ready!(this.writing.poll_ready(context));
            most = most.min(Pace::most(limit));
        }
        let count = ready!(Pin::new(&mut this.stream).poll_write(context, &bytes[..most]))?;
        if limit > 0 {
            this.writing.spend(count, limit);
        }
        this.faults
            .bytes_sent
            .fetch_add(count as u64, Ordering::Relaxed);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The time at which a throttled direction may transfer its next bytes.
struct Pace {
    next: Instant,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Pace {
    fn new() -> Self {
        Self {
            next: Instant::now(),
            sleep: None,
        }
    }

    /// Returns the bytes of a twentieth of a second: small enough for a smooth transfer, large enough to limit
    /// timer wake-ups.
    fn most(limit: u64) -> usize {
        usize::try_from(limit / 20)
            .unwrap_or(usize::MAX)
            .clamp(1, 64 << 10)
    }

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if Instant::now() < self.next {
            let next = self.next;
            let sleep = self
                .sleep
                .get_or_insert_with(|| Box::pin(sleep_until(next)));
            ready!(sleep.as_mut().poll(context));
        }
        self.sleep = None;
        Poll::Ready(())
    }

    fn spend(&mut self, count: usize, limit: u64) {
        // Timers fire late: this delay is compensated for, but time in which the peer requested nothing is not.
        let now = Instant::now();
        let earliest = now.checked_sub(CATCH_UP).unwrap_or(now);
        self.next = self.next.max(earliest) + Duration::from_secs_f64(count as f64 / limit as f64);
    }
}
