"""Settings of this package's tests."""

from hypothesis import settings

# Time is not a property: a busy machine must not fail a test.
settings.register_profile("trainer-core", deadline=None)
settings.load_profile("trainer-core")
