"""The order of mosaicml-streaming, so that runs started with it can be resumed."""

from hocket.stream.mosaic.plan import MosaicPlan, MosaicSettings

__all__ = ["MosaicPlan", "MosaicSettings"]
