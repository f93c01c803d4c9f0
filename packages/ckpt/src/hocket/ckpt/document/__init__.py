"""The document of a checkpoint: manifest or table of contents, trees, values, dtypes, boxes, file names."""
