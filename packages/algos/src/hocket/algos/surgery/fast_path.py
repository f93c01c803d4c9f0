"""The fast path of torch's transformer encoders, which reads the weights of linear layers."""

from torch import nn


def leave_fast_path(model: nn.Module) -> None:
    """Have `nn.TransformerEncoderLayer`s whose linear layers were replaced call them in evaluation, too.

    In evaluation mode without gradients, such a layer computes with the weights of `linear1` and `linear2` in
    one kernel, instead of calling the two modules. A replacement may have no weight, or adapters beside it.

    Args:
        model: Its layers and encoders are changed in place; no parameters or names change.
    """
    replaced = set[nn.Module]()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not (
            type(module.linear1) is type(module.linear2) is nn.Linear
        ):
            module.activation_relu_or_gelu = 0  # torch's mark of a layer that has no fast path
            replaced.add(module)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not replaced.isdisjoint(module.layers):
            module.use_nested_tensor = False
