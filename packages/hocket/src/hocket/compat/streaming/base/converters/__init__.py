"""The names of `streaming.base.converters`."""

from hocket.compat.streaming.base.converters.dataframe import dataframe_to_mds, dataframeToMDS

__all__ = ["dataframeToMDS", "dataframe_to_mds"]
