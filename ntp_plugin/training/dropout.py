"""Dropout masks that do not depend on which rank computes what, with whom, or how often.

Every row of numbers that is dropped from (a row of the sequence, or the attention of one head in one row) has a key, a
pure function of (seed, which dropout of the model, sample, head, row). Samples are numbered in the order of training,
so a step needs no number of its own. Heads and rows are those of the full model. So a rank that holds some heads or
some rows draws exactly their part of the mask. It draws nothing else, and there is no state to keep, move or rewind: a
retry, a replica that takes over a sample, and the recomputation of an activation draw the same bits.

From its key a row draws as SplitMix64 does: number j of it is a finalizer of key + j x (an odd constant). The finalizer
is a bijection in which every bit depends on every bit; keys are made by the same. Each number decides on two columns
with 32 bits each, so that a probability is met to 2^-33; what is kept is scaled by the exact probability.

All is integer arithmetic of torch: the same bits on any device.
"""

import hashlib

import torch

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 / the golden ratio, which spreads consecutive numbers out evenly; torch's integers have a sign."""
_WORD = 1 << 32
_AT_ONCE = {"cpu": 1 << 14}
"""The numbers drawn at a time: on a CPU as many as its nearest caches hold."""
_AT_ONCE_ELSEWHERE = 1 << 26


def stream(seed: int, *which: str | int) -> int:
    """The number that tells one dropout of a model from all others."""
    digest = hashlib.blake2b(repr((seed, *which)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)


def row_keys(of: int, *places: torch.Tensor) -> torch.Tensor:
    """The key of every row in one dropout; each of `places` (samples, heads, rows) is an axis of the result."""
    keys = torch.full((), of, dtype=torch.int64, device=places[0].device)
    for along in places:
        keys = _mixed(keys.unsqueeze(-1) + (along + 1) * _STEP)
    return keys


def kept(keys: torch.Tensor, columns: int, p: float) -> torch.Tensor:
    """The mask: False with probability p, for all columns of the rows with these keys."""
    dropped = _dropped(p)
    rows, numbers = keys.reshape(-1, 1), -(-columns // 2)
    steps = torch.arange(1, numbers + 1, device=keys.device) * _STEP
    mask = torch.empty((len(rows), columns), dtype=torch.bool, device=keys.device)
    at_once = max(1, _AT_ONCE.get(keys.device.type, _AT_ONCE_ELSEWHERE) // max(1, numbers))
    for start in range(0, len(rows), at_once):
        words = _mixed(rows[start : start + at_once] + steps).view(torch.int32)
        torch.ge(words[:, :columns], dropped - _WORD // 2, out=mask[start : start + at_once])
    return mask.view(*keys.shape, columns)


def dropout(x: torch.Tensor, p: float, keys: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.dropout` in training, with the mask of the rows with these keys."""
    assert keys.shape == x.shape[:-1], f"keys for {tuple(keys.shape)} rows, not {tuple(x.shape[:-1])}"
    dropped = _dropped(p)
    if not dropped:
        return x
    return (x * kept(keys, x.shape[-1], p)).mul_(_WORD / (_WORD - dropped))


def _dropped(p: float) -> int:
    """The number of the 2^32 words that mean that a value is dropped."""
    assert 0 <= p < 1, f"a probability of {p}"
    return min(round(p * _WORD), _WORD - 1)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64, in place."""
    room = torch.empty_like(numbers)
    _folded(numbers, 30, room).mul_(-0x40A7B892E31B1A47)
    _folded(numbers, 27, room).mul_(-0x6B2FB644ECCEEE15)
    return _folded(numbers, 31, room)


def _folded(numbers: torch.Tensor, by: int, room: torch.Tensor) -> torch.Tensor:
    """Each number xor itself shifted to the right. Torch fills with the sign, which must not enter."""
    torch.bitwise_right_shift(numbers, by, out=room)
    return numbers.bitwise_xor_(room.bitwise_and_((1 << (64 - by)) - 1))
