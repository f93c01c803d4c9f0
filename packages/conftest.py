"""Every package's tests share the fixtures of `tests/support`."""

pytest_plugins = ["support.plugin"]
