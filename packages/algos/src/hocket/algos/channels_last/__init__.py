"""Channels-last memory format."""

from hocket.algos.channels_last.channels_last import ChannelsLast, apply_channels_last

__all__ = ["ChannelsLast", "apply_channels_last"]
