//! Compression of shard files: five codecs, by their names in the index.
//!
//! A shard is compressed whole. Unpacking has two bounds: output never exceeds the size in the index, and
//! memory is allocated as output arrives, not by the size that a header declares.

use std::fmt;
use std::io::{self, Read, Write};

use hocket_store::Interrupted;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use crate::error::{Result, StreamError};

/// Initial output capacity per packed byte; more is allocated when needed.
const FIRST_RATIO: usize = 16;

/// Largest expansion of a snappy element: a 3-byte copy produces 64 bytes.
const MOST_SNAPPY_RATIO: usize = 22;

/// A codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Brotli, levels 0 to 11.
    Brotli,
    /// bzip2, levels 1 to 9.
    Bzip2,
    /// gzip, levels 0 to 9.
    Gzip,
    /// Raw snappy blocks; no levels.
    Snappy,
    /// Zstandard, levels 1 to 22.
    Zstd,
}

/// The lowest level, the highest, and the default.
type Levels = (u32, u32, u32);

/// Name (also the file extension), codec, and levels.
const CODECS: [(&str, Codec, Option<Levels>); 5] = [
    ("br", Codec::Brotli, Some((0, 11, 11))),
    ("bz2", Codec::Bzip2, Some((1, 9, 9))),
    ("gz", Codec::Gzip, Some((0, 9, 9))),
    ("snappy", Codec::Snappy, None),
    ("zstd", Codec::Zstd, Some((1, 22, 3))),
];

/// A codec and its level, such as `zstd:7`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Compression {
    codec: Codec,
    name: &'static str,
    level: u32,
}

impl Compression {
    /// Parses a name, or a name and a level, from an index or an argument.
    ///
    /// # Errors
    /// [`StreamError::Config`] for any other text, listing the supported names.
    pub fn parse(text: &str) -> Result<Self> {
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name, Some(level)),
            None => (text, None),
        };
        let found = CODECS.iter().find(|(known, ..)| *known == name);
        let parsed = found.and_then(|&(name, codec, levels)| {
            let level = match (level, levels) {
                (None, levels) => levels.map_or(0, |(_, _, default)| default),
                (Some(_), None) => return None,
                (Some(text), Some((least, most, _))) => text
                    .parse()
                    .ok()
                    .filter(|level| (least..=most).contains(level) && !text.starts_with('+'))?,
            };
            Some(Self { codec, name, level })
        });
        parsed.ok_or_else(|| {
            StreamError::config(format!(
                "compression `{text}` is not supported: expected `br:0` to `br:11`, `bz2:1` to `bz2:9`, `gz:0` to `gz:9`, `snappy`, or `zstd:1` to `zstd:22`; the level may be left out"
            ))
        })
    }

    /// Returns the extension of a compressed file's name, without a dot.
    pub fn extension(self) -> &'static str {
        self.name
    }

    /// Returns `raw` compressed. Checks for an interrupt about once per mebibyte.
    ///
    /// # Errors
    /// [`StreamError::Closed`] if interrupted; [`StreamError::Config`] if the codec fails, for example for
    /// lack of memory.
    pub fn pack(self, raw: &[u8], interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
        let packed = self.try_pack(raw, interrupted);
        packed.map_err(|error| match interrupted() {
            true => StreamError::Closed,
            false => StreamError::config(format!(
                "{self} could not compress {} bytes: {error}",
                raw.len()
            )),
        })
    }

    fn try_pack(self, raw: &[u8], interrupted: Interrupted<'_>) -> io::Result<Vec<u8>> {
        match self.codec {
            Codec::Brotli => {
                let params = brotli::enc::BrotliEncoderParams {
                    quality: self.level as i32,
                    size_hint: raw.len(),
                    ..Default::default()
                };
                let encoder = brotli::CompressorWriter::with_params(Vec::new(), 1 << 16, &params);
                Ok(feed(encoder, raw, interrupted)?.into_inner())
            }
            Codec::Bzip2 => {
                let level = bzip2::Compression::new(self.level);
                feed(
                    bzip2::write::BzEncoder::new(Vec::new(), level),
                    raw,
                    interrupted,
                )?
                .finish()
            }
            Codec::Gzip => {
                let level = flate2::Compression::new(self.level);
                feed(
                    flate2::write::GzEncoder::new(Vec::new(), level),
                    raw,
                    interrupted,
                )?
                .finish()
            }
            Codec::Snappy => Ok(snap::raw::Encoder::new().compress_vec(raw)?),
            Codec::Zstd => {
                let mut encoder = zstd::Encoder::new(Vec::new(), self.level as i32)?;
                encoder.set_pledged_src_size(Some(raw.len() as u64))?;
                feed(encoder, raw, interrupted)?.finish()
            }
        }
    }

    /// Returns the `raw_bytes` bytes that `packed` decompresses to.
    ///
    /// # Errors
    /// A text that describes the problem: invalid data, or more or fewer bytes than that.
    pub fn unpack(self, packed: &[u8], raw_bytes: u64) -> std::result::Result<Vec<u8>, String> {
        let size = usize::try_from(raw_bytes).map_err(|error| error.to_string())?;
        let raw = match self.codec {
            Codec::Brotli => read_bounded(brotli::Decompressor::new(packed, 1 << 16), packed, size),
            Codec::Bzip2 => read_bounded(bzip2::read::MultiBzDecoder::new(packed), packed, size),
            Codec::Gzip => read_bounded(flate2::read::MultiGzDecoder::new(packed), packed, size),
            Codec::Snappy => unpack_snappy(packed, size),
            Codec::Zstd => unpack_zstd(packed, size),
        };
        let raw = raw.map_err(|error| format!("bytes that do not decompress ({error})"))?;
        match raw.len() {
            len if len > size => Err(format!("bytes that decompress to more than {size}")),
            len if len < size => Err(format!("bytes that decompress to {len}")),
            _ => Ok(raw),
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codec {
            Codec::Snappy => write!(formatter, "{}", self.name),
            _ => write!(formatter, "{}:{}", self.name, self.level),
        }
    }
}

fn feed<W: Write>(mut encoder: W, raw: &[u8], interrupted: Interrupted<'_>) -> io::Result<W> {
    for piece in raw.chunks(1 << 20) {
        if interrupted() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        encoder.write_all(piece)?;
    }
    Ok(encoder)
}

/// Returns the initial output capacity: at most the size in the index, and at most what the packed bytes make
/// likely.
fn first_room(packed: &[u8], size: usize) -> usize {
    size.min(packed.len().saturating_mul(FIRST_RATIO).max(1 << 16))
}

/// Reads the output of a decoder, up to one byte beyond `size`, which shows that there is too much.
fn read_bounded(decoder: impl Read, packed: &[u8], size: usize) -> io::Result<Vec<u8>> {
    let mut raw = Vec::with_capacity(first_room(packed, size) + 1);
    decoder.take(size as u64 + 1).read_to_end(&mut raw)?;
    Ok(raw)
}

fn unpack_snappy(packed: &[u8], size: usize) -> io::Result<Vec<u8>> {
    let stated = snap::raw::decompress_len(packed)?;
    if stated != size || stated > packed.len().saturating_mul(MOST_SNAPPY_RATIO) {
        return Err(io::Error::other(format!(
            "its header states {stated} bytes"
        )));
    }
    Ok(snap::raw::Decoder::new().decompress_vec(packed)?)
}

/// Decompresses all frames of `packed`, in one pass if the initial capacity suffices.
fn unpack_zstd(packed: &[u8], size: usize) -> io::Result<Vec<u8>> {
    let mut decoder = Decoder::new()?;
    // A frame made in one call has a window as large as its content.
    let window_log = size.next_power_of_two().ilog2().clamp(27, 31);
    decoder.set_parameter(DParameter::WindowLogMax(window_log))?;
    let mut raw = Vec::with_capacity(first_room(packed, size) + 1);
    let mut input = InBuffer::around(packed);
    loop {
        let filled = raw.len();
        let mut output = OutBuffer::around_pos(&mut raw, filled);
        let missing = decoder.run(&mut input, &mut output)?;
        let is_read = input.pos() == packed.len();
        if (missing == 0 && is_read) || raw.len() > size {
            return Ok(raw);
        }
        if raw.len() == raw.capacity() {
            raw.reserve_exact(raw.len().clamp(1, size + 1 - raw.len()));
        } else if is_read {
            return Err(io::Error::other("the last frame is truncated"));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use proptest::prelude::*;

    const ALL: [&str; 12] = [
        "br", "br:0", "br:5", "bz2", "bz2:1", "gz", "gz:0", "gz:1", "snappy", "zstd", "zstd:1",
        "zstd:22",
    ];

    fn parse(text: &str) -> Compression {
        Compression::parse(text).unwrap()
    }

    fn pack(text: &str, raw: &[u8]) -> Vec<u8> {
        parse(text).pack(raw, &|| false).unwrap()
    }

    #[test]
    fn codecs_are_parsed_by_name_and_level() {
        for (text, shown, extension) in [
            ("br", "br:11", "br"),
            ("bz2:1", "bz2:1", "bz2"),
            ("gz", "gz:9", "gz"),
            ("snappy", "snappy", "snappy"),
            ("zstd", "zstd:3", "zstd"),
        ] {
            assert_eq!(parse(text).to_string(), shown);
            assert_eq!(parse(text).extension(), extension);
        }
        for text in [
            "", "lz4", "zstd:0", "zstd:23", "zstd:", "zstd:-1", "zstd:+3", "br:12", "bz2:0",
            "gz:10", "snappy:1",
        ] {
            let message = Compression::parse(text).unwrap_err().to_string();
            assert!(message.contains(&format!("`{text}`")), "{message}");
        }
    }

    /// A decompression bomb, a thousand times larger than its packed bytes and than the size in the index.
    #[test]
    fn decompression_stops_at_the_size_in_the_index() {
        let raw = vec![0; 8 << 20];
        for text in ALL {
            let packed = pack(text, &raw);
            for stated in [
                0,
                1,
                1000,
                raw.len() as u64 - 1,
                raw.len() as u64 + 1,
                1 << 31,
            ] {
                let reason = parse(text).unpack(&packed, stated).unwrap_err();
                assert!(reason.contains("decompress"), "{text} {stated}: {reason}");
            }
            assert!(
                parse(text).unpack(&packed, raw.len() as u64).unwrap() == raw,
                "{text}"
            );
        }
    }

    #[test]
    fn several_consecutive_frames_are_one_file() {
        for text in ["bz2", "gz", "zstd"] {
            let packed: Vec<u8> = [&b"one"[..], b"", b"two"]
                .iter()
                .flat_map(|part| pack(text, part))
                .collect();
            assert_eq!(parse(text).unpack(&packed, 6).unwrap(), b"onetwo", "{text}");
        }
    }

    proptest! {
        #[test]
        fn compressed_bytes_decompress_to_the_original(raw in prop::collection::vec(0u8..4, 0..3000), which in 0..ALL.len()) {
            let compression = parse(ALL[which]);
            let packed = pack(ALL[which], &raw);
            prop_assert_eq!(compression.unpack(&packed, raw.len() as u64).unwrap(), raw);
        }

        #[test]
        fn a_truncated_file_is_an_error(raw in prop::collection::vec(0u8..4, 1..3000), which in 0..ALL.len(), cut in 0.0..1.0f64) {
            let compression = parse(ALL[which]);
            let packed = pack(ALL[which], &raw);
            let kept = (packed.len() as f64 * cut) as usize;
            if let Ok(found) = compression.unpack(&packed[..kept], raw.len() as u64) {
                // A codec may end with bytes that carry no data; without them nothing is missing.
                prop_assert_eq!(found, raw);
            }
        }
    }
}
