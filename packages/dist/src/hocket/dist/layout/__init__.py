"""The layout of a model over ranks: its shards or copies, their initial values, optimizer and gradients."""
