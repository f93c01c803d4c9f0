"""FSDP2 layouts, gradient synchronisation and the launcher for Hocket's trainer."""
