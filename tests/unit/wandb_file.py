"""Read the offline records of wandb, in the log format of LevelDB behind a header of its own."""

import struct

from wandb.proto import wandb_internal_pb2

_HEAD, _BLOCK, _RECORD_HEAD = 7, 32768, 7
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path):
    """All of them, in order."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", "it is one of wandb's files"
    found, at, parts = [], _HEAD, b""
    while at + _RECORD_HEAD <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _RECORD_HEAD:
            at += left
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + _RECORD_HEAD : at + _RECORD_HEAD + length]
        at += _RECORD_HEAD + length
        parts = part if kind in (_WHOLE, _FIRST) else parts + part
        if kind in (_WHOLE, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
    return found
