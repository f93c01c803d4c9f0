"""The loss of a batch: its function, its parts, its weight, and how a model's output is read."""
