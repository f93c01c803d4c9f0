//! The bytes of an object: a single file, or the concatenated files of its parts.
//!
//! Parts are not joined into one file, so completing an upload takes no time, as in the services that this
//! server imitates.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use futures::Stream;
use s3s::StdError;
use s3s::stream::{ByteStream, RemainingLength};
use serde::{Deserialize, Serialize};
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncSeekExt, ReadBuf};

use crate::blobs::Blobs;

const READ_BYTES: usize = 256 << 10;

/// A data file of an object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// Number of the blob.
    pub blob: u64,
    /// Size in bytes.
    pub size: u64,
}

/// A range of an object as the body of a response. All its files are open, so it is read to its end even if the
/// object is replaced or removed.
pub struct PieceStream {
    files: VecDeque<(File, u64)>,
    buffer: BytesMut,
}

impl PieceStream {
    /// Opens bytes `range` of the object with `pieces`.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub async fn open(blobs: &Blobs, pieces: &[Piece], range: Range<u64>) -> io::Result<Self> {
        let mut files = VecDeque::new();
        let mut begin = 0;
        for piece in pieces {
            let end = begin + piece.size;
            let (first, last) = (range.start.max(begin), range.end.min(end));
            if first < last {
                let mut file = File::open(blobs.path(piece.blob)).await?;
                file.set_max_buf_size(READ_BYTES);
                file.seek(io::SeekFrom::Start(first - begin)).await?;
                files.push_back((file, last - first));
            }
            begin = end;
        }
        Ok(Self {
            files,
            buffer: BytesMut::new(),
        })
    }
}

impl Stream for PieceStream {
    type Item = Result<Bytes, StdError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some((file, left)) = this.files.front_mut() else {
            return Poll::Ready(None);
        };
        let wanted = usize::try_from(*left).map_or(READ_BYTES, |left| left.min(READ_BYTES));
        this.buffer.resize(wanted, 0);
        let mut read = ReadBuf::new(&mut this.buffer);
        ready!(Pin::new(file).poll_read(context, &mut read))?;
        let count = read.filled().len();
        if count == 0 {
            let error = io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "a data file is shorter than its object says",
            );
            return Poll::Ready(Some(Err(error.into())));
        }
        *left -= count as u64;
        if *left == 0 {
            this.files.pop_front();
        }
        Poll::Ready(Some(Ok(this.buffer.split_to(count).freeze())))
    }
}

impl ByteStream for PieceStream {
    fn remaining_length(&self) -> RemainingLength {
        usize::try_from(self.files.iter().map(|(_, left)| left).sum::<u64>())
            .map_or_else(|_| RemainingLength::unknown(), RemainingLength::new_exact)
    }
}
