"""Filters on rows, as pyarrow writes them: a list of conditions, or a list of alternatives of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.stream.errors import ConfigError

#: The values of a column: an array of numbers, or a list.
Column = NDArray[Any] | list[Any]
#: The argument `filters`: all conditions of a list hold, or those of at least one of several lists. Each is a
#: tuple, or a list as in YAML.
Filters = Sequence[Sequence[Any]] | Sequence[Sequence[Sequence[Any]]]

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OPERATORS = ("=", *_COMPARISONS, "in", "not in")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A condition on the value of one column. A null fulfils none but `not in`, as in pyarrow."""

    column: str

    operator: str
    """One of `==`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`."""

    value: Any
    """A number, text or a boolean; of `in` and `not in`, a tuple of them."""

    def __str__(self) -> str:
        return f"({self.column!r}, {self.operator!r}, {self.value!r})"

    def keeps(self, values: Column) -> NDArray[np.bool_]:
        """Return which values fulfil the condition.

        Raises:
            ConfigError: A value is of another kind than that of the condition, such as text.
        """
        self._check_kind(values[:1].tolist() if isinstance(values, np.ndarray) else values)
        # NumPy would round integers that do not fit the column's type; Python compares all numbers exactly.
        is_single = not isinstance(self.value, tuple)
        if isinstance(values, np.ndarray) and is_single and _is_exact(values.dtype, self.value):
            wide = values.astype(np.float64) if values.dtype.kind == "f" else values
            kept: NDArray[np.bool_] = _COMPARISONS[self.operator](wide, self.value)
            return kept
        plain = values.tolist() if isinstance(values, np.ndarray) else values
        if isinstance(self.value, tuple):
            wanted = frozenset(self.value)
            found = np.array([value in wanted for value in plain], np.bool_)
            return found if self.operator == "in" else ~found
        compare = _COMPARISONS[self.operator]
        return np.array([value is not None and bool(compare(value, self.value)) for value in plain], np.bool_)

    def _check_kind(self, values: Sequence[Any]) -> None:
        wanted = _kind(self.value[0] if isinstance(self.value, tuple) else self.value)
        for value in values:
            if value is not None and _kind(value) != wanted:
                raise ConfigError(
                    f"the condition {self} of `filters` compares {wanted} with {value!r:.60} in column "
                    f"`{self.column}`: expected {_kind(value)}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFilter:
    """Alternatives, each of which is a list of conditions that all hold."""

    alternatives: tuple[tuple[Condition, ...], ...]

    @classmethod
    def parse(cls, value: Filters) -> RowFilter:
        """Return the filter that the argument `filters` describes.

        Raises:
            ConfigError: It describes none.
        """
        wrong = ConfigError(
            f"`filters` is {value!r:.200}: expected a list of conditions such as "
            "`[('lang', '==', 'en'), ('length', '<', 512)]`, or a list of such lists, one of which holds"
        )
        if not isinstance(value, (list, tuple)) or not value:
            raise wrong
        first = value[0]
        is_flat = isinstance(first, (list, tuple)) and bool(first) and isinstance(first[0], str)
        alternatives = []
        for part in [value] if is_flat else value:
            if not isinstance(part, (list, tuple)) or not part:
                raise wrong
            conditions = []
            for triple in part:
                is_triple = isinstance(triple, (list, tuple)) and len(triple) == 3
                if not is_triple or not isinstance(triple[0], str):
                    raise wrong
                conditions.append(_condition(*triple))
            alternatives.append(tuple(conditions))
        return cls(alternatives=tuple(alternatives))

    @property
    def columns(self) -> list[str]:
        """Names of the columns in conditions, each once."""
        return list(dict.fromkeys(one.column for conditions in self.alternatives for one in conditions))

    def __str__(self) -> str:
        return " or ".join(f"[{', '.join(map(str, conditions))}]" for conditions in self.alternatives)

    def resolve(self, known: Mapping[str, Any]) -> RowFilter | bool:
        """Return what is left of the filter for rows that all have the same values in some columns.

        Args:
            known: Those values by column name; None is null.

        Returns:
            Whether the rows are kept, if no other columns decide.
        """
        left: list[tuple[Condition, ...]] = []
        for conditions in self.alternatives:
            if not all(one.keeps([known[one.column]])[0] for one in conditions if one.column in known):
                continue
            rest = tuple(one for one in conditions if one.column not in known)
            if not rest:
                return True
            left.append(rest)
        return RowFilter(alternatives=tuple(left)) if left else False

    def keeps(self, columns: Mapping[str, Column], count: int) -> NDArray[np.bool_]:
        """Return which of `count` rows are kept, from the values of the columns in conditions.

        Raises:
            ConfigError: A value is of another kind than that of its condition.
        """
        kept = np.zeros(count, np.bool_)
        for conditions in self.alternatives:
            whole = np.ones(count, np.bool_)
            for one in conditions:
                whole &= one.keeps(columns[one.column])
            kept |= whole
        return kept


def _condition(column: str, name: str, value: Any) -> Condition:
    if name not in _OPERATORS:
        raise ConfigError(f"`filters` has the operator {name!r} on `{column}`: expected one of {_OPERATORS}")
    is_list = name in ("in", "not in")
    if is_list and (isinstance(value, str) or not isinstance(value, Collection) or not len(value)):
        raise ConfigError(f"`filters` has {value!r:.100} after `{name}` on `{column}`: expected a list")
    values = tuple(_plain(column, one) for one in (value if is_list else [value]))
    if isinstance(value, AbstractSet):
        values = tuple(sorted(values, key=repr))  # the order of a set differs from process to process
    if len(kinds := {_kind(one) for one in values}) > 1:
        raise ConfigError(f"`filters` has {sorted(kinds)} in one list on `{column}`: expected one of them")
    return Condition(
        column=column, operator="==" if name == "=" else name, value=values if is_list else values[0]
    )


def _plain(column: str, value: Any) -> Any:
    """Return a value of a condition as one of Python's own types."""
    plain = value.item() if isinstance(value, np.generic) else value
    if not isinstance(plain, (bool, int, float, Decimal, str)):
        raise ConfigError(
            f"`filters` compares `{column}` with {value!r:.100}: expected a number, text or a boolean; "
            "columns of dates and times are compared as text, such as '2024-02-29'"
        )
    return plain


def _kind(value: object) -> str:
    """Return the kind of a value in words: only values of one kind are compared."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float, Decimal)):
        return "a number"
    return "text" if isinstance(value, str) else f"a value of type `{type(value).__name__}`"


def _is_exact(dtype: np.dtype[Any], value: object) -> bool:
    """Return whether NumPy compares numbers of a dtype with a value exactly."""
    if dtype.kind == "f":
        return isinstance(value, float)
    return isinstance(value, int) and int(np.iinfo(dtype).min) <= value <= int(np.iinfo(dtype).max)
