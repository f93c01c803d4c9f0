//! Checkpoints for Hocket: manifest, chunk planning, safetensors, durable and conditional writes, checked reads.
