"""A load as each rank runs it: match with the manifest, byte ranges, and reads into tensors."""
