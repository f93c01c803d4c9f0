"""Precisions on a CPU, gradient clipping, and the check that replicas are equal."""

from __future__ import annotations

import os
import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler

from hocket.trainer import Algorithm, Event
from hocket.trainer.callbacks import GradNormMonitor, OptimizerMonitor, ReplicaCheck
from hocket.trainer.callbacks.replica_check import describe_differences, digest
from hocket.trainer.errors import DivergedError, TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.optim import DecoupledAdamW, DecoupledSGDW
from hocket.trainer.step.gradient_clipping import GradientClipper, GradientClippingConfig
from support.ranks import run_ranks
from support.training import FileStore, Net, Recorder, Watch, loader, make, parameters


class SeesTypes(Net):
    """A model that records the dtypes in which its layers compute."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def forward(self, batch):
        outputs = super().forward(batch)
        self.types.add(outputs.dtype)
        return outputs


TYPES = {"fp32": torch.float32, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("kind", [DecoupledAdamW, DecoupledSGDW, torch.optim.AdamW])
def test_precisions_train_on_a_cpu(precision, kind):
    model = SeesTypes()
    logger = InMemoryLogger()
    optimizer = kind(model.parameters(), lr=0.05)
    with make(
        model=model, optimizers=optimizer, precision=precision, loggers=logger, max_duration="4ep"
    ) as trainer:
        trainer.fit()
        losses = [float(loss) for _, loss in logger.data["loss/train/total"]]
    assert model.types == {TYPES[precision]}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(losses[-5:]) < sum(losses[:5])


def test_fit_may_continue_in_another_precision():
    model = SeesTypes()
    with make(model=model) as trainer:
        trainer.fit("1ba")
        assert model.types == {torch.float32}
        trainer.fit("1ba", precision="amp_fp16")
        assert model.types == {torch.float32, torch.float16}
        assert trainer.state.precision == "amp_fp16"
        with pytest.raises(TrainerConfigError, match="expected one of"):
            trainer.fit("1ba", precision="fp12")


@pytest.mark.parametrize("kind", [DecoupledAdamW, DecoupledSGDW])
def test_a_step_that_overflows_in_fp16_is_skipped(kind):
    seen = []

    def watch(state):
        seen.append(parameters(trainer))

    class Overflows(Net):
        num = 0

        def loss(self, outputs, batch):
            self.num += 1
            return super().loss(outputs, batch) * (1e30 if self.num == 2 else 1.0)

    model = Overflows()
    optimizer = kind(model.parameters(), lr=0.05, weight_decay=9e-4)
    with make(
        model=model, optimizers=optimizer, precision="amp_fp16", callbacks=Watch(watch), max_duration="3ba"
    ) as trainer:
        trainer.fit()
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in pairwise(seen)]
    assert same == [True, False]


@pytest.mark.parametrize("every_batch", [True, None])
def test_torchs_schedulers_do_not_step_where_fp16_skips_the_update(tmp_path, every_batch):
    class Overflows(Net):
        def loss(self, outputs, batch):
            return super().loss(outputs, batch) * (1e30 if rates and len(rates) % 3 == 2 else 1.0)

    rates = []

    def run(**arguments):
        rates.clear()
        optimizer = torch.optim.SGD((model := Overflows()).parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        watch = Watch(lambda state: rates.append(optimizer.param_groups[0]["lr"]))
        arguments = {"max_duration": "8ba", "callbacks": watch, "precision": "amp_fp16", **arguments}
        with make(
            model=model,
            optimizers=optimizer,
            schedulers=scheduler,
            step_schedulers_every_batch=every_batch,
            **arguments,
        ) as trainer:
            trainer.fit()
        return list(rates)

    whole = run()
    # As in a plain loop that steps the scheduler only after `optimizer.step` was called.
    updates = [sum(batch % 3 != 2 for batch in range(done)) for done in range(8)]
    steps = updates if every_batch else [0] * 5 + [1] * 3
    assert whole == [0.1 * 0.5**step for step in steps]
    if every_batch:
        run(max_duration="3ba", checkpointing={"store": FileStore(tmp_path)})
        resumed = run(max_duration="5ba", checkpointing={"store": FileStore(tmp_path)}, autoresume=True)
        assert resumed == whole[3:5]


def test_an_optimizer_without_gradients_takes_no_step_in_fp16():
    model = Net()
    unused = nn.Parameter(torch.ones(2))
    model.unused = unused
    used = [parameter for parameter in model.parameters() if parameter is not unused]
    optimizers = [torch.optim.SGD(used, lr=0.1), torch.optim.SGD([unused], lr=0.1, weight_decay=0.1)]
    with make(model=model, optimizers=optimizers, precision="amp_fp16", max_duration="3ba") as trainer:
        before = parameters(trainer)
        trainer.fit()
        same = {name: torch.equal(value, before[name]) for name, value in parameters(trainer).items()}
    assert same == {name: name == "unused" for name in before}


def test_fp16_resumes_with_its_loss_scale(tmp_path):
    def trainer(**arguments):
        return make(precision="amp_fp16", **arguments)

    with trainer(max_duration="8ba") as whole:
        whole.fit()
    with trainer(max_duration="3ba", checkpointing={"store": FileStore(tmp_path)}) as first:
        first.fit()
    with trainer(max_duration="8ba", checkpointing={"store": FileStore(tmp_path)}, autoresume=True) as second:
        second.fit()
    torch.testing.assert_close(parameters(second), parameters(whole), rtol=0, atol=0)


class SeesGradients(Watch):
    """Records the gradients at `AFTER_TRAIN_BATCH`, after those callbacks that come before it."""

    def __init__(self):
        super().__init__(lambda state: None)
        self.norms, self.largest = [], []

    def after_train_batch(self, state, logger):
        gradients = torch.cat([parameter.grad.flatten() for parameter in state.module.parameters()])
        self.norms.append(float(gradients.norm()))
        self.largest.append(float(gradients.abs().max()))


def clipped(given_, precision="fp32"):
    before, after, logger = SeesGradients(), SeesGradients(), InMemoryLogger()
    arguments = {"callbacks": before, "loggers": logger, "precision": precision}
    with make(max_duration="6ba", gradient_clipping=given_, **arguments) as trainer:
        assert isinstance(trainer.state.callbacks[-1], GradientClipper)
        trainer.state.callbacks.append(after)
        trainer.fit()
    return before, after, logger.data


@pytest.mark.parametrize("precision", TYPES)
def test_gradients_are_clipped_by_norm(precision):
    before, after, logged = clipped(0.05, precision)
    assert max(before.norms) > 0.05
    expected = [min(norm, 0.05) for norm in before.norms]
    assert after.norms == pytest.approx(expected, rel=1e-4)
    norms = logged["l2_norm/grad/before_clipping"]
    assert [float(norm) for _, norm in norms] == pytest.approx(before.norms, rel=1e-5)
    assert [step for step, _ in norms] == list(range(1, 7))


@pytest.mark.parametrize("by_algorithm", [False, True])
def test_the_logged_norm_is_that_of_the_update_for_each_way_of_clipping(by_algorithm):
    class Clips(Algorithm):
        def match(self, event, state):
            return event is Event.AFTER_TRAIN_BATCH

        def apply(self, event, state, logger):
            state.parallelism.clip_grad_norm_(state.model.parameters(), 0.05)

    monitors, memory = [GradNormMonitor(), OptimizerMonitor(batch_log_interval=1)], InMemoryLogger()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    arguments = {"algorithms": Clips()} if by_algorithm else {"gradient_clipping": 0.05}
    with make(
        model=model, optimizers=optimizer, callbacks=monitors, loggers=memory, max_duration="5ba", **arguments
    ) as trainer:
        trainer.fit()
    updates = [norm for _, norm in memory.data["l2_norm/update/global"]]
    norms = [norm for _, norm in memory.data["l2_norm/grad/global"]]
    assert max(norms) == pytest.approx(0.05, rel=1e-4)
    assert norms == pytest.approx([norm for update in updates for norm in (update, update)], rel=1e-4)


def test_gradients_are_clipped_by_value():
    before, after, _ = clipped({"clipping_type": "value", "clipping_threshold": 0.01})
    assert after.largest == pytest.approx([min(one, 0.01) for one in before.largest])


def train_with_a_parameter_in_no_optimizer(**arguments):
    model = Net()
    scale = model.scale = nn.Parameter(torch.tensor(1.0))
    forward = model.layers.forward
    model.layers.forward = lambda x: forward(x) * scale
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1, momentum=0.9)
    with make(model=model, optimizers=optimizer, max_duration="5ba", **arguments) as trainer:
        trainer.fit()
    return parameters(trainer), scale.grad


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        ({}, 1e-5),
        ({"callbacks": Recorder}, 1e-5),
        ({"device_train_microbatch_size": 2}, 1e-5),
        ({"precision": "amp_fp16"}, 1e-2),
        ({"precision": "amp_fp16", "callbacks": Recorder}, 1e-2),
    ],
    ids=str,
)
def test_gradients_of_a_parameter_in_no_optimizer_do_not_add_up(arguments, near):
    model, scale = Net(), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1, momentum=0.9)
    for batch in loader():
        nn.functional.cross_entropy(model(batch) * scale, batch[1]).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), scale], 0.05)
        optimizer.step()
        optimizer.zero_grad()
        scale.grad = None
    made = {name: value() if name == "callbacks" else value for name, value in arguments.items()}
    found, gradient = train_with_a_parameter_in_no_optimizer(gradient_clipping=0.05, **made)
    assert gradient is None
    del found["scale"]
    torch.testing.assert_close(found, dict(model.named_parameters()), rtol=near, atol=near / 10)


def test_clipping_does_not_depend_on_microbatches():
    def train(size):
        arguments = {"gradient_clipping": 0.05, "device_train_microbatch_size": size}
        with make(max_duration="6ba", **arguments) as trainer:
            trainer.fit()
            return parameters(trainer)

    torch.testing.assert_close(train(1), train(None))


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        (0.0, "`clipping_threshold` is 0.0"),
        ("1.0", "`clipping_threshold` is '1.0'"),
        ({"threshold": 1.0}, "unknown keys"),
        ({"clipping_type": "adaptive"}, "hocket.algos.GradientClipping"),
    ],
)
def test_invalid_clipping_raises(given_, text):
    with pytest.raises(TrainerConfigError, match=text):
        GradientClippingConfig.of(given_)
    with pytest.raises(TrainerConfigError, match=text):
        make(gradient_clipping=given_)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    place=st.integers(0, 39),
    bit=st.integers(0, 15),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_a_digest_sees_every_bit(size, place, bit, dtype):
    torch.manual_seed(size)
    tensor = torch.randn(size).to(dtype)
    changed = tensor.clone()
    changed.view(torch.int16)[place % changed.view(torch.int16).numel()] ^= (
        1 << bit if bit < 15 else -(1 << 15)
    )
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(changed)
    if size > 1 and not torch.equal(tensor, tensor.flip(0)):
        assert digest(tensor) != digest(tensor.flip(0))


def test_ranks_that_differ_from_the_majority_are_named():
    same = {("a", None): 1, ("b", None): 2}
    assert describe_differences([same, same, same]) == ""
    text = describe_differences([same, {**same, ("b", None): 3}, same, {("a", (1,)): 9}])
    assert "`b` on ranks [1]" in text


def drift(action):
    """Train on two ranks, and change rank 1's parameter after batch 3; return the message and the batches."""
    rank = int(os.environ["RANK"])
    seen = []

    def change(state):
        seen.append(state.timestamp.counts.batch)
        if len(seen) == 3 and rank == 1:
            with torch.no_grad():
                state.model.layers[0].weight.view(-1)[2] += 1e-4

    sampler = DistributedSampler(list(range(20)), 2, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with make(
                callbacks=[Watch(change), ReplicaCheck("2ba", action=action, include_optimizer=True)],
                train_dataloader=loader(batch_size=2, sampler=sampler),
                max_duration="5ba",
            ) as trainer:
                trainer.fit()
        except DivergedError as error:
            return str(error), seen
    return "".join(str(one.message) for one in caught if "replicas" in str(one.message)), seen


def warns_and_shards():
    """Run with the policy that warns; return also the shards of this rank, which have no replica."""
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state = SimpleNamespace(module=model, optimizers=[])
    return drift("warn"), next(key for key, _ in ReplicaCheck()._tensors(state))


def test_replicas_that_differ_are_found():
    for message, seen in run_ranks(drift, 2, "raise", timeout_s=120):
        assert "replicas differ in `layers.0.weight`" in message.replace("module.", "")
        assert "(batch 4)" in message
        assert seen == [1, 2, 3, 4]


def test_differing_replicas_may_warn_only_and_shards_are_not_compared():
    outcomes = run_ranks(warns_and_shards, 2, timeout_s=120, init="gloo")
    assert "replicas differ" in outcomes[0][0][0]
    assert [seen for (_, seen), _ in outcomes] == [[1, 2, 3, 4, 5]] * 2
    assert [shard for _, (_, shard) in outcomes] == [(0,), (1,)]


class Missing(torch.autograd.Function):
    """An operation that a CPU does not have in fp16, as torch's own fail: in the pass that is named."""

    @staticmethod
    def forward(ctx, x, fails_in):
        ctx.fails_in = fails_in
        if fails_in == "forward":
            raise RuntimeError("\"batch_norm\" not implemented for 'Half'")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails_in == "backward":
            raise RuntimeError("\"batch_norm_backward\" not implemented for 'Half'")
        return grad, None


@pytest.mark.parametrize("precision", ["amp_fp16", "fp32"])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_what_a_cpu_lacks_in_fp16_is_explained(fails_in, precision):
    class Lacking(Net):
        def forward(self, batch):
            return Missing.apply(super().forward(batch), fails_in)

    with (
        make(model=Lacking(), precision=precision, max_duration="1ba") as trainer,
        pytest.raises(RuntimeError, match="not implemented for 'Half'") as raised,
    ):
        trainer.fit()
    said = [note for note in raised.value.__notes__ if "precision='amp_bf16'" in note]
    assert len(said) == (precision == "amp_fp16")
