//! A sequential file writer, for checkpoints that are larger than memory.
//!
//! The file appears under its final name when it is complete. An existing file is compared with the incoming data: a
//! file that an earlier run completed before it was killed is kept. A damaged one is replaced if the caller says so.

use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3Default;

use super::existing::ExistingFile;
use crate::error::{CkptError, Result};
use crate::format::digest::{BLOCK_BYTES, to_base64, xxh3_128};
use crate::format::names::{is_data_path, is_plain_name};
use crate::manifest::DataFile;
use crate::place::CheckpointPlace;
use crate::place::files::{NewFile, PieceWriter};
use crate::workers::Interrupted;
use crate::write::compress::{BlockEncoding, FrameWriter};

/// Time to wait for a writer of a file that is to be replaced, and the pause between two looks.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);

/// Options of a sequential write.
#[derive(Debug, Clone, Copy, Default)]
pub struct StreamOptions {
    /// Size of the header in bytes; if set, the header and the blocks after it are hashed.
    pub data_start: Option<u64>,
    /// The header and each block are written as one frame. Requires `data_start`.
    pub encoding: Option<BlockEncoding>,
    /// Replace an existing data file, in one step, without comparing it. Only for files whose contents follow from
    /// their names, as those of a rewrite: then it does not matter which of several runs comes last.
    pub replaces: bool,
}

/// A file being written. If it is dropped unfinished, nothing remains.
pub struct StreamWriter {
    path: String,
    size: u64,
    written: u64,
    target: Option<Box<dyn PieceWriter>>,
    is_found: bool,
    digests: Option<RunningDigests>,
}

/// The result of a finished file.
#[derive(Debug)]
pub struct StreamedFile {
    /// Its manifest record, if digests were requested.
    pub file: Option<DataFile>,
}

impl StreamWriter {
    /// Starts the file `path` inside `place`, for exactly `size` bytes (before compression).
    ///
    /// # Errors
    /// `Exists` if a different file is there, `Invalid` for a path that is not plain, and errors of the disk or
    /// the store.
    pub fn create(
        place: &CheckpointPlace,
        path: &str,
        size: u64,
        options: StreamOptions,
        interrupted: Interrupted<'_>,
    ) -> Result<Self> {
        if path.is_empty() || !path.split('/').all(is_plain_name) {
            return Err(CkptError::Invalid(format!(
                "`{path}`: expected a plain relative path"
            )));
        }
        if options.replaces {
            check_replaceable(place, path, interrupted)?;
        }
        place.files().sweep_beside(path);
        // The size of a compressed file is not known in advance.
        let expected = options.encoding.is_none().then_some(size);
        let found = if options.replaces {
            None
        } else {
            ExistingFile::find(place, path, expected, interrupted)?
        };
        let is_found = found.is_some();
        let target: Box<dyn PieceWriter> = match found {
            Some(finished) => Box::new(finished),
            None => {
                let plan = NewFile {
                    size,
                    is_exact: expected.is_some(),
                    replaces: options.replaces,
                };
                place.files().begin(path, plan, interrupted)?
            }
        };
        Ok(Self {
            path: path.to_owned(),
            size,
            written: 0,
            target: Some(target),
            is_found,
            digests: options
                .data_start
                .map(|data_start| RunningDigests::new(data_start, options.encoding))
                .transpose()?,
        })
    }

    /// Returns whether the file existed already, so that the data is only compared with it.
    #[must_use]
    pub fn is_found(&self) -> bool {
        self.is_found
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// `Exists` if the existing file differs, and errors of the disk or the store; the file is then abandoned.
    pub fn write(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<()> {
        self.written += bytes.len() as u64;
        if let Some(digests) = &mut self.digests {
            digests.update(bytes)?;
            if let Some(frames) = digests.take_frames() {
                return self.put(&frames, interrupted);
            }
        }
        self.put(bytes, interrupted)
    }

    fn put(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<()> {
        let mut target = self.take()?;
        target.write(bytes, interrupted)?;
        self.target = Some(target);
        Ok(())
    }

    fn take(&mut self) -> Result<Box<dyn PieceWriter>> {
        let given_up = || CkptError::Invalid(format!("`{}` was given up", self.path));
        self.target.take().ok_or_else(given_up)
    }

    /// Makes the file durable and gives it its final name.
    ///
    /// # Errors
    /// `Exists` if the name is taken by now, `Invalid` if bytes are missing, and errors of the disk or the
    /// store.
    pub fn finish(mut self, interrupted: Interrupted<'_>) -> Result<StreamedFile> {
        if self.written != self.size {
            return Err(CkptError::Invalid(format!(
                "`{}` was to have {} bytes and got {}",
                self.path, self.size, self.written
            )));
        }
        if let Some(digests) = &mut self.digests {
            digests.end()?;
            if let Some(frames) = digests.take_frames() {
                self.put(&frames, interrupted)?;
            }
        }
        self.take()?.finish(interrupted)?;
        let (path, size) = (self.path, self.size);
        Ok(StreamedFile {
            file: self.digests.map(|digests| digests.describe(path, size)),
        })
    }
}

/// Waits for the end of another run that has just given the file its name, and holds its lock until it has flushed the
/// folder.
fn check_replaceable(
    place: &CheckpointPlace,
    path: &str,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    if !is_data_path(path) {
        return Err(CkptError::Invalid(format!(
            "`{path}`: only data files are replaced"
        )));
    }
    let deadline = Instant::now() + PATIENCE;
    while place.files().has_writer(path) {
        if interrupted() {
            return Err(CkptError::Interrupted);
        }
        if Instant::now() >= deadline {
            return Err(CkptError::Exists {
                uri: format!("{}/{path}", place.uri().trim_end_matches('/')),
                reason: "another run is writing it. Wait for that one, or stop it first".to_owned(),
            });
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// The running hashes, and optional compression, of header and blocks.
struct RunningDigests {
    data_start: usize,
    header: Vec<u8>,
    /// The hash of the current block so far, and the number of bytes in it.
    // Boxed: the state is aligned to 64 bytes, and the memory of a Python object is not.
    hash: Box<Xxh3Default>,
    hashed: usize,
    /// The bytes of the current block, for compression.
    block: Vec<u8>,
    digests: Vec<u8>,
    frame_writer: Option<FrameWriter>,
}

impl RunningDigests {
    fn new(data_start: u64, encoding: Option<BlockEncoding>) -> Result<Self> {
        Ok(Self {
            data_start: data_start as usize,
            header: Vec::new(),
            hash: Box::new(Xxh3Default::new()),
            hashed: 0,
            block: Vec::new(),
            digests: Vec::new(),
            frame_writer: encoding.map(FrameWriter::new).transpose()?,
        })
    }

    fn update(&mut self, bytes: &[u8]) -> Result<()> {
        let left = self.data_start - self.header.len();
        let (header, mut data) = bytes.split_at(left.min(bytes.len()));
        self.header.extend_from_slice(header);
        if let Some(frame_writer) = &mut self.frame_writer
            && !header.is_empty()
            && self.header.len() == self.data_start
        {
            frame_writer.push_header(&self.header)?;
        }
        while !data.is_empty() {
            let missing = BLOCK_BYTES as usize - self.hashed;
            let (part, rest) = data.split_at(missing.min(data.len()));
            self.hash.update(part);
            self.hashed += part.len();
            if self.frame_writer.is_some() {
                self.block.extend_from_slice(part);
            }
            if part.len() == missing {
                self.end()?;
            }
            data = rest;
        }
        Ok(())
    }

    /// Ends the current block with the data received so far.
    fn end(&mut self) -> Result<()> {
        if self.hashed == 0 {
            return Ok(());
        }
        self.digests.extend(self.hash.digest128().to_be_bytes());
        self.hash.reset();
        self.hashed = 0;
        if let Some(frame_writer) = &mut self.frame_writer {
            frame_writer.push_block(&self.block)?;
            self.block.clear();
        }
        Ok(())
    }

    /// Returns the bytes to write in place of the input; none if the input is written unchanged.
    fn take_frames(&mut self) -> Option<Vec<u8>> {
        self.frame_writer.as_mut().map(FrameWriter::take)
    }

    fn describe(self, path: String, size: u64) -> DataFile {
        let frames = self.frame_writer.map(FrameWriter::into_record);
        let (frames, planes) =
            frames.map_or((None, None), |(lengths, planes)| (Some(lengths), planes));
        DataFile {
            frames,
            planes,
            path,
            size,
            data_start: self.data_start as u64,
            header: to_base64(&xxh3_128(&self.header)),
            digests: to_base64(&self.digests),
        }
    }
}
