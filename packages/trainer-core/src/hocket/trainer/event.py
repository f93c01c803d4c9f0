"""The forty moments of a training run at which algorithms, callbacks and loggers are called."""

from __future__ import annotations

from enum import StrEnum


class Event(StrEnum):
    """A moment of a run. The value is the name of the `Callback` method that is called then.

    The loop in pseudocode, with every event where it fires::

        # Trainer(...)
        <INIT>
        <BEFORE_LOAD>
        load the checkpoint, if one is asked for
        <AFTER_LOAD>

        # Trainer.fit()
        <FIT_START>
        while training is not over:
            <ITERATION_START>                 # once for each iteration, a group of epochs
            while the iteration is not over:
                <EPOCH_START>                 # not again when the middle of an epoch is resumed
                while there is data, and training is not over:
                    <BEFORE_DATALOADER>
                    state.batch = next(dataloader)
                    set the learning rates
                    <AFTER_DATALOADER>

                    <BATCH_START>
                    <BEFORE_TRAIN_BATCH>
                    for state.batch in microbatches:
                        <BEFORE_FORWARD>
                        state.outputs = model(state.batch)
                        <AFTER_FORWARD>
                        <BEFORE_LOSS>
                        state.loss = model.loss(state.outputs, state.batch)
                        <AFTER_LOSS>
                        <BEFORE_BACKWARD>
                        backward(state.loss, by its share of the global batch)
                        <AFTER_BACKWARD>
                    fetch the next batch ahead
                    unscale the gradients
                    <AFTER_TRAIN_BATCH>       # gradients are whole: clip them here
                    optimizer.step()
                    state.timestamp = one batch later
                    <BATCH_END>
                    <BATCH_CHECKPOINT>

                # only when the data came to its end
                state.timestamp = one epoch later
                <EPOCH_END>
                <EPOCH_CHECKPOINT>
            # only when `state.iteration_length` is reached
            state.timestamp = one iteration later
            <ITERATION_END>
            <ITERATION_CHECKPOINT>
        <FIT_END>

    Evaluation, within a fit, or on its own (then with the `EVAL_STANDALONE_*` events)::

        <EVAL_STANDALONE_START>
        <EVAL_BEFORE_ALL>
        for each evaluator:
            <EVAL_START>
            for state.batch in dataloader:
                <EVAL_BATCH_START>
                <EVAL_BEFORE_FORWARD>
                state.outputs = model.eval_forward(state.batch)
                <EVAL_AFTER_FORWARD>
                <EVAL_BATCH_END>
            <EVAL_END>
        <EVAL_AFTER_ALL>
        <EVAL_STANDALONE_END>

    Prediction::

        <PREDICT_START>
        for state.batch in dataloader:
            <PREDICT_BATCH_START>
            <PREDICT_BEFORE_FORWARD>
            state.outputs = model(state.batch)
            <PREDICT_AFTER_FORWARD>
            <PREDICT_BATCH_END>
        <PREDICT_END>
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"

    FIT_START = "fit_start"
    ITERATION_START = "iteration_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    FIT_END = "fit_end"

    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_END = "eval_standalone_end"

    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    @property
    def is_before_event(self) -> bool:
        """Whether an event `AFTER_…` or `…_END` follows the action or the span that this one precedes."""
        return "BEFORE_" in self.name or self.name.endswith("_START")

    @property
    def is_after_event(self) -> bool:
        """Whether an event `BEFORE_…` or `…_START` precedes the action or the span that this one follows."""
        return "AFTER_" in self.name or self.name.endswith("_END")

    @property
    def canonical_name(self) -> str:
        """The name that the event before an action or a span shares with the one after it: `epoch`."""
        name = self.value.replace("before_", "").replace("after_", "")
        return name.removesuffix("_start").removesuffix("_end")

    @property
    def is_eval(self) -> bool:
        """Whether the event belongs to evaluation."""
        return self.name.startswith("EVAL_")

    @property
    def is_predict(self) -> bool:
        """Whether the event belongs to prediction."""
        return self.name.startswith("PREDICT_")
