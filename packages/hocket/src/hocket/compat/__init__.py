"""Public names of other libraries over Hocket's packages.

- `composer`: those of Composer, in modules of its names
- `streaming`: those of mosaicml-streaming
"""
