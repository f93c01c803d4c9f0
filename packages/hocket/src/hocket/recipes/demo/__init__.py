"""`hocket demo`: train, stream, checkpoint, be killed in a save, carry on elsewhere, and compare."""

from hocket.recipes.demo.run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
