"""Adding a transform to the data set behind a data loader."""

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from hocket.algos.errors import IncompatibleError
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class DatasetTransform(Algorithm):
    """Base of methods that change single samples: they add a transform to the training data set.

    The transform is added before the data loader's first batch is fetched, so that worker processes have it,
    and once for each data set. A `Subset` gets a shallow copy of its data set, which other subsets of the
    same data set, such as the one for evaluation, do not share.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.BEFORE_LOAD, Event.FIT_START})

    def __init__(self) -> None:
        self._transformed: weakref.WeakSet[Any] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, without the data sets that have the transform."""
        return {name: value for name, value in self.__dict__.items() if name != "_transformed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the settings over."""
        self.__dict__.update(state, _transformed=weakref.WeakSet())

    def make_transform(self) -> Callable[[Any], Any]:
        """Return the transform of one image."""
        raise NotImplementedError

    def match(self, event: Event, state: "State") -> bool:
        """Return whether the training data set still lacks the transform."""
        if event not in (Event.BEFORE_LOAD, Event.FIT_START) or state.dataloader is None:
            return False
        return dataset_of(type(self).__name__, state.dataloader) not in self._transformed

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Add the transform.

        Raises:
            IncompatibleError: The loader has no data set with a transform.
        """
        dataset = own_dataset_of(type(self).__name__, state.dataloader)
        add_transform(dataset, self.make_transform())
        self._transformed.add(dataset)


def dataset_of(method: str, loader: Any) -> Any:
    """Return the data set with a `transform` that a loader reads, through `Subset`s.

    Raises:
        IncompatibleError: There is no such data set.
    """
    dataset: Any = getattr(loader, "dataset", None)
    while not hasattr(dataset, "transform") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    if not hasattr(dataset, "transform"):
        raise IncompatibleError(
            f"`{method}` adds a transform to the data set, but the `{type(loader).__name__}` reads a "
            f"`{type(dataset).__name__}`, which has no attribute `transform`. Use a torchvision data set, "
            "give yours a `transform` that it applies to each image, or apply the method's transform in it"
        )
    return dataset


_owned: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The data set that a subset got for itself, by the subset."""


def own_dataset_of(method: str, loader: Any) -> Any:
    """Return the data set as `dataset_of`, put into the loader's `Subset` as a shallow copy if there is one.

    Each subset gets one copy, at the first call. A data set without a `Subset` around it is not copied, as a
    loader's data set cannot be replaced.

    Raises:
        IncompatibleError: There is no such data set.
    """
    dataset, outer = dataset_of(method, loader), loader.dataset
    if dataset is outer or _owned.get(outer) is dataset:
        return dataset
    # The subsets in between are copied as well: they may be parts of other subsets.
    inner = outer
    while not hasattr(inner, "transform"):
        inner.dataset = copy.copy(inner.dataset)
        inner = inner.dataset
    _owned[outer] = inner
    return inner


def add_transform(dataset: Any, transform: Callable[[Any], Any]) -> None:
    """Add an image transform to a data set: before a conversion to tensors, else after its own transforms.

    Args:
        dataset: A data set that applies its `transform` to each image; those of torchvision keep a copy in
            `transforms`.
        transform: A function that takes and returns an image.
    """
    old_transform = dataset.transform
    steps = getattr(old_transform, "transforms", None)
    if old_transform is None:
        dataset.transform = transform
    elif isinstance(steps, list):
        position = next((index for index, step in enumerate(steps) if _makes_tensor(step)), len(steps))
        # A new object: another data set may share this one.
        dataset.transform = _Steps([*steps[:position], transform, *steps[position:]])
    elif _makes_tensor(old_transform):
        dataset.transform = _Steps([transform, old_transform])
    else:
        dataset.transform = _Steps([old_transform, transform])
    standard: Any = getattr(dataset, "transforms", None)
    if hasattr(standard, "transform"):
        # A copy: the data set that this one was copied from has the same object.
        dataset.transforms = copy.copy(standard)
        dataset.transforms.transform = dataset.transform
    elif standard is None and hasattr(dataset, "transforms"):
        dataset.transforms = _ImageOnly(transform)


def _makes_tensor(step: Any) -> bool:
    return type(step).__name__ in {"ToTensor", "PILToTensor", "ToImage"}


class _Steps:
    """Transforms one after another, as torchvision's `Compose`."""

    def __init__(self, transforms: list[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class _ImageOnly:
    """A transform of (image, target) that changes the image."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, image: Any, target: Any) -> tuple[Any, Any]:
        return self.transform(image), target
