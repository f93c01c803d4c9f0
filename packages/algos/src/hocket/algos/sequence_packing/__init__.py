"""Sequence packing: several short sequences in one row, instead of padding."""

from hocket.algos.sequence_packing.sequence_packing import PackingCollator, SequencePacking, pack_sequences

__all__ = ["PackingCollator", "SequencePacking", "pack_sequences"]
