"""Reading: the index, the order of samples, the cursor, the native engine, and single samples."""
