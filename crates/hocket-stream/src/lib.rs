//! Shards of training data for Hocket: format, index, order, cache, prefetch, decoding.
