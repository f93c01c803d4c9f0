"""Other libraries' public names over Hocket's packages: mosaicml-streaming's in `hocket.compat.streaming`."""
