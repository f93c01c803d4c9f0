//! Compressed data files: a zstd frame for the header, and one for each block.
//!
//! `zstd -dc file.blocks` prints the plain safetensors file. The place of each frame stands in the manifest, so
//! that a range of the data reads only the frames of its own blocks.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;

use bytes::Bytes;
use hocket_store::Store;
use zstd::bulk::Compressor;
use zstd::zstd_safe::CParameter;

use crate::digest::{BLOCK_BYTES, DIGEST_BYTES, num_blocks, to_base64, xxh3_128};
use crate::error::{CkptError, Result};
use crate::pace::{self, Interrupted};
use crate::remote;
use crate::safetensors::Layout;

/// Blocks that are compressed side by side before they are written in order: so many MiB, twice, are held.
const GROUP_BLOCKS: u64 = 32;

const MAX_WORKERS: usize = 8;

/// What the manifest says of a compressed file, beside its path.
pub(crate) struct Squeezed {
    /// Of the blocks, one after the other.
    pub(crate) digests: Vec<u8>,
    /// Bytes of each frame, the header's first.
    pub(crate) frames: Vec<u32>,
}

/// Compresses what comes in pieces, one frame a piece.
pub(crate) struct Squeezer {
    compressor: Compressor<'static>,
    frames: Vec<u8>,
    lengths: Vec<u8>,
}

impl Squeezer {
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

    /// The frames since the last call.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.frames)
    }

    /// The lengths of all frames, as the manifest has them.
    pub(crate) fn lengths(self) -> String {
        to_base64(&self.lengths)
    }
}

/// A block's digest and frame.
type Frame = ([u8; DIGEST_BYTES], Vec<u8>);

/// Compresses header and blocks; `take` gets the file's bytes, in order, some MiB at a time.
fn squeeze(
    layout: &Layout,
    level: i32,
    background: bool,
    interrupted: Interrupted<'_>,
    mut take: impl FnMut(Vec<u8>) -> Result<()>,
) -> Result<Squeezed> {
    let header = compressor(level)?
        .compress(&layout.header)
        .map_err(|error| failed(&error))?;
    let mut squeezed = Squeezed {
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
            squeezed.digests.extend(digest);
            squeezed.frames.push(length(&frame)?);
            bytes.extend(frame);
        }
        take(bytes)?;
        first += count;
    }
    Ok(squeezed)
}

fn compress_group(
    layout: &Layout,
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
            pace::give_way();
        }
        Ok((compressor(level)?, vec![0_u8; BLOCK_BYTES as usize]))
    };
    pace::run(
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
            if let Some(place) = done
                .lock()
                .ok()
                .as_mut()
                .and_then(|done| done.get_mut(index))
            {
                *place = (xxh3_128(content), frame);
            }
            Ok(())
        },
    )?;
    done.into_inner()
        .map_err(|_| CkptError::process("a compressor panicked; this is a defect of Hocket"))
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
        .map_err(|_| CkptError::Invalid(format!("a frame of {} bytes", frame.len())))
}

fn failed(error: &io::Error) -> CkptError {
    CkptError::process(format!("zstd: {error}"))
}

/// What `write_local` would say, without a file.
pub(crate) fn describe(
    layout: &Layout,
    level: i32,
    interrupted: Interrupted<'_>,
) -> Result<Squeezed> {
    squeeze(layout, level, false, interrupted, |_| Ok(()))
}

/// Fills a new local file; flushing it is the caller's.
pub(crate) fn write_local(
    path: &Path,
    mut file: &File,
    layout: &Layout,
    level: i32,
    background: bool,
    interrupted: Interrupted<'_>,
) -> Result<Squeezed> {
    squeeze(layout, level, background, interrupted, |bytes| {
        file.write_all(&bytes)
            .map_err(|error| CkptError::io(path, &format!("write {} bytes", bytes.len()), &error))
    })
}

/// Uploads a file.
pub(crate) fn write_remote(
    store: &Store,
    key: &str,
    layout: &Layout,
    level: i32,
    interrupted: Interrupted<'_>,
) -> Result<Squeezed> {
    let size = layout.header.len() as u64 + layout.data_bytes;
    let mut upload = Some(remote::begin_upload(store, key, size, interrupted)?);
    let squeezed = squeeze(layout, level, false, interrupted, |bytes| {
        if let Some(begun) = upload.take() {
            upload = Some(remote::send(begun, Bytes::from(bytes), interrupted)?);
        }
        Ok(())
    })?;
    if let Some(upload) = upload {
        remote::wait(async move { Ok(upload.finish().await?) }, interrupted)?;
    }
    Ok(squeezed)
}
