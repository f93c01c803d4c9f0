"""The order of mosaicml-streaming, so that runs started with it can be resumed."""

from hocket.native.arguments import check_arguments
from hocket.stream.mosaic.mosaic_order import MosaicOrder, choose_order
from hocket.stream.mosaic.sample_order import MosaicSampleOrder, MosaicSettings

__all__ = ["MosaicOrder", "MosaicSampleOrder", "MosaicSettings", "choose_order"]

check_arguments([MosaicSampleOrder, MosaicSettings])
