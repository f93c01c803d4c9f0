//! Deltas: checkpoints whose tensors are stored as the XOR of their bytes with those of another, the base.
//!
//! A delta names its base, a checkpoint in the same folder, which may be a delta too. A read goes through the chain
//! from the whole checkpoint at its end. A caller that holds the base's bytes applies one delta to them in place.

use std::sync::{Arc, PoisonError};

use super::stored::StoredTensor;
use super::{BoxRead, Checkpoint, locked};
use crate::error::{CkptError, Result};
use crate::manifest::tiling::TensorBox;
use crate::place::CheckpointPlace;
use crate::read::boxes::{BoxTarget, pieces};
use crate::workers::Interrupted;

/// The most deltas that one read goes through.
const MAX_CHAIN: usize = 1000;

/// Limit of the buffers that hold a batch of pieces, whatever the limit of the caller.
const MIN_BATCH_BYTES: u64 = 1 << 20;

/// A piece of a box, small enough for a batch.
struct Piece {
    /// Index of the box.
    number: usize,
    region: TensorBox,
    bytes: usize,
}

/// The boxes of a read with their destinations.
struct Targets<'a> {
    boxes: &'a [BoxRead<'a>],
    targets: Vec<BoxTarget>,
}

impl Checkpoint {
    /// Returns whether the tensors are stored as a difference from a base.
    #[must_use]
    pub fn is_delta(&self) -> bool {
        self.delta.is_some()
    }

    /// Opens the base of a delta, the base of that one, and so on; does nothing for other checkpoints.
    ///
    /// # Errors
    /// `NotFound` if a base is gone or was replaced, `Corrupt` if it lacks a tensor of the delta or has it with another
    /// dtype or shape, and errors of the disk or the store.
    pub fn open_bases(&self, interrupted: Interrupted<'_>) -> Result<()> {
        self.bases(interrupted).map(drop)
    }

    /// Returns the bases, the nearest first.
    fn bases(&self, interrupted: Interrupted<'_>) -> Result<Arc<Vec<Self>>> {
        if let Some(bases) = &*locked(&self.bases) {
            return Ok(Arc::clone(bases));
        }
        let mut bases: Vec<Self> = Vec::new();
        loop {
            let above = bases.last().unwrap_or(self);
            if above.delta.is_none() {
                break;
            }
            if bases.len() == MAX_CHAIN {
                let reason = format!("it is at the end of more than {MAX_CHAIN} deltas");
                return Err(CkptError::bad_manifest(self.place.uri(), reason));
            }
            let base = above.open_base(interrupted)?;
            bases.push(base);
        }
        let bases = Arc::new(bases);
        *self.bases.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&bases));
        Ok(bases)
    }

    /// Opens the base and compares its tensors.
    fn open_base(&self, interrupted: Interrupted<'_>) -> Result<Self> {
        let uri = self.place.uri();
        let Some(delta) = &self.delta else {
            return Err(CkptError::Invalid(format!("`{uri}` is not a delta")));
        };
        let gone = |what: &str| {
            let reason = format!(
                "it is a delta to `{}` (save `{}`), which {what}. Read a newer whole version",
                delta.base, delta.save_id
            );
            CkptError::not_found(uri, reason)
        };
        let place = CheckpointPlace::open(&sibling(uri, &delta.base))?;
        let base = match Self::open(place.uri(), interrupted) {
            Err(CkptError::NotFound { .. } | CkptError::Partial { .. }) => {
                return Err(gone("was removed"));
            }
            other => other?,
        };
        if base.save_id != delta.save_id {
            return Err(gone("was replaced by another save"));
        }
        for tensor in self.tensors.iter() {
            let below = base.tensors.owner_of(tensor.name());
            let fits = below
                .is_ok_and(|below| (below.dtype, &below.shape) == (tensor.dtype, &tensor.shape));
            if !fits {
                let reason = format!(
                    "`{}` is {} of shape {:?}, and its base `{}` has no such tensor",
                    tensor.name(),
                    tensor.dtype.name(),
                    tensor.shape,
                    delta.base
                );
                return Err(CkptError::bad_manifest(uri, reason));
            }
        }
        Ok(base)
    }

    /// Reads boxes through the chain of bases, in batches of at most `scratch_bytes`.
    pub(super) fn read_chain(
        &self,
        boxes: &[BoxRead<'_>],
        check: bool,
        scratch_bytes: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let bases = self.bases(interrupted)?;
        let targets = self.targets(boxes)?;
        targets.in_batches(scratch_bytes, |pieces, bytes| {
            let (mut sum, mut step) = (vec![0_u8; bytes], vec![0_u8; bytes]);
            let chain = bases.iter().rev().chain(std::iter::once(self));
            for (number, checkpoint) in chain.enumerate() {
                let into = if number == 0 { &mut sum } else { &mut step };
                checkpoint.read_pieces(&targets, pieces, into, check, interrupted)?;
                if number > 0 {
                    xor(&mut sum, &step);
                }
            }
            targets.put(pieces, &sum);
            Ok(())
        })
    }

    /// Applies a delta to boxes that hold the base's bytes. [`Checkpoint::check_boxes`] verifies beforehand all that is
    /// read.
    ///
    /// # Errors
    /// `Invalid` if the checkpoint is not a delta; otherwise as `read_boxes`. After any other error than `Invalid` the
    /// boxes hold neither version.
    pub fn apply_delta(
        &self,
        boxes: &[BoxRead<'_>],
        scratch_bytes: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        if self.delta.is_none() {
            return Err(CkptError::Invalid(format!(
                "`{}` is not a delta",
                self.place.uri()
            )));
        }
        let targets = self.targets(boxes)?;
        targets.in_batches(scratch_bytes, |pieces, bytes| {
            let (mut sum, mut step) = (vec![0_u8; bytes], vec![0_u8; bytes]);
            self.read_pieces(&targets, pieces, &mut step, true, interrupted)?;
            targets.get(pieces, &mut sum);
            xor(&mut sum, &step);
            targets.put(pieces, &sum);
            Ok(())
        })
    }

    /// Reads boxes, verifies their blocks, and drops what was read; with `with_bases`, also what the bases of a delta
    /// hold.
    ///
    /// # Errors
    /// As `read_boxes`.
    pub fn check_boxes(
        &self,
        boxes: &[BoxRead<'_>],
        with_bases: bool,
        scratch_bytes: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let bases = if with_bases {
            self.bases(interrupted)?
        } else {
            Arc::default()
        };
        let targets = self.targets(boxes)?;
        targets.in_batches(scratch_bytes, |pieces, bytes| {
            let mut scratch = vec![0_u8; bytes];
            for checkpoint in bases.iter().chain(std::iter::once(self)) {
                checkpoint.read_pieces(&targets, pieces, &mut scratch, true, interrupted)?;
            }
            Ok(())
        })
    }

    fn targets<'a>(&self, boxes: &'a [BoxRead<'a>]) -> Result<Targets<'a>> {
        let targets = boxes.iter().map(|one| {
            let owner: &StoredTensor = self.tensors.owner_of(one.tensor)?;
            one.target(owner)
        });
        Ok(Targets {
            targets: targets.collect::<Result<_>>()?,
            boxes,
        })
    }

    /// Reads this checkpoint's own bytes of some pieces, one after the other.
    fn read_pieces(
        &self,
        targets: &Targets<'_>,
        pieces: &[Piece],
        into: &mut [u8],
        check: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let mut reads = Vec::with_capacity(pieces.len());
        let mut rest = into;
        for piece in pieces {
            let (part, behind) = rest.split_at_mut(piece.bytes);
            rest = behind;
            let tensor = targets.boxes[piece.number].tensor;
            let (start, size) = (piece.region.start.clone(), piece.region.size.clone());
            // SAFETY: the parts do not overlap, and have the pieces' sizes: dtypes are those of the base.
            reads.push(unsafe {
                BoxRead::new(tensor, start, size, part.as_mut_ptr() as usize, None)
            });
        }
        self.read_own(&reads, check, MIN_BATCH_BYTES, interrupted)
    }
}

impl Targets<'_> {
    /// Calls `run` with pieces of the boxes and their size together, at most `limit` bytes at a time.
    fn in_batches(
        &self,
        limit: u64,
        mut run: impl FnMut(&[Piece], usize) -> Result<()>,
    ) -> Result<()> {
        // There are two buffers, and what is read of a compressed block.
        let limit = (limit / 4).max(MIN_BATCH_BYTES);
        let (mut batch, mut total) = (Vec::new(), 0);
        for (number, target) in self.targets.iter().enumerate() {
            let region = target.region();
            for (start, size) in pieces(&region.size, (limit / target.item_bytes()).max(1)) {
                let bytes = (size.iter().product::<u64>() * target.item_bytes()) as usize;
                if total + bytes > limit as usize && !batch.is_empty() {
                    run(&batch, total)?;
                    (batch, total) = (Vec::new(), 0);
                }
                let start = start.iter().zip(&region.start).map(|(a, b)| a + b);
                let region = TensorBox {
                    start: start.collect(),
                    size,
                };
                batch.push(Piece {
                    number,
                    region,
                    bytes,
                });
                total += bytes;
            }
        }
        if batch.is_empty() {
            return Ok(());
        }
        run(&batch, total)
    }

    /// Copies pieces to their destinations.
    fn put(&self, pieces: &[Piece], bytes: &[u8]) {
        let mut rest = bytes;
        for piece in pieces {
            let (part, behind) = rest.split_at(piece.bytes);
            self.targets[piece.number].copy_from(part, &piece.region);
            rest = behind;
        }
    }

    /// Copies the pieces' present bytes out of their destinations.
    fn get(&self, pieces: &[Piece], bytes: &mut [u8]) {
        let mut rest = bytes;
        for piece in pieces {
            let (part, behind) = rest.split_at_mut(piece.bytes);
            self.targets[piece.number].copy_to(part, &piece.region);
            rest = behind;
        }
    }
}

fn xor(sum: &mut [u8], step: &[u8]) {
    for (sum, step) in sum.iter_mut().zip(step) {
        *sum ^= step;
    }
}

/// Returns the URI of a checkpoint beside another one.
fn sibling(uri: &str, name: &str) -> String {
    let uri = uri.trim_end_matches('/');
    let absolute = if uri.contains("://") {
        uri.to_owned()
    } else {
        // `.` and a plain name have no folder in their text.
        std::path::absolute(uri).map_or_else(
            |_| uri.to_owned(),
            |path| path.to_string_lossy().into_owned(),
        )
    };
    let folder = absolute.rsplit_once('/').map_or("", |(folder, _)| folder);
    format!("{folder}/{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sibling_is_in_the_same_folder() {
        assert_eq!(sibling("/a/b/step-5", "step-4"), "/a/b/step-4");
        assert_eq!(
            sibling("s3://bucket/w/step-5/", "step-4"),
            "s3://bucket/w/step-4"
        );
        assert!(sibling("step-5", "step-4").ends_with("/step-4"));
    }
}
