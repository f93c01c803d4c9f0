"""Public names of other libraries over Hocket's packages: those of Composer and of mosaicml-streaming."""
