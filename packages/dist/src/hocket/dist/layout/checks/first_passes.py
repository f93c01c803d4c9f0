"""The forward passes in which a layout compares what it computes with what one process computes."""

_LAST = 1024


class FirstPasses:
    """The first, second, fourth pass and so on, until `end` is called, or to the 1,024th.

    One comparison is enough, but where outputs are 0, as some initialisers have them, it shows nothing before
    the first update, which may come after many microbatches.
    """

    def __init__(self) -> None:
        self._number = 0

    def is_due(self) -> bool:
        """Return whether to compare in this pass, and count it."""
        if self._number >= _LAST:
            return False
        self._number += 1
        return self._number & (self._number - 1) == 0

    @property
    def has_ended(self) -> bool:
        """Whether no pass is due any more."""
        return self._number >= _LAST

    def end(self) -> None:
        """Compare no more."""
        self._number = _LAST
