"""A schedule of the global batch size."""

from __future__ import annotations

from hocket.trainer.checks import Described
from hocket.trainer.errors import TimeValueError
from hocket.trainer.optim.schedulers import ScheduledState, elapsed, time_from_zero
from hocket.trainer.time import TimeInput


class BatchSizeWarmupScheduler(Described):
    """A global batch size that grows from `initial` to `final` over `t_warmup`, in equal steps.

    A pure function of training time, as the learning-rate schedules are. A loader, an algorithm or a callback
    calls it to get the size of the next batch.

    Args:
        initial: The number of samples in the first batch.
        final: The number of samples from `t_warmup` on.
        t_warmup: The length of the growth. Give it in `sp` or `tok`: a time in `ba` depends on the sizes.
        multiple_of: Every size is a multiple of this, such as ranks times microbatch size.

    Raises:
        TimeValueError: If sizes are not positive multiples of `multiple_of`, `final` is below `initial`, or
            `t_warmup` is negative.
    """

    def __init__(self, initial: int, final: int, *, t_warmup: TimeInput, multiple_of: int = 1) -> None:
        if multiple_of < 1:
            raise TimeValueError(f"`multiple_of` is {multiple_of}; expected at least 1")
        for name, size in (("initial", initial), ("final", final)):
            if size < 1 or size % multiple_of:
                raise TimeValueError(f"`{name}` is {size}; expected a positive multiple of {multiple_of}")
        if final < initial:
            raise TimeValueError(f"`final` ({final}) is below `initial` ({initial}); batch sizes only grow")
        self.initial = initial
        self.final = final
        self.t_warmup = time_from_zero("t_warmup", t_warmup)
        self.multiple_of = multiple_of

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> int:
        """Return the number of samples in the batch that starts at `state.timestamp`."""
        share = elapsed(state, self.t_warmup, ssr)
        num_steps = (self.final - self.initial) // self.multiple_of
        return self.initial + self.multiple_of * int(share * num_steps)
