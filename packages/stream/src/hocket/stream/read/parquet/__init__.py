"""Folders of Parquet files as data sets: the files, the encodings of columns, an index of row groups."""
