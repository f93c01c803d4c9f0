"""Settings of this package's tests."""

import torch
from hypothesis import settings

# Time is not a property: a busy machine must not fail a test.
settings.register_profile("trainer-core", deadline=None)
settings.load_profile("trainer-core")

# The models are tiny. On a busy machine a second computing thread costs far more than it saves, because each
# operation waits until both had their turn.
torch.set_num_threads(1)
