"""Settings of this package's tests: hypothesis without deadlines, and one computing thread."""

import torch
from hypothesis import settings

# No deadlines: a busy machine must not fail a test.
settings.register_profile("trainer-core", deadline=None)
settings.load_profile("trainer-core")

# The models are tiny. On a busy machine a second computing thread costs far more than it saves, because each
# operation waits until both threads have run.
torch.set_num_threads(1)
