"""Runs Composer's functions on given inputs, in Composer's environment: `script cases.pt answers.pt`."""

import itertools
import sys
import types

import numpy as np
import torch
from composer import functional as F
from composer.algorithms import EMA
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from composer.algorithms.sam.sam import SAMOptimizer
from composer.algorithms.utils import augmentation_primitives
from PIL import Image


def mixup(case):
    return F.mixup_batch(case["x"], case["y"], mixing=case["mixing"], indices=case["indices"])


def cutmix(case):
    mixed, target, share, _ = F.cutmix_batch(
        case["x"].clone(), case["y"], bbox=tuple(case["bbox"]), indices=case["indices"]
    )
    return mixed, target, float(share)


def cutout(case):
    places = iter(case["places"])
    np.random.randint = lambda *args, **options: next(places)
    return F.cutout_batch(case["x"], num_holes=len(case["places"]) // 2, length=case["length"])


def colout(case):
    torch.manual_seed(case["seed"])
    return F.colout_batch((case["x"], case["y"]), p_row=case["p_row"], p_col=case["p_col"])


def resize(case):
    torch.manual_seed(case["seed"])
    return F.resize_batch(case["x"], case["y"], case["scale"], case["mode"], resize_targets=case["targets"])


def _losses_of_rows(outputs, target, reduction="none"):
    return (outputs - target).square().flatten(1).mean(1)


def select(case):
    seen = {}

    def choice(size, num, replace, p):
        seen.update(num=num, p=torch.from_numpy(p))
        return np.arange(size - num, size)

    np.random.choice = choice
    kept, _ = F.select_using_loss(case["x"], case["y"], lambda x: x, _losses_of_rows, keep=case["keep"])
    return kept, seen["num"], seen["p"]


def should_select(case):
    return [F.should_selective_backprop(**arguments) for arguments in case["arguments"]]


def length(case):
    batch = {name: value.clone() for name, value in case["batch"].items()}
    return F.set_batch_sequence_length(batch, case["length"], **case["options"])


def ema(case):
    model, averages = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    model.load_state_dict(case["model"])
    averages.load_state_dict(case["averages"])
    F.compute_ema(model, averages, smoothing=case["smoothing"])
    return dict(averages.state_dict())


def half_life(case):
    return [EMA(half_life=one, update_interval=every).smoothing for one, every in case["arguments"]]


def clip(case):
    parameters = [torch.nn.Parameter(weight.clone()) for weight in case["weights"]]
    for parameter, gradient in zip(parameters, case["gradients"], strict=True):
        parameter.grad = gradient.clone()
    model = types.SimpleNamespace(parameters=lambda: parameters)
    apply_gradient_clipping(model, case["type"], case["threshold"], fsdp_enabled=False)
    return [parameter.grad for parameter in parameters]


def smooth(case):
    return F.smooth_labels(case["logits"], case["y"], smoothing=case["smoothing"])


def _fixed_draws(share):
    np.random.uniform = lambda low=0.0, high=1.0: low + (high - low) * share
    np.random.random = lambda: share


def _pixels(image):
    return torch.from_numpy(np.array(image))


def augmentation(case):
    _fixed_draws(case["share"])
    image = Image.fromarray(case["image"].numpy())
    return _pixels(getattr(augmentation_primitives, case["name"])(image, case["severity"]))


def randaugment(case):
    _fixed_draws(case["share"])
    turns = itertools.count(case["start"])
    np.random.choice = lambda some: some[next(turns) % len(some)]
    image = Image.fromarray(case["image"].numpy())
    return _pixels(F.randaugment_image(image, severity=case["severity"], depth=case["depth"]))


def augmix(case):
    _fixed_draws(case["share"])
    turns = itertools.count(case["start"])
    np.random.choice = lambda some: some[next(turns) % len(some)]
    np.random.dirichlet = lambda alphas: np.array(case["weights"])
    np.random.beta = lambda *alphas: case["mixing"]
    image = Image.fromarray(case["image"].numpy())
    return _pixels(
        F.augmix_image(image, severity=case["severity"], depth=case["depth"], width=len(case["weights"]))
    )


def sam(case):
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(case["model"])
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = SAMOptimizer(base, rho=case["rho"], interval=case["interval"])
    for x in case["batches"]:

        def closure(x=x, **options):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
    return {name: value.detach() for name, value in model.state_dict().items()}


def main(cases, answers):
    names = ("uniform", "random", "choice", "dirichlet", "beta", "randint")
    own = {name: getattr(np.random, name) for name in names}
    results = []
    for case in torch.load(cases):
        results.append(globals()[case["call"]](case))
        for name, function in own.items():
            setattr(np.random, name, function)
    torch.save(results, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
