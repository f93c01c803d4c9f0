"""Encodings of columns: from values to bytes, and from the bytes of a batch to values.

A column's encoding is its string in the index: `bytes`, `str`, `int`, a NumPy scalar type such as `uint16`;
`ndarray`, `ndarray:<dtype>`, `ndarray:<dtype>:<shape>`; `str_int`, `str_float`, `str_decimal`; `json`, `pkl`;
and, with Pillow, `pil`, `jpeg`, `png`, lists of these (`list[jpeg]`) and `jpeg_array`. Numbers are
little-endian.
"""

from hocket.native.arguments import check_arguments
from hocket.stream.encodings.base import Column, Encoding
from hocket.stream.encodings.resolve import check_width, resolve_encoding
from hocket.stream.encodings.sample import SampleEncoder

__all__ = ["Column", "Encoding", "SampleEncoder", "check_width", "resolve_encoding"]

check_arguments([SampleEncoder])
