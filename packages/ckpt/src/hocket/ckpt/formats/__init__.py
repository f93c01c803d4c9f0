"""Foreign checkpoint formats: listing, ranged reads and writing, without torch."""
