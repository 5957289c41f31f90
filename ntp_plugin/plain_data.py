"""Encodes values as text, for files and for the job's store, without anything that runs on reading.

Reading a pickle calls any function that the writer names. Files outlive the process that wrote them, and other
processes can reach the store, so nothing from there is unpickled. Here each value is JSON. A value that JSON does not
have is an object with one key, the kind: `{"tuple": [1, 2]}`. Reading makes values of the kinds below, and of the data
classes that the reader names; anything else raises `NotData`.

    None, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, Path, argparse.Namespace,
    collections.OrderedDict and Counter, torch.Tensor, Size, dtype and device, NumPy's numbers and arrays

A tensor is read onto the CPU. Subclasses of these kinds are refused, because they would be read as the base class.

    text = encode({"lr": (0.1, 0.2)}, what="the schedule")
    assert decode(text, what="the schedule") == {"lr": (0.1, 0.2)}
"""

import argparse
import base64
import collections
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath
from typing import Any

from ntp_plugin.errors import Refused

_AS_THEY_ARE = (type(None), bool, int, float, str)
_OF_NUMBERS = "biufc"
"""The kinds of NumPy's number types: no objects, no records."""


class NotData(Refused):
    """A value cannot be encoded, or a text is not an encoded value."""


def encode(value: object, *, what: str) -> str:
    """Return a value as text.

    Args:
        value: A value of the kinds above, or a data class of such values.
        what: A name for the value, for the error.

    Raises:
        NotData: A part of the value has another type, which the error names, or the value contains itself.
    """
    try:
        return json.dumps(_encoded(value))
    except TypeError as error:
        raise NotData(
            f"{what} has a value of type {error}, which cannot be written as data",
            fix="keep numbers, text, tensors, and lists, tuples, sets and dicts of them",
        ) from None
    except RecursionError:
        raise NotData(f"{what} contains itself, or is nested too deeply to be written") from None


def decode(text: str | bytes, *, what: str, kinds: tuple[type, ...] = ()) -> Any:
    """Return the value that was encoded.

    Args:
        text: The result of `encode`.
        what: A name for the value, for the error.
        kinds: The data classes that the value may contain.

    Raises:
        NotData: The text is not a result of `encode`, or contains a data class that is not among the kinds.
    """
    try:
        return _Reader(kinds).value(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise NotData(f"{what} is not what was written: {type(error).__name__}: {str(error)[:200]}") from error


# ---------------------------------------------------------------- writing


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list:
        return [_encoded(one) for one in value]
    if kind in _WRITERS:
        name, write = _WRITERS[kind]
        return {name: write(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"of": [kind.__name__, {field.name: _encoded(getattr(value, field.name)) for field in _fields(kind)}]}
    return _encoded_of_libraries(value, kind)


def _encoded_of_libraries(value: Any, kind: type) -> Any:
    """Encode a value of torch or NumPy, which are not imported for it."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and kind is torch.Tensor and value.layout is torch.strided:
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _bytes_of(torch, value)]}
    if torch is not None and kind is torch.Size:
        return {"size": list(value)}
    if torch is not None and kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if torch is not None and kind is torch.device:
        return {"device": str(value)}
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        whole = numpy.asarray(value, order="C")
        if whole.dtype.kind in _OF_NUMBERS:
            is_number = kind is not numpy.ndarray
            return {"numpy": [whole.dtype.str, list(whole.shape), _base64(whole.tobytes()), is_number]}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def _bytes_of(torch: Any, value: Any) -> str:
    whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _base64(whole.view(torch.uint8).numpy().tobytes())


def _pairs(value: Mapping[Any, Any]) -> list[Any]:
    return [[_encoded(key), _encoded(one)] for key, one in value.items()]


def _items(value: Any) -> list[Any]:
    return [_encoded(one) for one in value]


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _fields(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


_WRITERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", _base64),
    tuple: ("tuple", _items),
    set: ("set", _items),
    frozenset: ("frozenset", _items),
    dict: ("dict", _pairs),
    collections.OrderedDict: ("ordered", _pairs),
    collections.Counter: ("counter", _pairs),
    argparse.Namespace: ("namespace", lambda value: _pairs(vars(value))),
    PosixPath: ("path", str),
}

# ---------------------------------------------------------------- reading


class _Reader:
    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._readers: dict[str, Callable[[Any], Any]] = {
            "bytes": _bytes,
            "tuple": lambda of: tuple(self.value(list(of))),
            "set": lambda of: set(self.value(list(of))),
            "frozenset": lambda of: frozenset(self.value(list(of))),
            "dict": self._dict,
            "ordered": lambda of: collections.OrderedDict(self._dict(of)),
            "counter": lambda of: collections.Counter(self._dict(of)),
            "namespace": lambda of: argparse.Namespace(**self._dict(of)),
            "path": Path,
            "of": self._of,
            "size": lambda of: _torch().Size(of),
            "dtype": _dtype,
            "device": lambda of: _torch().device(of),
            "tensor": _tensor,
            "numpy": _numpy,
        }

    def value(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [self.value(one) for one in encoded]
        if not isinstance(encoded, dict):
            return encoded
        ((kind, of),) = encoded.items()
        return self._readers[kind](of)

    def _dict(self, of: Any) -> dict[Any, Any]:
        return {self.value(key): self.value(one) for key, one in of}

    def _of(self, of: Any) -> Any:
        name, values = of
        return self._kinds[name](**{field: self.value(one) for field, one in values.items()})


def _bytes(of: Any) -> bytes:
    return base64.b64decode(of, validate=True)


def _torch() -> Any:
    import torch  # noqa: PLC0415  (most values have none)

    return torch


def _dtype(of: Any) -> Any:
    torch = _torch()
    return {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}[f"torch.{of}"]


def _tensor(of: Any) -> Any:
    (dtype, shape, held), torch = of, _torch()
    values, kind = bytearray(_bytes(held)), _dtype(dtype)
    return torch.frombuffer(values, dtype=kind).reshape(shape) if values else torch.empty(shape, dtype=kind)


def _numpy(of: Any) -> Any:
    import numpy as np  # noqa: PLC0415  (most values have none)

    (named, shape, held, is_number), kinds = of, _OF_NUMBERS
    dtype = np.dtype(named)
    if dtype.kind not in kinds:
        raise ValueError(f"{named!r} is no type of numbers")
    whole = np.frombuffer(_bytes(held), dtype=dtype).reshape(shape).copy()
    return whole[()] if is_number else whole
