"""What training methods complain about.

```
AlgorithmError               catch this for "a training method cannot do what was asked"
├── AlgorithmConfigError     an argument is wrong: correct it (also a ValueError)
└── IncompatibleError        the method and this model, layout or batch do not go together (also a TypeError)
```
"""


class AlgorithmError(Exception):
    """Root of every error that `hocket.algos` raises on purpose."""


class AlgorithmConfigError(AlgorithmError, ValueError):
    """An argument of a training method cannot be what was meant; correct it."""


class IncompatibleError(AlgorithmError, TypeError):
    """A training method and this model, layout or batch do not go together; the message says what would."""
