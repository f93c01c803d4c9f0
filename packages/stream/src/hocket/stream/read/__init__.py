"""Reading: the index, the order of samples, the cursor, the reader of batches, and single samples."""
