"""Training methods for Hocket's trainer, each also a plain function."""
