"""The errors of `hocket.dist`, one class for each way of handling it.

```
DistError                  catch this for "the distributed part failed"
├── ConfigError            a setting is wrong: correct it (also a ValueError)
│   └── WrapError          the wrap policy fits no module, or cuts tied weights apart
├── WorldError             RANK, WORLD_SIZE or similar are missing or contradictory (also a ValueError)
├── ModelError             this model cannot be laid out as it is (also a ValueError)
├── WeightsError           files of weights do not fit the model (also a ValueError)
├── OptimizerError         an optimizer does not belong to the model (also a ValueError)
├── PreflightError         ranks differ in script, versions or data: correct the launch
├── AbsentRanksError       ranks did not appear in time: look at their logs (also a TimeoutError)
├── RankFailedError        a function on a rank raised: see its traceback
└── CollectiveError        an exchange between ranks failed or timed out
```
"""

from typing import ClassVar


class DistError(RuntimeError):
    """Root of the errors that `hocket.dist` raises.

    Attributes:
        code: The code of the class. It is the first note of an error, below the message in a traceback, and
            `hocket explain` prints its section of `errors.md`.
    """

    code: ClassVar[str] = "HKT-DI01"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"[{self.code}]")


class ConfigError(DistError, ValueError):
    """A setting is unknown, impossible, or cannot be honoured; the message names what to use instead."""

    code = "HKT-DI02"


class WrapError(ConfigError):
    """The wrap policy matches no module, or would separate parameters that are tied."""

    code = "HKT-DI03"


class WorldError(DistError, ValueError):
    """The environment lacks the rank or the world size of this process, or contradicts itself."""

    code = "HKT-DI04"


class ModelError(DistError, ValueError):
    """The model cannot be laid out as it is: parameters without values, or laid out already."""

    code = "HKT-DI05"


class WeightsError(DistError, ValueError):
    """Files of weights are absent, or lack a tensor of the model, or have one of another shape."""

    code = "HKT-DI06"


class PreflightError(DistError):
    """Ranks were started differently: other scripts, package versions or data."""

    code = "HKT-DI07"


class OptimizerError(DistError, ValueError):
    """An optimizer holds parameters that the model does not have."""

    code = "HKT-DI08"


class RankFailedError(DistError):
    """A function that was started on several ranks raised on one of them."""

    code = "HKT-DI09"


class AbsentRanksError(DistError, TimeoutError):
    """Some ranks did not appear before the deadline.

    Args:
        message: The failure and what to do.
        ranks: The ranks that did not appear, ascending.
    """

    code = "HKT-DI10"

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class CollectiveError(DistError):
    """An exchange between ranks failed or timed out; the cause is chained."""

    code = "HKT-DI11"
