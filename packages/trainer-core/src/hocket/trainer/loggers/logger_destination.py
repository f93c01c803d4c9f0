"""`LoggerDestination`: the base of everything that receives what a run logs."""

from __future__ import annotations

from hocket.trainer.callback import Callback
from hocket.trainer.log.destination import Destination


class LoggerDestination(Destination, Callback):
    """A file, a console or a tracking service that receives what the run logs.

    A destination is also a callback and receives every event on the training thread. Its `log_*` methods and
    `upload_file` run on a thread of its own, in the order of the calls, so a slow destination does not slow
    the training. A destination that is far too slow loses points of single steps (see `LogQueue`). Calls
    still arrive after `close`; release files and connections in `post_close`, which runs when all calls have
    arrived.

    Every method has an empty default: a destination overrides what it can show. `Destination` has those that
    receive points, tables, images and files, and `Callback` those of the events.

    Attributes:
        saves_rank_zero_state: Checkpoints hold rank 0's `state_dict`, which the other ranks need not share.
    """

    saves_rank_zero_state: bool = True
