"""Weights that the first and the last stage share, as an embedding and a head that are tied.

Both stages have the parameter, and both update it: their gradients are added up, so that equal values stay
equal. Checkpoints and the norm of all gradients take that of the first stage.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hocket.dist.errors import OptimizerError
from hocket.dist.ranks.process_group import RankGroup


class TiedWeights:
    """The tied weights of a rank, and the rank of the other stage that has them.

    Args:
        parameters: The weights, laid out; in the same order on both ranks.
        ranks: Both ranks, in the order of their stages.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: RankGroup) -> None:
        self._parameters, self._ranks = parameters, ranks

    @property
    def repeated(self) -> Sequence[nn.Parameter]:
        """The weights that the rank of the first stage counts in norms, and this one does not."""
        return self._parameters if self._ranks.index else ()

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Replace the gradients of both stages by their sum, alike in every bit. Collective over both ranks.

        A weight that no stage used has no gradient afterwards.
        """
        trained = [one for one in self._parameters if one.requires_grad]
        is_used = torch.tensor([one.grad is not None for one in trained], dtype=torch.float64, device="cpu")
        used = self._ranks.reduce_async(is_used).wait().tolist()
        for parameter, count in zip(trained, used, strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # the head's is dense, and so is the sum
            local = _local(parameter.grad)
            total = local.contiguous()
            dist.all_reduce(total, group=self._ranks.on_device)
            if total is not local:
                local.copy_(total)

    def are_alike(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether both ranks have the same weights and their states, in every bit. Collective."""
        own = [
            [_digest(one), *(_slots(optimizer.state.get(one, {})) for optimizer in optimizers)]
            for one in self._parameters
        ]
        first, second = self._ranks.gather_objects(own)
        return bool(first == second)


class TieCheck:
    """A check after some updates that both stages still have the same tied weights.

    They have not with an optimizer that updates a parameter by others of its stage, too, such as one with a
    rate for all parameters that it finds itself, or where devices of two kinds round products of matrices
    in two ways, as those of Muon. The check follows the updates 1, 2, 4, 8 and so on.

    Args:
        ties: For each later name of a tied weight its first name.
        tied: The tied weights of this rank; None if it has none, and only takes part.
        add_up: Sums a CPU tensor over all ranks of the job. Collective.
    """

    def __init__(
        self,
        ties: Mapping[str, str],
        tied: TiedWeights | None,
        add_up: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._ties, self._tied, self._add_up = ties, tied, add_up
        self._optimizers: Sequence[Optimizer] = ()
        self._num_updates = 0

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Check after steps of the last one of the optimizers."""
        self._optimizers = optimizers
        optimizers[-1].register_step_post_hook(self._run)

    @torch.no_grad()
    def _run(self, *_: object) -> None:
        self._num_updates += 1
        if self._num_updates & (self._num_updates - 1):
            return
        is_alike = self._tied is None or self._tied.are_alike(self._optimizers)
        flag = torch.tensor([float(not is_alike)], dtype=torch.float64, device="cpu")
        if not self._add_up(flag).item():
            return
        later, first = next(iter(self._ties.items()))
        kinds = ", ".join(f"`{type(one).__name__}`" for one in self._optimizers)
        raise OptimizerError(
            f"`{first}` and `{later}` are one tied weight on two stages of `pp`, which {kinds} updated in "
            f"different ways in the {self._num_updates} updates so far. Use an optimizer that updates each "
            "parameter by its own gradient and state, such as AdamW, and devices of one kind for both "
            "stages, untie them, or leave `pp` out"
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _slots(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the state of a parameter with digests in place of tensors, by name."""
    return sorted(
        (str(slot), _digest(value) if isinstance(value, torch.Tensor) else repr(value))
        for slot, value in state.items()
    )


def _digest(tensor: torch.Tensor) -> int:
    """Return a number that depends on each bit and its place, and not on the order of a sum."""
    local = _local(tensor.detach())
    local = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
    bits = local.contiguous().flatten().view(_INTEGERS[local.dtype.itemsize])
    total = 0
    for part in torch.split(bits, _PART):
        places = torch.arange(1, 2 * part.numel() + 1, 2, device=part.device)
        total = 31 * total + int(part.long().mul_(places).sum())
    return total


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**22
"""Numbers of a tensor that are looked at together, which take 16 bytes each."""
