"""Prediction: the model's outputs over a data loader, by `Trainer.predict`."""

from __future__ import annotations

from typing import Any

from hocket.trainer.data.batch_tree import map_tensors
from hocket.trainer.data.data_spec import as_data_spec
from hocket.trainer.data.loader_checks import loader_length
from hocket.trainer.data.sampling import shard
from hocket.trainer.engine.engine import Engine
from hocket.trainer.errors import DataError
from hocket.trainer.evaluation.evaluator import check_subset
from hocket.trainer.evaluation.forward_only import evaluating, forward_only
from hocket.trainer.evaluation.rank_batches import RankBatches
from hocket.trainer.event import Event
from hocket.trainer.precision import Precision
from hocket.trainer.process.clock import LapClock
from hocket.trainer.state import State
from hocket.trainer.timestamp import Timestamp


def predict(
    state: State,
    engine: Engine,
    precision: Precision,
    dataloader: Any,
    *,
    subset_num_batches: int = -1,
    return_outputs: bool = True,
    auto_shard: bool = True,
) -> list[Any]:
    """Run the model over a loader, in evaluation mode. Collective with several ranks.

    Args:
        state: The state of the run.
        engine: The engine, which fires the events; at `PREDICT_BATCH_END`, `state.outputs` are the outputs of
            a batch, on the device.
        precision: The precision of the forward passes.
        dataloader: A loader of this rank's batches, as `model.forward` takes them; or a `DataSpec` or a dict
            of its arguments.
        subset_num_batches: Number of batches; -1 for all.
        return_outputs: Whether to keep the outputs; if False, memory does not grow with the data.
        auto_shard: Whether a plain loader is divided over the ranks (see `hocket.trainer.data.sampling`).

    Returns:
        This rank's outputs on the CPU, one item for each batch, without samples that a sampler repeats.

    Raises:
        DataError: If the loader yields nothing, or serves other ranks.
    """
    check_subset(subset_num_batches)
    spec, *_ = shard(
        as_data_spec(dataloader),
        state.parallelism,
        seed=state.seed,
        auto_shard=auto_shard,
        argument="dataloader",
    )
    batches = RankBatches(
        spec, device=state.device, parallelism=state.parallelism, max_batches=subset_num_batches
    )
    outputs: list[Any] = []
    with evaluating(state), forward_only(state, spec.dataloader):
        state.dataloader, state.dataloader_label = spec.dataloader, "predict"
        limits = [subset_num_batches if subset_num_batches > 0 else None, loader_length(spec.dataloader)]
        state.dataloader_len = min((limit for limit in limits if limit is not None), default=None)
        state.predict_timestamp = Timestamp()
        engine.fire(Event.PREDICT_START)
        laps = LapClock()
        for batch in batches:
            state.batch = spec.transform_microbatch(batch.batch)
            engine.fire(Event.PREDICT_BATCH_START)
            with precision.forward():
                engine.fire(Event.PREDICT_BEFORE_FORWARD)
                state.outputs = state.model(state.batch)
                engine.fire(Event.PREDICT_AFTER_FORWARD)
            if return_outputs and batch.is_counted:
                outputs.append(map_tensors(lambda tensor: tensor.detach().cpu(), state.outputs))
            state.predict_timestamp = state.predict_timestamp.to_next_batch(
                samples=batch.global_samples, tokens=batch.global_tokens, duration=laps.read()
            )
            engine.fire(Event.PREDICT_BATCH_END)
        if not state.predict_timestamp.counts.batch:
            raise DataError("the data loader given to `predict` yielded no batch; expected at least 1")
        engine.fire(Event.PREDICT_END)
    return outputs
