//! Compressed data files: one zstd frame for the header, and one for each block.
//!
//! `zstd -dc file.blocks` prints the plain safetensors file. The manifest records the location of each frame,
//! so a read of a range decompresses only the frames of its own blocks.

use std::io;
use std::sync::Mutex;

use zstd::bulk::Compressor;
use zstd::zstd_safe::CParameter;

use crate::error::{CkptError, Result};
use crate::format::digest::{BLOCK_BYTES, DIGEST_BYTES, num_blocks, to_base64, xxh3_128};
use crate::format::safetensors::FileLayout;
use crate::workers::{self, Interrupted};

/// Number of blocks compressed in parallel before they are written in order; twice that many MiB are held in
/// memory.
const GROUP_BLOCKS: u64 = 32;

const MAX_WORKERS: usize = 8;

/// The manifest's data about a compressed file, except its path.
pub(crate) struct CompressedFile {
    /// The concatenated digests of the blocks.
    pub(crate) digests: Vec<u8>,
    /// Size of each frame in bytes, the header's first.
    pub(crate) frames: Vec<u32>,
}

/// A compressor that turns each piece into one frame.
pub(crate) struct FrameWriter {
    compressor: Compressor<'static>,
    frames: Vec<u8>,
    lengths: Vec<u8>,
}

impl FrameWriter {
    pub(crate) fn new(level: i32) -> Result<Self> {
        Ok(Self {
            compressor: compressor(level)?,
            frames: Vec::new(),
            lengths: Vec::new(),
        })
    }

    pub(crate) fn push(&mut self, content: &[u8]) -> Result<()> {
        let frame = self.compressor.compress(content);
        let frame = frame.map_err(|error| failed(&error))?;
        self.lengths.extend(length(&frame)?.to_le_bytes());
        self.frames.extend(frame);
        Ok(())
    }

    /// Returns the frames since the last call.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.frames)
    }

    /// Returns the lengths of all frames in the manifest's encoding.
    pub(crate) fn lengths(self) -> String {
        to_base64(&self.lengths)
    }
}

/// The digest and frame of a block.
type Frame = ([u8; DIGEST_BYTES], Vec<u8>);

/// Compresses header and blocks; passes the file's bytes to `take` in order, a few MiB at a time.
pub(crate) fn compress(
    layout: &FileLayout,
    level: i32,
    background: bool,
    interrupted: Interrupted<'_>,
    mut take: impl FnMut(Vec<u8>) -> Result<()>,
) -> Result<CompressedFile> {
    let header = compressor(level)?
        .compress(&layout.header)
        .map_err(|error| failed(&error))?;
    let mut compressed = CompressedFile {
        digests: Vec::new(),
        frames: vec![length(&header)?],
    };
    take(header)?;
    let total = num_blocks(layout.data_bytes);
    let mut first = 0;
    while first < total {
        let count = GROUP_BLOCKS.min(total - first);
        let mut bytes = Vec::new();
        for (digest, frame) in compress_group(layout, level, background, first, count, interrupted)?
        {
            compressed.digests.extend(digest);
            compressed.frames.push(length(&frame)?);
            bytes.extend(frame);
        }
        take(bytes)?;
        first += count;
    }
    Ok(compressed)
}

fn compress_group(
    layout: &FileLayout,
    level: i32,
    background: bool,
    first: u64,
    count: u64,
    interrupted: Interrupted<'_>,
) -> Result<Vec<Frame>> {
    let done: Mutex<Vec<Frame>> = Mutex::new(vec![Frame::default(); count as usize]);
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let start = || {
        if background {
            workers::give_way();
        }
        Ok((compressor(level)?, vec![0_u8; BLOCK_BYTES as usize]))
    };
    workers::run(
        MAX_WORKERS.min(cores),
        count as usize,
        interrupted,
        start,
        |(compressor, buffer), index| {
            let offset = (first + index as u64) * BLOCK_BYTES;
            let content = &mut buffer[..(layout.data_bytes - offset).min(BLOCK_BYTES) as usize];
            layout.fill(offset, content);
            let frame = compressor
                .compress(content)
                .map_err(|error| failed(&error))?;
            if let Some(slot) = done
                .lock()
                .ok()
                .as_mut()
                .and_then(|done| done.get_mut(index))
            {
                *slot = (xxh3_128(content), frame);
            }
            Ok(())
        },
    )?;
    done.into_inner()
        .map_err(|_| CkptError::panicked("a compressor"))
}

fn compressor(level: i32) -> Result<Compressor<'static>> {
    let make = || -> io::Result<_> {
        let mut compressor = Compressor::new(level)?;
        compressor.set_parameter(CParameter::ChecksumFlag(true))?;
        Ok(compressor)
    };
    make().map_err(|error| failed(&error))
}

fn length(frame: &[u8]) -> Result<u32> {
    u32::try_from(frame.len())
        .map_err(|_| CkptError::process(format!("a frame of {} bytes", frame.len())))
}

fn failed(error: &io::Error) -> CkptError {
    CkptError::process(format!("zstd: {error}"))
}

/// Returns a limit of the compressed size of a file with `size` bytes: frames of incompressible blocks are larger.
pub(crate) fn largest_size(size: u64) -> u64 {
    size.saturating_add(size / 256 + BLOCK_BYTES)
}
