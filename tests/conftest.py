"""Tests across packages share the fixtures of `tests/support`."""

pytest_plugins = ["support.plugin"]
