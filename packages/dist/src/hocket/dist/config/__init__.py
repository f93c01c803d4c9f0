"""Configuration of a layout: FSDP, DeepSpeed and mesh axes, checked before any rank waits for another."""
