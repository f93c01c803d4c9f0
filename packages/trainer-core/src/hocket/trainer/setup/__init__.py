"""The way from the arguments of `Trainer` to the parts of a run."""
