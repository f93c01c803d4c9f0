"""The names of `streaming.base.converters`."""

from hocket.compat.streaming.base.converters.dataframe import dataframe_to_mds

__all__ = ["dataframe_to_mds"]
