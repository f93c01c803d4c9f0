"""Runs Composer's surgery on given models, in Composer's environment: `script cases.pt answers.pt`."""

import sys
import warnings

import peer_models
import torch
from composer import functional as F
from composer.algorithms.alibi.attention_surgery_functions.utils import _get_alibi_head_slopes, register_alibi
from composer.algorithms.gyro_dropout.gyro_dropout import GyroDropoutLayer
from composer.core import Precision
from composer.utils import module_surgery
from torch import nn


def _made(case):
    model = getattr(peer_models, case["model"])()
    model.load_state_dict(case["state"])
    return model


def surgery(case):
    model = _made(case)
    optimizer = peer_models.optimizer_of(model) if case.get("optimizer") else None
    model.load_state_dict(case["state"])
    options = {**case["options"], **({"optimizers": optimizer} if optimizer else {})}
    if case.get("precision"):
        options["precision"] = Precision(case["precision"])
    getattr(F, case["function"])(model, **options)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    groups = peer_models.groups_by_name(model, optimizer) if optimizer else None
    return {"state": state, "groups": groups, **peer_models.run(model, case["x"])}


def stochastic_depth(case):
    model = _made(case)
    kept = iter(case["kept"])
    torch.bernoulli = lambda probability: torch.tensor(float(next(kept)))
    F.apply_stochastic_depth(model, "ResNetBottleneck", "block", **case["options"])
    rates = [float(block.drop_rate) for block in model]
    return {"rates": rates, **peer_models.run(model, case["x"])}


def gated(case):
    model = _made(case)
    F.apply_gated_linear_units(model, optimizers=[], **case["options"])
    with torch.no_grad():
        return {"state": model.state_dict(), "eval": model.eval()(case["x"]).logits}


def slopes(case):
    return [torch.tensor(_get_alibi_head_slopes(count)) for count in case["counts"]]


def bias(case):
    return register_alibi(nn.Linear(1, 1), case["heads"], case["length"], causal=False).alibi[0]


def freeze(case):
    answers = []
    for options in case["options"]:
        model = peer_models.Convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = F.freeze_layers(model, optimizer, **options)
        answers.append((found, [value.requires_grad for value in model.parameters()]))
    return answers


def periods(case):
    found = []
    for iters, epochs, sigma, tau in case["settings"]:
        layer = GyroDropoutLayer(iters, epochs, 0.5, sigma, tau)
        try:
            layer(torch.ones(tau, 3))
        except ZeroDivisionError:
            assert layer.iter_num == 0
        found.append(layer.iter_num)
    return found


def replaced(case):
    model = _made(case)
    optimizer = peer_models.optimizer_of(model, 2)
    names = {module: name for name, module in model.named_modules()}
    seen = []

    def swap(module, index):
        seen.append((names[module], index))
        made = nn.Linear(module.in_features, module.out_features, bias=index > 0)
        return made if index < 1 else None

    pairs = module_surgery.replace_module_classes(model, {nn.Linear: swap}, optimizers=None)
    for old, new in pairs.items():
        # Composer requires all removed parameters in one group, so one kind is replaced after the other.
        module_surgery.update_params_in_optimizer([old.weight], [new.weight], optimizer)
        module_surgery.update_params_in_optimizer([old.bias], [], optimizer)
    counts = [module_surgery.count_module_instances(model, kind) for kind in (nn.Linear, nn.Conv2d)]
    groups, _ = peer_models.groups_by_name(model, optimizer)
    return seen, [names[old] for old in pairs], counts, groups


def channels_last(case):
    model = _made(case)
    F.apply_channels_last(model)
    return {name: value.stride() for name, value in model.named_parameters()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    cases = torch.load(sys.argv[1], weights_only=False)
    torch.save([globals()[case["call"]](case) for case in cases], sys.argv[2])
