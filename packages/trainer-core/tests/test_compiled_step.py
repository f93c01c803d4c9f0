"""A step that is compiled as a whole, and one that is captured as a CUDA graph."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor

from hocket.trainer import Callback
from hocket.trainer.compiled_step import CompiledStep
from hocket.trainer.errors import MissingExtraError, TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.optim import DecoupledAdamW, DecoupledSGDW, LinearScheduler
from hocket.trainer.step.graphed_step import CudaGraphStep
from hocket.trainer.step.losses.losses import is_compiled
from support.ranks import run_ranks
from support.training import Net, loader, make, parameters


def losses(train_step=None, *, optimizer=None, model=None, **arguments):
    """Return the logged losses and the parameters of a short training."""
    torch.compiler.reset()
    model, memory = model or Net(), InMemoryLogger()
    if optimizer is not None:
        arguments["optimizers"] = optimizer(model.parameters())
    arguments.setdefault("max_duration", "6ba")
    with make(model=model, train_step=train_step, loggers=memory, **arguments) as trainer:
        trainer.fit()
        step = trainer.state.train_step
        result = parameters(trainer)
        rates = [type(group["lr"]) for one in trainer.state.optimizers for group in one.param_groups]
    named = {name: memory.data[name] for name in memory.data if name.startswith("loss/")}
    return named, result, step, rates, [number for number, _ in memory.data.get("compile/count", ())]


class Parts(Net):
    """A model whose loss has two parts."""

    def loss(self, outputs, batch):
        return {"fit": super().loss(outputs, batch), "size": outputs.square().mean()}


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.AdamW, lr=0.01),
        partial(DecoupledAdamW, lr=0.01, weight_decay=1e-4),
        partial(DecoupledSGDW, lr=0.01, weight_decay=1e-4, momentum=0.9),
    ],
    ids=lambda one: one.func.__name__,
)
def test_a_step_compiled_as_a_whole_trains_as_the_plain_one(optimizer):
    options = {"optimizer": optimizer, "schedulers": LinearScheduler(), "device_train_microbatch_size": 2}
    plain = losses(**options)
    compiled = losses(partial(CompiledStep, backend="aot_eager"), **options)
    torch.testing.assert_close(compiled[1], plain[1])
    torch.testing.assert_close(compiled[0], plain[0], rtol=1e-5, atol=1e-6)
    assert compiled[3] == plain[3] == [float]
    # An optimizer's second step may recompile, because its state exists then; a new rate never recompiles.
    assert {1} <= set(compiled[4]) <= {1, 2}


def test_compilations_do_not_grow_with_the_number_of_tensors():
    counts = []
    for depth in (1, 6):
        torch.compiler.reset()
        model, memory = Net(), InMemoryLogger()
        model.layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(depth)), nn.Linear(5, 3))
        step = partial(CompiledStep, backend="eager")
        optimizer = DecoupledAdamW(model.parameters(), lr=0.01)
        with make(
            model=model, train_step=step, optimizers=optimizer, loggers=memory, max_duration="3ba"
        ) as trainer:
            trainer.fit()
        counts.append(memory.data["compile/count"])
    assert counts[0] == counts[1]
    assert [batch for batch, _ in counts[0]] == [1]


def test_a_step_compiled_by_the_default_compiler_trains_as_the_plain_one():
    options = {"optimizer": partial(torch.optim.AdamW, lr=0.01), "schedulers": LinearScheduler()}
    # More threads would start torch's pool of compiler processes, which persists until the process ends.
    with inductor_config.patch(compile_threads=1):
        plain, compiled = losses(**options), losses(CompiledStep, **options)
    torch.testing.assert_close(compiled[:2], plain[:2], rtol=1e-5, atol=1e-6)
    assert {1} <= set(compiled[4]) <= {1, 2}


def compiled_and_plain_on_ranks(backend):
    found = []
    for config in (None, {}):
        for step in (None, partial(CompiledStep, backend=backend)):
            named, values, *_ = losses(
                step,
                optimizer=partial(torch.optim.AdamW, lr=0.01),
                schedulers=LinearScheduler(),
                device_train_microbatch_size=1,
                gradient_clipping=1.0,
                fsdp_config=config,
            )
            local = {
                name: one.to_local() if isinstance(one, DTensor) else one for name, one in values.items()
            }
            found.append((named, local, sum(isinstance(one, DTensor) for one in values.values())))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_replicas_and_shards_train_in_a_compiled_step_as_in_the_plain_one(backend):
    for replicas, compiled_replicas, shards, compiled_shards in run_ranks(
        compiled_and_plain_on_ranks, 2, backend, timeout_s=240
    ):
        torch.testing.assert_close(compiled_replicas[:2], replicas[:2], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(compiled_shards[:2], shards[:2], rtol=1e-5, atol=1e-6)
        assert [one[2] for one in (replicas, compiled_replicas, shards, compiled_shards)] == [0, 0, 4, 4]


def test_the_loss_is_compiled_with_the_model():
    graphs = []

    def backend(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes})
        return graph

    losses(partial(CompiledStep, backend=backend))
    assert any({nn.functional.linear, nn.functional.cross_entropy} <= graph for graph in graphs)


class Scripted(nn.Module):
    """A module of TorchScript with a list, which has no forward method there."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def with_forward(change):
    module = nn.Linear(2, 2)
    module.forward = change(module.forward)
    return module


def compiled_in_place():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), False),
        (compiled_in_place, True),
        (lambda: nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")), True),
        (lambda: with_forward(partial(torch.compile, backend="eager")), True),
        (lambda: with_forward(torch.compiler.disable), False),
        pytest.param(
            lambda: nn.Sequential(torch.jit.script(Scripted())),
            False,
            marks=pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
        ),
    ],
    ids=["plain", "in place", "wrapped", "forward", "disabled", "scripted"],
)
def test_a_model_of_which_a_part_is_compiled_is_told_from_others(build, expected):
    assert is_compiled(build()) is expected


class Between(Callback):
    def after_forward(self, state, logger):
        pass


def test_steps_that_cannot_be_compiled_raise_with_the_reason():
    step, message = partial(CompiledStep, backend="eager"), r"`Between` listens between forward pass and loss"
    with pytest.raises(TrainerConfigError, match=message):
        make(train_step=step, callbacks=Between())
    with make(train_step=step, max_duration="1ba") as trainer:
        trainer.state.callbacks.append(Between())
        with pytest.raises(TrainerConfigError, match=message):
            trainer.fit()
    with pytest.raises(TrainerConfigError, match="`LBFGS` evaluates the loss within its step"):
        losses(partial(CompiledStep, backend="eager"), optimizer=torch.optim.LBFGS)


def test_a_cuda_graph_is_refused_on_a_cpu():
    with pytest.raises(
        TrainerConfigError, match=r"`CudaGraphStep` .* the device is `cpu`; leave `train_step` out"
    ):
        make(train_step=CudaGraphStep)


class RunAgain:
    """Replaces CUDA's recorder on a CPU: it computes the function again, into the same memory."""

    def __init__(self, model):
        self.model = model
        self.num_warm, self.num_captures = 0, 0
        self.context = None

    def warm_up(self, function):
        self.num_warm += 1
        return function()

    def capture(self, function):
        self.num_captures += 1
        result = function()
        kept = [(one, one.grad) for one in self.model.parameters()]
        parts = dict(self.context.loss_parts.sums)
        present = torch.is_grad_enabled()

        def replay():
            assert torch.is_grad_enabled() == present
            for one, _ in kept:
                one.grad = None
            again = function()
            with torch.no_grad():
                result.copy_(again)
                for name, part in parts.items():
                    part.copy_(self.context.loss_parts.sums[name])
                for one, gradient in kept:
                    gradient.copy_(one.grad)
                    one.grad = None

        return result, replay


def captured(inner, recorder, **options):
    recorder.context = inner.context
    return CudaGraphStep(inner, recorder=recorder, **options)


@pytest.mark.parametrize("model", [Net, Parts])
@pytest.mark.parametrize("size", [None, 2])
def test_a_graph_copies_each_batch_into_its_own_memory(model, size):
    options = {"device_train_microbatch_size": size, "gradient_clipping": 1.0, "max_duration": "9ba"}
    plain = losses(model=model(), **options)
    graphed = model()
    recorder = RunAgain(graphed)
    found = losses(partial(captured, recorder=recorder, warmup_steps=2), model=graphed, **options)
    torch.testing.assert_close(found[:2], plain[:2], rtol=1e-5, atol=1e-6)
    assert (recorder.num_warm, recorder.num_captures, found[2].num_replays) == (2, 1, 7)


class Tokens(Net):
    """A model with a sequence of labels for each sample, some of them ignored."""

    def forward(self, batch):
        return self.layers(batch["x"]).unflatten(1, (3, 1)).expand(-1, -1, 4)

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["labels"])


def test_batches_with_other_loss_weights_use_the_same_graph():
    generator = torch.Generator().manual_seed(0)
    batches = []
    for index in range(6):
        labels = torch.randint(0, 3, (4, 4), generator=generator)
        labels[: 1 + index % 2, index % 4 :] = -100
        batches.append({"x": torch.randn(4, 5, generator=generator), "labels": labels})
    options = {"train_dataloader": batches, "max_duration": "6ba", "device_train_microbatch_size": 2}
    plain = losses(model=Tokens(), **options)
    model = Tokens()
    recorder = RunAgain(model)
    found = losses(partial(captured, recorder=recorder, warmup_steps=1), model=model, **options)
    torch.testing.assert_close(found[:2], plain[:2], rtol=1e-5, atol=1e-6)
    assert (recorder.num_captures, found[2].num_replays) == (1, 5)


def test_each_batch_shape_gets_a_graph_of_its_own_up_to_a_limit(caplog):
    options = {"train_dataloader": loader(19), "max_duration": "4ep"}  # batches of 4, 4, 4, 4 and 3
    plain = losses(**options)
    for max_graphs, num_replays in ((2, 16 - 1 + 4 - 1), (1, 16 - 1)):
        model = Net()
        step = partial(captured, recorder=RunAgain(model), warmup_steps=1, max_graphs=max_graphs)
        found = losses(step, model=model, **options)
        torch.testing.assert_close(found[:2], plain[:2], rtol=1e-5, atol=1e-6)
        assert found[2].num_replays == num_replays
    assert "more than 1 shapes" in caplog.text


def test_callbacks_within_a_captured_step_raise():
    model = Net()
    step = partial(captured, recorder=RunAgain(model))
    with pytest.raises(TrainerConfigError, match="`Between` listens to an event within the step"):
        losses(step, model=model, callbacks=Between())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_trains_as_the_plain_one_on_a_gpu():
    from hocket.trainer import Trainer

    def run(train_step):
        model, memory = Net(dropout=0.0), InMemoryLogger()
        with Trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            train_dataloader=loader(),
            train_step=train_step,
            device="gpu",
            precision="fp32",
            max_duration="20ba",
            loggers=memory,
            progress_bar=False,
            seed=1,
        ) as trainer:
            trainer.fit()
            return memory.data["loss/train/total"], parameters(trainer), trainer.state.train_step

    plain, other = run(None), run(CudaGraphStep)
    torch.testing.assert_close(other[:2], plain[:2], rtol=1e-5, atol=1e-6)
    assert other[2].num_replays == 17


def test_torch_2_9_asks_for_setuptools_before_it_compiles(monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.1"))
    monkeypatch.setitem(sys.modules, "setuptools", None)
    make(compile_config={"backend": "eager"}).close()
    with pytest.raises(MissingExtraError, match=r"`compile_config` needs `setuptools` with torch 2\.9\.1"):
        make(compile_config={})
    with pytest.raises(MissingExtraError, match=r"`CompiledStep` needs `setuptools` with torch 2\.9\.1"):
        make(train_step=CompiledStep)
