"""Saving, retention, replacement and loading of checkpoints with `hocket.ckpt`'s store."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchmetrics import MeanMetric

from hocket.ckpt.errors import CheckpointError
from hocket.ckpt.torch import CheckpointStore, KeepBest, KeepEvery, Thin
from hocket.trainer import Algorithm, Callback, Evaluator
from hocket.trainer.checkpoint.checkpoint_saver import CheckpointSaver
from hocket.trainer.errors import ResumeError, TrainerConfigError
from support.ranks import run_ranks
from support.training import Net, Watch, loader, make, parameters


def names(folder):
    return [entry.name for entry in CheckpointStore(folder).list() if entry.status == "committed"]


def user_of(folder, name):
    return CheckpointStore(folder).load(name, {}, strict=False).user


def trained(folder, duration="4ba", **options):
    options.setdefault("save_interval", "1ba")
    with make(save_folder=str(folder), max_duration=duration, **options) as trainer:
        trainer.fit()
        return trainer


def test_a_name_without_the_batch_gets_it_where_it_would_come_twice(tmp_path):
    # An epoch has five batches, so the run ends within epoch 1, for which a checkpoint exists already.
    end = parameters(trained(tmp_path, "7ba", save_interval="1ep", save_filename="ep{epoch}"))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["ep1", "ep1-ba7"]
    with make(save_folder=str(tmp_path), max_duration="7ba", autoresume=True) as trainer:
        assert trainer.state.timestamp.batch == 7
        assert same(trainer, end)
    # A resumed run that ends within the same epoch does not take the name of the existing checkpoint.
    with make(
        save_folder=str(tmp_path), max_duration="9ba", autoresume=True, save_filename="ep{epoch}"
    ) as trainer:
        trainer.fit()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["ep1", "ep1-ba7", "ep1-ba9"]


def same(trainer, expected):
    return all(torch.equal(value, expected[name]) for name, value in parameters(trainer).items())


def test_a_folder_with_later_checkpoints_raises(tmp_path):
    trained(tmp_path)
    with (
        make(save_folder=str(tmp_path), max_duration="6ba") as trainer,
        pytest.raises(FileExistsError, match=r"up to batch 4.*starts at batch 0.*save_overwrite=True"),
    ):
        trainer.fit()
    with make(save_folder=str(tmp_path), max_duration="6ba", load_path=str(tmp_path / "ep0-ba4")) as trainer:
        trainer.fit()
    assert names(tmp_path)[-1] == "ep1-ba6"


def test_overwriting_replaces_a_checkpoint(tmp_path):
    before = parameters(trained(tmp_path))
    model = Net(seed=5)
    after = parameters(trained(tmp_path, model=model, save_overwrite=True))
    assert names(tmp_path) == [f"ep0-ba{batch}" for batch in (1, 2, 3, 4)]
    with make(load_path=str(tmp_path / "ep0-ba4")) as trainer:
        assert same(trainer, after)
        assert not same(trainer, before)


class Worse(Net):
    """A model with a given evaluation loss after each number of batches."""

    by_batch = (0.0, 3.0, 1.0, 2.0, 4.0)

    def __init__(self):
        super().__init__()
        self.batch = 0

    def get_metrics(self, is_train):
        names = ("Score", "LossScore", "MulticlassAccuracy")
        return {} if is_train else {name: MeanMetric() for name in names}

    def update_metric(self, batch, outputs, metric):
        metric.update(self.by_batch[self.batch])


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (KeepBest(metric="metrics/eval/Score", mode="min"), [2, 4]),
        (KeepBest(metric="metrics/eval/LossScore"), [2, 4]),
        (KeepBest(metric="metrics/eval/MulticlassAccuracy"), [4]),
        (KeepBest(metric="metrics/eval/Score", mode="max", num=2), [1, 4]),
        ([KeepBest(metric="metrics/eval/Score", mode="min"), KeepEvery(steps=3)], [2, 3, 4]),
    ],
)
def test_the_best_by_a_metric_and_every_nth_are_kept(tmp_path, retention, kept):
    model = Worse()
    watch = Watch(lambda state: setattr(model, "batch", state.timestamp.counts.batch))
    trained(
        tmp_path,
        model=model,
        callbacks=watch,
        eval_dataloader=loader(4),
        eval_interval="1ba",
        checkpointing={"retention": retention},
    )
    assert names(tmp_path) == [f"ep0-ba{batch}" for batch in kept]


def test_a_metric_without_a_direction_needs_a_mode(tmp_path):
    retention = KeepBest(metric="metrics/eval/Score")
    with pytest.raises(TrainerConfigError, match=r"`metrics/eval/Score` .* pass `KeepBest\(.*mode='max'\)`"):
        trained(tmp_path, model=Worse(), eval_dataloader=loader(4), checkpointing={"retention": retention})


def test_older_checkpoints_are_thinned_and_refuse_a_whole_resume_by_name(tmp_path):
    end = parameters(trained(tmp_path, checkpointing={"retention": Thin(after=1, every=2)}))
    thinned = [entry.name for entry in CheckpointStore(tmp_path).list() if entry.is_thinned]
    assert thinned == ["ep0-ba1", "ep0-ba3"]
    with make(save_folder=str(tmp_path), max_duration="5ba", autoresume=True) as trainer:
        assert trainer.state.timestamp.batch == 4
        assert same(trainer, end)
    place = f"{tmp_path}/ep0-ba3"
    for options in ({}, {"load_strict_model_weights": False}):
        with pytest.raises(CheckpointError, match=r"thinned: `optimizers.*`load_weights_only=True`"):
            make(load_path=place, max_duration="5ba", **options)
    with make(load_path=place, load_weights_only=True) as trainer:
        assert trainer.state.timestamp.batch == 0
        weights = CheckpointStore(tmp_path).load("ep0-ba3", {"model": parameters(trainer)}, include=["model"])
        assert same(trainer, weights.state["model"])
    with make(load_path=place, load_ignore_keys=["optimizers"], max_duration="5ba") as trainer:
        assert trainer.state.timestamp.batch == 3
        trainer.fit()


def test_the_newest_checkpoints_are_kept_also_after_a_restart(tmp_path):
    trained(tmp_path, save_num_checkpoints_to_keep=2)
    assert names(tmp_path) == ["ep0-ba3", "ep0-ba4"]
    trained(tmp_path, "7ba", save_num_checkpoints_to_keep=2, autoresume=True)
    assert names(tmp_path) == ["ep1-ba6", "ep1-ba7"]
    with pytest.raises(TrainerConfigError, match=r"`save_num_checkpoints_to_keep` is 0"):
        make(save_folder=str(tmp_path), save_num_checkpoints_to_keep=0)


@pytest.mark.parametrize("kind", ["file", "dangling link", "in a file", "read-only"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_training(tmp_path, kind):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "further")
    folder = {
        "file": tmp_path / "file",
        "dangling link": tmp_path / "link",
        "in a file": tmp_path / "file" / "folder",
        "read-only": "/proc/hocket",  # a folder that the superuser cannot create either
    }[kind]
    with pytest.raises(OSError, match=rf"checkpoints cannot be saved to `{folder}`: .*another") as caught:
        make(save_folder=folder, max_duration="1ba")
    assert caught.value.__notes__[0] == "[HKT-CK11]"


def test_metrics_are_listed_in_the_checkpoint(tmp_path):
    trained(tmp_path, "1ba", eval_dataloader=loader(4), eval_interval="1ba", save_metrics=True)
    assert user_of(tmp_path, "ep0-ba1")["metrics/eval/Loss"] > 0
    trained(tmp_path / "without", "1ba", eval_dataloader=loader(4), eval_interval="1ba")
    assert "metrics/eval/Loss" not in user_of(tmp_path / "without", "ep0-ba1")


def test_a_resumed_run_has_the_earlier_values_of_its_metrics(tmp_path):
    saved = {"eval_dataloader": loader(4), "eval_interval": "1ba", "save_metrics": True}
    trained(tmp_path, "2ba", **saved)
    measured = user_of(tmp_path, "ep0-ba2")["metrics/eval/Loss"]
    with make(load_path=str(tmp_path / "ep0-ba2"), eval_dataloader=loader(4)) as trainer:
        found = trainer.state.eval_metrics["eval"]["Loss"].compute()
    assert float(found) == pytest.approx(measured)
    trained(tmp_path / "without", "2ba", **saved | {"save_metrics": False})
    with make(load_path=str(tmp_path / "without" / "ep0-ba2"), eval_dataloader=loader(4)) as trainer:
        assert not trainer.state.eval_metrics["eval"]["Loss"].update_called


def test_several_checkpoint_savers_resume_independently(tmp_path):
    whole, weights = str(tmp_path / "whole"), str(tmp_path / "{run_name}")

    def savers():
        return [
            CheckpointSaver(weights, "w{batch}", save_interval="2ba", weights_only=True),
            CheckpointSaver(whole, save_interval="3ba", num_checkpoints_to_keep=1),
        ]

    def run(duration):
        with make(callbacks=savers(), run_name="run", max_duration=duration, autoresume=True) as trainer:
            trainer.fit()
            assert trainer.saved_checkpoints == names(whole)
            return parameters(trainer)

    run("7ba")
    assert names(whole) == ["ep1-ba7"]
    assert names(tmp_path / "run") == ["w2", "w4", "w6", "w7"]
    end = run("8ba")
    assert names(whole) == ["ep1-ba8"]
    assert names(tmp_path / "run") == ["w2", "w4", "w6", "w7", "w8"]
    with make(load_path=str(tmp_path / "run" / "w8"), load_weights_only=True) as trainer:
        assert same(trainer, end)
        assert trainer.state.timestamp.batch == 0
    with pytest.raises(TrainerConfigError, match="two series of checkpoints go to"):
        make(callbacks=[CheckpointSaver(whole), CheckpointSaver(whole)])


@pytest.mark.parametrize("name", ["latest", "latest-rank0.pt", "latest-rank{rank}.pt"])
def test_latest_names_the_newest_checkpoint_of_the_folder(tmp_path, name):
    end = parameters(trained(tmp_path, "3ba"))
    with make(load_path=str(tmp_path / name)) as trainer:
        assert trainer.state.timestamp.batch == 3
        assert same(trainer, end)
    with pytest.raises(ResumeError, match="has no committed checkpoint"):
        make(load_path=str(tmp_path / "none" / name))


def test_a_path_without_a_folder_is_looked_up_here_first(tmp_path, monkeypatch):
    end = parameters(trained(tmp_path / "first", "3ba"))
    monkeypatch.chdir(tmp_path / "first")
    with make(load_path="ep0-ba3", save_folder=str(tmp_path / "second")) as trainer:
        assert same(trainer, end)


class Wider(Net):
    def __init__(self, more: bool = True):
        super().__init__()
        if more:
            self.more = nn.Linear(2, 2)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [(False, True), (True, False)], ids=["missing", "unexpected"])
def test_strict_loads_refuse_other_names_and_loose_loads_take_common_ones(
    tmp_path, weights_only, saved, loaded
):
    end = parameters(trained(tmp_path, "2ba", model=Wider(saved)))
    path = str(tmp_path / "ep0-ba2")
    with pytest.raises(CheckpointError, match=r"more\.(weight|bias)"):
        make(model=Wider(loaded), load_path=path, load_weights_only=weights_only)
    options = {"load_strict_model_weights": False, "load_weights_only": weights_only}
    if not weights_only:
        options["load_ignore_keys"] = ["optimizers"]
    with make(model=Wider(loaded), load_path=path, **options) as trainer:
        mine = parameters(trainer)
        assert all(torch.equal(mine[name], end[name]) for name in mine.keys() & end.keys())


def test_keys_are_left_out_of_saves_and_loads(tmp_path):
    end = parameters(trained(tmp_path, "2ba", save_ignore_keys=["model/layers.3.*", "optimizers"]))
    path = str(tmp_path / "ep0-ba2")
    with pytest.raises(CheckpointError, match=r"layers\.3"):
        make(load_path=path)
    fresh = parameters(make())
    for optimizers in ("optimizers", "state/optimizers/*"):
        with make(load_path=path, load_ignore_keys=["state/model/layers.3.*", optimizers]) as trainer:
            mine = parameters(trainer)
            assert torch.equal(mine["layers.0.weight"], end["layers.0.weight"])
            assert torch.equal(mine["layers.3.weight"], fresh["layers.3.weight"])
            assert trainer.state.timestamp.batch == 2
    with pytest.raises(TrainerConfigError, match="matches nothing"):
        make(load_path=path, load_ignore_keys=["model/none.*"])


def test_random_generators_keep_their_state_if_rng_is_ignored(tmp_path):
    trained(tmp_path, "2ba", seed=1)
    path = str(tmp_path / "ep0-ba2")
    drawn = {}
    for keys in (None, ["state/rng"], ["rng", "optimizers"]):
        with make(load_path=path, load_ignore_keys=keys, seed=2) as trainer:
            assert trainer.state.timestamp.batch == 2
            drawn[str(keys)] = torch.rand(3).tolist()
    with make(seed=2):
        fresh = torch.rand(3).tolist()
    loaded, *ignored = drawn.values()
    assert ignored == [fresh, fresh]
    assert loaded != fresh


class Marked(Callback):
    """Has a state of one number."""

    def __init__(self, mark, of_rank_zero=False):
        self.mark, self.saves_rank_zero_state = mark, of_rank_zero

    def state_dict(self):
        return {"mark": self.mark}

    def load_state_dict(self, state):
        self.mark = state["mark"]


@pytest.mark.parametrize("of_rank_zero", [False, True])
def test_states_of_callbacks_are_left_out_of_loads(tmp_path, of_rank_zero):
    # Ignored keys also apply to the states of callbacks, which are not in the tree that the load fills.
    trained(tmp_path, "2ba", callbacks=[Marked(1, of_rank_zero)])
    for keys, mark in ((["state/callbacks/*"], 2), (["callbacks/Marked"], 2), (["callbacks/Other"], 1)):
        mine = Marked(2, of_rank_zero)
        with make(load_path=str(tmp_path / "ep0-ba2"), callbacks=[mine], load_ignore_keys=keys) as trainer:
            assert trainer.state.timestamp.batch == 2
        assert mine.mark == mark, keys


class Other(Net):
    """A model whose last layer has another size, and which may have an additional layer."""

    def __init__(self, num_classes, has_more=False):
        super().__init__()
        self.layers[3] = nn.Linear(8, num_classes)
        if has_more:
            self.more = nn.Linear(2, 2)


def _without_head(tree):
    for name in [name for name in tree["model"] if name.startswith("layers.3.")]:
        del tree["model"][name]
    del tree["optimizers"]


@pytest.mark.parametrize("is_foreign", [False, True], ids=["own", "foreign"])
def test_ignored_keys_leave_the_rest_of_a_load_strict(tmp_path, is_foreign):
    end = parameters(trained(tmp_path, "2ba"))
    path, head = str(tmp_path / "ep0-ba2"), "model/layers.3.*"
    if is_foreign:
        path = str(tmp_path / "weights.pt")
        torch.save(end, path)
    for keys in ([head, "optimizers"], ["state/*/layers.3.*", "optimizers"], _without_head):
        with make(model=Other(7), load_path=path, load_ignore_keys=keys) as trainer:
            mine = parameters(trainer)
            assert torch.equal(mine["layers.0.weight"], end["layers.0.weight"])
            assert mine["layers.3.weight"].shape == (7, 8)
        # A name that is not ignored raises if only the run has it, as without ignored names.
        with pytest.raises((CheckpointError, ResumeError), match=r"more\.(weight|bias)"):
            make(model=Other(7, has_more=True), load_path=path, load_ignore_keys=keys)
    options = {"load_strict_model_weights": False, "load_ignore_keys": [head, "optimizers"]}
    make(model=Other(7, has_more=True), load_path=path, **options).close()
    # A name that is not ignored also raises if only the checkpoint has it.
    small = Other(7)
    small.layers[0].register_parameter("bias", None)
    with pytest.raises((CheckpointError, ResumeError), match=r"layers\.0\.bias"):
        make(model=small, load_path=path, load_ignore_keys=[head, "optimizers"])


class Counting(Algorithm):
    def __init__(self, with_tensor):
        self.count = 0
        self.total = torch.zeros(1) if with_tensor else None

    def match(self, event, state):
        return event.value == "batch_end"

    def apply(self, event, state, logger):
        self.count += 1

    def state_dict(self):
        return {"count": self.count} | ({} if self.total is None else {"total": self.total})

    def load_state_dict(self, state):
        self.count = state["count"]


def check_excluded_algorithms(folder, with_tensor):
    trained(folder, "2ba", algorithms=Counting(with_tensor))
    for exclude, expected in ((None, 2), (["Counting"], 0)):
        algorithm = Counting(with_tensor)
        path = os.path.join(folder, "ep0-ba2")
        with make(algorithms=algorithm, load_path=path, load_exclude_algorithms=exclude) as trainer:
            assert algorithm.count == expected, (exclude, algorithm.count)
            assert trainer.state.timestamp.batch == 2


@pytest.mark.parametrize("with_tensor", [False, True])
def test_algorithms_may_be_excluded_from_a_load(tmp_path, with_tensor):
    check_excluded_algorithms(str(tmp_path), with_tensor)


def test_an_algorithm_with_tensors_may_be_added_or_removed_on_resume(tmp_path):
    trained(str(tmp_path / "without"), "2ba")
    trained(str(tmp_path / "with"), "2ba", algorithms=Counting(True))
    for folder, algorithms in (("without", [Counting(True)]), ("with", [])):
        options = {"algorithms": algorithms, "load_path": str(tmp_path / folder / "ep0-ba2")}
        message = (
            r"`algorithms.Counting.total`.* or with `load_path` `load_exclude_algorithms=\['Counting'\]`"
        )
        with pytest.raises(ValueError, match=message):
            make(**options)
        with make(**options, load_exclude_algorithms=["Counting"]) as trainer:
            assert trainer.state.timestamp.batch == 2
            assert [one.count for one in algorithms] == [0] * len(algorithms)


def load_on_a_rank(folder):
    check_excluded_algorithms(os.path.join(folder, "run"), with_tensor=False)
    with make(load_path=os.path.join(folder, "model.pt"), fsdp_config={}) as trainer:
        values = {name: value.full_tensor() for name, value in parameters(trainer).items()}
        wanted = torch.load(os.path.join(folder, "model.pt"), weights_only=True)
        assert all(torch.equal(values[name], wanted[name]) for name in wanted)


def test_several_ranks_exclude_algorithms_and_load_foreign_weights_into_shards(tmp_path):
    torch.save(Net(seed=9).state_dict(), tmp_path / "model.pt")
    run_ranks(load_on_a_rank, 2, str(tmp_path), init="gloo", timeout_s=180)


FOREIGN = {
    "weights.pt": lambda state, path: torch.save(state, path),
    "composer.pt": lambda state, path: torch.save(
        {"state": {"model": {f"module.{name}": value for name, value in state.items()}}, "rng": []}, path
    ),
    "tutorial.pt": lambda state, path: torch.save({"epoch": 3, "model_state_dict": state}, path),
    "half.pt": lambda state, path: torch.save({n: v.bfloat16() for n, v in state.items()}, path),
    "model.safetensors": lambda state, path: save_file(state, path),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_weights_of_other_programs_checkpoints_load(tmp_path, name, capfd):
    state = Net(seed=9).state_dict()
    FOREIGN[name](state, tmp_path / name)
    with make(load_path=str(tmp_path / name), max_duration="1ba") as trainer:
        exact = name != "half.pt"
        for key, value in parameters(trainer).items():
            assert torch.equal(value, state[key] if exact else state[key].bfloat16().float())
        assert trainer.state.timestamp.batch == 0
        trainer.fit()
    assert "weights of 4 tensors from" in capfd.readouterr().err.replace("\n", " ")


def test_weights_of_the_inner_model_load_into_a_wrapped_model(tmp_path):
    """With a loss function, all names begin with `module.`, unlike those in a user's own file."""
    modules = [nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)) for _ in range(2)]
    for module in modules:
        module[1].weight = nn.Parameter(torch.eye(4))
        module.again = module[1]  # tied: the file needs only one of the two names
    state = modules[0].state_dict()
    for left_out in ("1.weight", "again.weight"):
        torch.save({name: value for name, value in state.items() if name != left_out}, tmp_path / "model.pt")
        with make(
            model=modules[1], loss_fn=nn.functional.cross_entropy, load_path=str(tmp_path / "model.pt")
        ) as trainer:
            for name, value in parameters(trainer).items():
                assert torch.equal(value, state[name.removeprefix("module.")]), name
    torch.save({"0.weight": state["0.weight"], "head": torch.zeros(1)}, tmp_path / "part.pt")
    with pytest.raises(ResumeError, match=r"lacks `module\.0\.bias`.*and has `head`"):
        make(model=modules[1], loss_fn=nn.functional.cross_entropy, load_path=str(tmp_path / "part.pt"))


def test_weights_of_another_model_raise_with_names(tmp_path):
    state = Net(seed=9).state_dict()
    torch.save({"layers.0.weight": state["layers.0.weight"], "head": torch.zeros(1)}, tmp_path / "part.pt")
    path = str(tmp_path / "part.pt")
    with pytest.raises(
        ResumeError, match=r"lacks `layers\.0\.bias`.*and has `head`, which the model has not"
    ):
        make(load_path=path)
    with make(load_path=path, load_strict_model_weights=False) as trainer:
        assert torch.equal(parameters(trainer)["layers.0.weight"], state["layers.0.weight"])
    torch.save({"layers.0.weight": torch.zeros(2)}, path)
    with pytest.raises(ResumeError, match=r"has the shape \(2,\).*\(8, 5\)"):
        make(load_path=path, load_strict_model_weights=False)
    torch.save({"other": torch.zeros(2)}, path)
    with pytest.raises(ResumeError, match="no tensor of the model"):
        make(load_path=path, load_strict_model_weights=False)


class Bucket:
    """An object store of another library, which downloads objects by name."""

    def __init__(self, root):
        self.root = root

    def list_objects(self, prefix):
        found = self.root / prefix
        return [str(path.relative_to(self.root)) for path in found.rglob("*") if path.is_file()]

    def download_object(self, name, filename):
        shutil.copy(self.root / name, filename)


class Named:
    def __init__(self, root):
        self.root = root

    def get_uri(self, name):
        return f"{self.root}/{name}"


class Files:
    def __init__(self, root):
        self.root = root

    def download_file(self, name, destination):
        shutil.copy(self.root / name, destination)


def test_a_checkpoint_may_be_in_an_object_store(tmp_path):
    end = parameters(trained(tmp_path / "run", "2ba"))
    torch.save(end, tmp_path / "weights.pt")
    for name, store in (("run/ep0-ba2", Bucket), ("run/ep0-ba2", Named), ("weights.pt", Files)):
        with make(load_path=name, load_object_store=store(tmp_path)) as trainer:
            assert same(trainer, end), store
    with pytest.raises(TrainerConfigError, match=r"`load_object_store` is a `object`.*`get_uri\(name\)`"):
        make(load_path="run/ep0-ba2", load_object_store=object())
    with pytest.raises(TrainerConfigError, match="says where `load_path` is, which is not set"):
        make(load_object_store=Bucket(tmp_path))


def test_fit_accepts_its_own_evaluators():
    with make(max_duration="1ep", eval_dataloader=loader(4)) as trainer:
        evaluator = Evaluator(label="mine", dataloader=loader(8), eval_interval="2ba")
        trainer.fit(eval_dataloader=evaluator)
        assert set(trainer.state.metric_values) == {"metrics/mine/Loss"}
        trainer.fit("1ep", eval_dataloader=loader(4), eval_interval="1ep", eval_subset_num_batches=1)
        assert set(trainer.state.metric_values) == {"metrics/mine/Loss", "metrics/eval/Loss"}


def test_a_requested_save_is_made_at_once_or_at_the_next_boundary(tmp_path):
    class Ask(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.counts.batch == 1:
                trainer.save_checkpoint_to_save_folder()

    with make(
        save_folder=str(tmp_path), save_interval="10ba", callbacks=Ask(), max_duration="4ba"
    ) as trainer:
        trainer.fit()
        assert names(tmp_path)[0] in ("ep0-ba2", "ep0-ba3")
        assert names(tmp_path)[-1] == "ep0-ba4"
        trainer.fit("1ba")
        trainer.state.timestamp = trainer.state.timestamp.to_next_batch(samples=1)
        trainer.save_checkpoint_to_save_folder()
        assert names(tmp_path)[-1] == "ep1-ba6"
    with make() as trainer, pytest.raises(TrainerConfigError, match="there is no `save_folder`"):
        trainer.save_checkpoint_to_save_folder()
