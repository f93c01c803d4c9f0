"""Writing: writers of each format, their output location and progress, and merging under one index."""
