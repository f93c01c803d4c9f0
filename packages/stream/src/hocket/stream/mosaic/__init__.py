"""The order that mosaicml-streaming gives a run, so that a run begun there can be finished here."""

from hocket.stream.mosaic.plan import MosaicPlan, MosaicSettings

__all__ = ["MosaicPlan", "MosaicSettings"]
