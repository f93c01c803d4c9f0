"""URIs, and file names with fields for the run, rank and time, as `composer.utils` formats them."""

from __future__ import annotations

import string
from typing import Any
from urllib.parse import urlsplit

from hocket.compat.composer.utils import dist
from hocket.trainer import State, Timestamp

_RANK_FIELDS = {
    "rank": dist.get_global_rank,
    "local_rank": dist.get_local_rank,
    "world_size": dist.get_world_size,
    "local_world_size": dist.get_local_world_size,
    "node_rank": dist.get_node_rank,
}
_COUNT_FIELDS = ("epoch", "batch", "batch_in_epoch", "sample", "sample_in_epoch", "token", "token_in_epoch")
_SECOND_FIELDS = ("total_wct", "epoch_wct", "batch_wct")

#: The fields of `format_name_with_dist`, one to a line.
FORMAT_NAME_WITH_DIST_TABLE = "\n".join(f"{{{name}}}" for name in ("run_name", *_RANK_FIELDS))
#: The fields of `format_name_with_dist_and_time`, one to a line.
FORMAT_NAME_WITH_DIST_AND_TIME_TABLE = "\n".join(
    [FORMAT_NAME_WITH_DIST_TABLE, *(f"{{{name}}}" for name in (*_COUNT_FIELDS, *_SECOND_FIELDS))]
)
#: The field of an MLflow experiment in names of files.
MLFLOW_EXPERIMENT_ID_FORMAT_KEY = "mlflow_experiment_id"
#: The field of an MLflow run in names of files.
MLFLOW_RUN_ID_FORMAT_KEY = "mlflow_run_id"


class _Partial(string.Formatter):
    """A formatter that leaves a field without a value unchanged."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        try:
            field: tuple[Any, Any] = super().get_field(field_name, args, kwargs)
        except (KeyError, IndexError):
            # The formatter has numbered a field without a name before this call.
            return _Unknown("" if field_name.isdecimal() else field_name), field_name
        return field


class _Unknown:
    def __init__(self, name: str) -> None:
        self._name = name

    def __format__(self, spec: str) -> str:
        return f"{{{self._name}:{spec}}}" if spec else f"{{{self._name}}}"


def partial_format(text: str, *args: Any, **kwargs: Any) -> str:
    """Fill in the fields that have a value; others stay as they are."""
    return _Partial().vformat(text, args, kwargs)


def format_name_with_dist(format_str: str, run_name: str, **extra_format_kwargs: object) -> str:
    """Fill in the run's name, the ranks and further fields; others stay as they are."""
    ranks = {name: read() for name, read in _RANK_FIELDS.items()}
    return partial_format(format_str, **{"run_name": run_name, **ranks, **extra_format_kwargs})


def format_name_with_dist_and_time(
    format_str: str, run_name: str, timestamp: Timestamp, **extra_format_kwargs: object
) -> str:
    """Fill in the run's name, the ranks, the time and further fields; others stay as they are."""
    times: dict[str, object] = {name: int(getattr(timestamp.counts, name)) for name in _COUNT_FIELDS}
    times |= {name: float(getattr(timestamp.counts, name)) for name in _SECOND_FIELDS}
    return format_name_with_dist(format_str, run_name, **{**times, **extra_format_kwargs})


class PartialFilePath:
    """A file's name and folder, whose fields are filled in from a state.

    Args:
        filename: File name with fields, as `format_name_with_dist_and_time` takes them.
        folder: Folder with such fields; None for a name alone.
    """

    def __init__(self, filename: str, folder: str | None = None) -> None:
        self.filename = filename
        self.folder = folder

    def format(self, state: State, keep_placeholders: bool = False) -> str:
        """Return the path at the state's time; with `keep_placeholders` the fields stay."""
        path = self.filename if self.folder is None else f"{self.folder.rstrip('/')}/{self.filename}"
        if keep_placeholders:
            return path
        return format_name_with_dist_and_time(path, state.run_name, state.timestamp)


def get_save_filename(state: State, filename: str = "ep{epoch}-ba{batch}-rank{rank}") -> str:
    """Return a checkpoint's name at the state's time."""
    return PartialFilePath(filename).format(state)


def parse_uri(uri: str) -> tuple[str, str, str]:
    """Split a URI into backend, bucket and path; the first two are empty for a local path.

    A bucket's namespace, as in `oci://bucket@namespace/path`, is left out.
    """
    parts = urlsplit(uri)
    if not parts.scheme:
        return "", "", uri
    return parts.scheme, parts.netloc.partition("@")[0], parts.path.lstrip("/")
