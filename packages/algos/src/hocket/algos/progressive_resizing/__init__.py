"""Progressive resizing: small images first, full size in the end."""

from hocket.algos.progressive_resizing.progressive_resizing import ProgressiveResizing, resize_batch

__all__ = ["ProgressiveResizing", "resize_batch"]
