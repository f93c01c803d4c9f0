//! A sequential writer of a local file with direct I/O.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::direct::DirectFile;
use super::pages::{BUFFER_BYTES, PageBuffer};
use crate::error::thread_refused;

/// Number of buffers per file, and of threads that write them.
const BUFFERS: usize = 4;
const WRITERS: usize = 2;

type WriteJob = (PageBuffer, usize, u64);

/// A sequential writer: threads write full buffers while the next one fills. Its threads end with it.
pub struct SequentialWriter {
    file: Arc<DirectFile>,
    filling: Option<PageBuffer>,
    filled: usize,
    /// File offset of the buffer that is being filled.
    offset: u64,
    num_buffers: usize,
    jobs: Option<Sender<WriteJob>>,
    done: Option<Receiver<io::Result<PageBuffer>>>,
    threads: Vec<JoinHandle<()>>,
    process: u32,
}

impl SequentialWriter {
    /// Returns a writer that begins at the start of `file`.
    #[must_use]
    pub fn new(file: DirectFile) -> Self {
        Self {
            file: Arc::new(file),
            filling: None,
            filled: 0,
            offset: 0,
            num_buffers: 0,
            jobs: None,
            done: None,
            threads: Vec::new(),
            process: std::process::id(),
        }
    }

    /// Appends bytes. After an error the stream is unusable.
    ///
    /// # Errors
    /// The I/O error of this write or of earlier ones.
    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut buffer = match self.filling.take() {
                Some(buffer) => buffer,
                None => self.next_buffer()?,
            };
            let (part, rest) = bytes.split_at(bytes.len().min(BUFFER_BYTES - self.filled));
            buffer.bytes_mut()[self.filled..self.filled + part.len()].copy_from_slice(part);
            self.filled += part.len();
            bytes = rest;
            if self.filled < BUFFER_BYTES {
                self.filling = Some(buffer);
                return Ok(());
            }
            self.send(buffer)?;
            self.offset += self.filled as u64;
            self.filled = 0;
        }
        Ok(())
    }

    /// Waits until everything is written, and sets the file's length. The caller flushes it.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn finish(mut self) -> io::Result<()> {
        if let Some(mut buffer) = self.filling.take() {
            let padded = buffer.padded(self.filled);
            self.file.write(padded, self.filled, self.offset)?;
        }
        self.jobs = None;
        if let Some(done) = self.done.take() {
            for outcome in done {
                outcome?;
            }
        }
        self.file.set_len(self.offset + self.filled as u64)
    }

    fn next_buffer(&mut self) -> io::Result<PageBuffer> {
        if self.num_buffers < BUFFERS {
            self.num_buffers += 1;
            return PageBuffer::new();
        }
        let done = self.done.as_ref().ok_or_else(given_up)?;
        done.recv().map_err(|_| given_up())?
    }

    fn send(&mut self, buffer: PageBuffer) -> io::Result<()> {
        if self.jobs.is_none() {
            self.start()?;
        }
        let job = (buffer, self.filled, self.offset);
        let jobs = self.jobs.as_ref().ok_or_else(given_up)?;
        jobs.send(job).map_err(|_| given_up())
    }

    /// Starts the threads, when the first buffer is full: small files need none.
    fn start(&mut self) -> io::Result<()> {
        let (jobs, queue) = mpsc::channel::<WriteJob>();
        let (report, done) = mpsc::channel();
        let queue = Arc::new(Mutex::new(queue));
        for number in 0..WRITERS {
            let (file, queue, report) = (self.file.clone(), queue.clone(), report.clone());
            let body = move || {
                let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                while let Ok((mut buffer, length, offset)) = next() {
                    let outcome = file.write(buffer.padded(length), length, offset);
                    if report.send(outcome.map(|()| buffer)).is_err() {
                        return;
                    }
                }
            };
            let name = format!("hocket-write-{number}");
            match std::thread::Builder::new().name(name).spawn(body) {
                Ok(thread) => self.threads.push(thread),
                Err(error) if number == 0 => {
                    return Err(io::Error::new(error.kind(), thread_refused(&error)));
                }
                // The threads that exist write everything.
                Err(_) => break,
            }
        }
        (self.jobs, self.done) = (Some(jobs), Some(done));
        Ok(())
    }
}

impl Drop for SequentialWriter {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        // A forked child has the handles but not the threads, so there is nothing to join. Dropping a channel
        // takes its lock, which one of the threads may have held at the fork.
        if self.process != std::process::id() {
            threads.into_iter().for_each(std::mem::forget);
            std::mem::forget((self.jobs.take(), self.done.take()));
            return;
        }
        self.jobs = None;
        self.done = None;
        for thread in threads {
            let _ = thread.join();
        }
    }
}

fn given_up() -> io::Error {
    io::Error::other("an earlier write failed")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::fs::File;

    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|at| ((at * 31) >> 7) as u8).collect()
    }

    #[test]
    fn sequential_writes_produce_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        for (count, step) in [
            (0, 1),
            (5, 2),
            (BUFFER_BYTES, BUFFER_BYTES),
            (BUFFER_BYTES + 1, 100_000),
            (9 * BUFFER_BYTES + 4097, 3 * BUFFER_BYTES + 1),
        ] {
            let path = folder.path().join(count.to_string());
            let file = File::create(&path).unwrap();
            let direct = DirectFile::open(&path, &file, count as u64).unwrap();
            let mut stream = SequentialWriter::new(direct);
            let all = bytes(count);
            for piece in all.chunks(step) {
                stream.write(piece).unwrap();
            }
            stream.finish().unwrap();
            assert!(std::fs::read(&path).unwrap() == all, "{count} by {step}");
        }
    }

    #[test]
    fn a_write_error_is_returned_and_ends_the_stream() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"").unwrap();
        let read_only = File::open(&path).unwrap();
        let mut stream = SequentialWriter::new(DirectFile::open(&path, &read_only, 0).unwrap());
        let all = bytes(BUFFER_BYTES);
        let failed = (0..100).any(|_| stream.write(&all).is_err());
        assert!(failed || stream.finish().is_err());
    }
}
