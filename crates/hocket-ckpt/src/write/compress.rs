//! Compressed data files: one zstd frame for the header, and one for each block.
//!
//! `zstd -dc file.blocks` prints the plain safetensors file. The manifest records the location of each frame,
//! so a read of a range decompresses only the frames of its own blocks. With byte planes, the frames of the blocks
//! hold these, and the digests are still those of the plain file.

use std::io;
use std::sync::Mutex;

use zstd::bulk::Compressor;
use zstd::zstd_safe::CParameter;

use crate::error::{CkptError, Result};
use crate::format::digest::{BLOCK_BYTES, DIGEST_BYTES, num_blocks, to_base64, xxh3_128};
use crate::format::planes::{PlaneRuns, RunPairs};
use crate::format::safetensors::FileLayout;
use crate::workers::{self, Interrupted};

/// Number of blocks compressed in parallel before they are written in order; twice that many MiB are held in
/// memory.
const GROUP_BLOCKS: u64 = 32;

const MAX_WORKERS: usize = 8;

/// The encoding of the blocks of a compressed file.
#[derive(Debug, Clone, Copy)]
pub struct BlockEncoding {
    /// The zstd level.
    pub level: i32,
    /// Whether to order the bytes of floating dtypes as planes before compression.
    pub planes: bool,
}

/// The manifest's data about a compressed file, except its path.
pub(crate) struct CompressedFile {
    /// The concatenated digests of the blocks.
    pub(crate) digests: Vec<u8>,
    /// Size of each frame in bytes, the header's first.
    pub(crate) frames: Vec<u32>,
    pub(crate) planes: Option<RunPairs>,
}

/// A compressor that turns the header and then each block into one frame.
pub(crate) struct FrameWriter {
    compressor: Compressor<'static>,
    frames: Vec<u8>,
    lengths: Vec<u8>,
    has_planes: bool,
    runs: Option<PlaneRuns>,
    /// Bytes of the blocks so far.
    offset: u64,
}

impl FrameWriter {
    pub(crate) fn new(encoding: BlockEncoding) -> Result<Self> {
        Ok(Self {
            compressor: compressor(encoding.level)?,
            frames: Vec::new(),
            lengths: Vec::new(),
            has_planes: encoding.planes,
            runs: None,
            offset: 0,
        })
    }

    /// Appends the frame of the header, which gives the runs of byte planes.
    pub(crate) fn push_header(&mut self, header: &[u8]) -> Result<()> {
        if self.has_planes {
            self.runs = PlaneRuns::of_header(header).filter(|runs| runs.to_pairs().is_some());
        }
        self.push(header)
    }

    /// Appends the frame of the next block.
    pub(crate) fn push_block(&mut self, content: &[u8]) -> Result<()> {
        let offset = self.offset;
        self.offset += content.len() as u64;
        let Some(runs) = &self.runs else {
            return self.push(content);
        };
        let mut planes = vec![0_u8; content.len()];
        runs.split(offset, content, &mut planes);
        self.push(&planes)
    }

    fn push(&mut self, content: &[u8]) -> Result<()> {
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

    /// Returns the lengths of all frames and the runs of byte planes, in the manifest's encoding.
    pub(crate) fn into_record(self) -> (String, Option<RunPairs>) {
        let planes = self.runs.as_ref().and_then(PlaneRuns::to_pairs);
        (to_base64(&self.lengths), planes)
    }
}

/// The digest and frame of a block.
type Frame = ([u8; DIGEST_BYTES], Vec<u8>);

/// Compresses header and blocks; passes the file's bytes to `take` in order, a few MiB at a time.
pub(crate) fn compress(
    layout: &FileLayout,
    encoding: BlockEncoding,
    background: bool,
    interrupted: Interrupted<'_>,
    mut take: impl FnMut(Vec<u8>) -> Result<()>,
) -> Result<CompressedFile> {
    let level = encoding.level;
    let header = compressor(level)?
        .compress(&layout.header)
        .map_err(|error| failed(&error))?;
    let runs = encoding.planes.then(|| layout.plane_runs());
    let planes = runs.as_ref().and_then(PlaneRuns::to_pairs);
    let runs = runs.filter(|_| planes.is_some());
    let mut compressed = CompressedFile {
        digests: Vec::new(),
        frames: vec![length(&header)?],
        planes,
    };
    take(header)?;
    let total = num_blocks(layout.data_bytes);
    let mut first = 0;
    while first < total {
        let count = GROUP_BLOCKS.min(total - first);
        let mut bytes = Vec::new();
        let group = BlockGroup {
            layout,
            runs: runs.as_ref(),
            first,
            count,
        };
        for (digest, frame) in group.compress(level, background, interrupted)? {
            compressed.digests.extend(digest);
            compressed.frames.push(length(&frame)?);
            bytes.extend(frame);
        }
        take(bytes)?;
        first += count;
    }
    Ok(compressed)
}

/// Blocks of a file that are compressed in parallel.
struct BlockGroup<'a> {
    layout: &'a FileLayout,
    runs: Option<&'a PlaneRuns>,
    first: u64,
    count: u64,
}

impl BlockGroup<'_> {
    fn compress(
        &self,
        level: i32,
        background: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<Vec<Frame>> {
        let count = self.count as usize;
        let done: Mutex<Vec<Frame>> = Mutex::new(vec![Frame::default(); count]);
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let start = || {
            if background {
                workers::give_way();
            }
            let planes = self.runs.map(|_| vec![0_u8; BLOCK_BYTES as usize]);
            Ok((
                compressor(level)?,
                vec![0_u8; BLOCK_BYTES as usize],
                planes.unwrap_or_default(),
            ))
        };
        workers::run(
            MAX_WORKERS.min(cores),
            count,
            interrupted,
            start,
            |(compressor, buffer, planes), index| {
                let offset = (self.first + index as u64) * BLOCK_BYTES;
                let bytes = (self.layout.data_bytes - offset).min(BLOCK_BYTES) as usize;
                let content = &mut buffer[..bytes];
                self.layout.fill(offset, content);
                let mut stored = &*content;
                if let Some(runs) = self.runs {
                    runs.split(offset, content, &mut planes[..bytes]);
                    stored = &planes[..bytes];
                }
                let frame = compressor.compress(stored);
                let frame = frame.map_err(|error| failed(&error))?;
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
