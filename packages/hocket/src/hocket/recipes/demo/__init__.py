"""`hocket demo`: train, stream, checkpoint, kill a job in a save, resume it elsewhere, and compare."""

from hocket.recipes.demo.run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
