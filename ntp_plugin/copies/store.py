"""Copies in the memory of a host: files in shared memory, which stay when a process is killed.

    HOST/near-3-e2-0        the bytes of slot 3's own state, in the layout of epoch 2; there are two, 0 and 1, and a
                            third one while far copies do not arrive
    HOST/near-3-e2-0.json   their manifest: as long as it is there, the bytes are complete
    HOST/far-3-e2-0         the same, as a slot of another host has sent it here
    HOST/parity-3-e2-0      the parity of slot 3 and others behind it, which are on other hosts (`parity.py`)
    HOST/rebuilt-3-e2-0     the same as slot 3's own, rebuilt from a parity and the other members' copies

A version is written over the older of the two. Its manifest is removed first and written last, so a death leaves either
a complete copy or none. All processes of a host see all of its copies, also those of dead processes. Only the owner may
read them. The memory of a copy is taken at once, so a full memory is found before anything is written. Beside the two
versions of a parity there must be room for one member's bytes, within the limit for copies: a full host must not find
that out when the member is lost.
"""

import contextlib
import dataclasses
import errno
import functools
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ntp_plugin.copies.layout import DTYPES
from ntp_plugin.copies.manifest import CopiedSlice, Manifest, Version
from ntp_plugin.errors import NtpError

_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
NEAR, FAR, PARITY, REBUILT = "near", "far", "parity", "rebuilt"
_REMEMBERED = 256
"""Paths kept in memory, of the copies that a process works with."""
_NAME = re.compile(rf"({NEAR}|{FAR}|{PARITY}|{REBUILT})-(\d+)-e(\d+)-([012])")


class NoRoom(NtpError):
    """A copy does not fit into the memory of this host."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, order=True)
class CopyKey:
    """The name of a copy in a host's folder."""

    kind: str
    slot: int
    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.slot}-e{self.epoch}-{self.number}"

    @classmethod
    def read(cls, name: str) -> "CopyKey | None":
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        kind, slot, epoch, number = match.groups()
        return cls(kind=kind, slot=int(slot), epoch=int(epoch), number=int(number))


class Store:
    """The copies on one host."""

    def __init__(self, folder: Path, *, at_most: int | None = None, makes: bool = True) -> None:
        """Open the copies in a host's folder.

        Args:
            folder: The host's folder within that of a run.
            at_most: The bytes that all copies of this host may take together.
            makes: Whether to create the folder; a reader does not, because its run may have removed it meanwhile.
        """
        self.folder, self._at_most = folder, at_most
        if makes:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # also one that was there
        self._maps: dict[CopyKey, tuple[int, torch.Tensor]] = {}
        """The files that this process writes: the inode, and the bytes."""
        self._pinned: set[CopyKey] = set()

    # ------------------------------------------------ writing

    def open(self, place: CopyKey, size: int) -> torch.Tensor:
        """Make room for a copy; the copy that was there is given up."""
        self._manifest_path(place).unlink(missing_ok=True)
        if not self._is_there(place, max(1, size)):
            self._maps[place] = self._take(place, max(1, size))
        return self._maps[place][1][:size]

    def pin(self, place: CopyKey) -> None:
        """Pin the memory of a copy for a GPU, as long as this process lives; raises if the driver does not allow it."""
        memory = self._maps[place][1]
        if place not in self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
            self._pinned.add(place)

    def grow(self, place: CopyKey, size: int) -> None:
        """Make more room for a copy that this process writes; its bytes stay, and new ones are zero."""
        self._check_room(place, size)
        self._maps[place] = self._mapped(self._path(place), os.O_RDWR, size)

    def written(self, place: CopyKey) -> torch.Tensor | None:
        """The bytes that this process writes there, unless the copy was given up."""
        return self._maps.get(place, (0, None))[1]

    def _is_there(self, place: CopyKey, size: int) -> bool:
        """Whether the mapped file is the current one and has this size: a write past the end of a file kills the
        process."""
        inode, memory = self._maps.get(place, (0, torch.empty(0)))
        try:
            now = self._path(place).stat()
        except FileNotFoundError:
            return False
        return (now.st_ino, now.st_size) == (inode, size) and len(memory) == size

    def complete(self, place: CopyKey, manifest: Manifest) -> None:
        """Write the manifest of bytes that are complete: from now on they are a copy."""
        self.complete_raw(place, manifest.encode())

    def complete_raw(self, place: CopyKey, manifest: bytes) -> None:
        path = self._manifest_path(place)
        unnamed = path.with_suffix(".new")
        try:
            descriptor = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(manifest)
        except OSError as error:
            unnamed.unlink(missing_ok=True)
            if error.errno not in _FULL:
                raise
            raise self._full(path, len(manifest)) from error
        unnamed.rename(path)

    def _full(self, path: Path, size: int) -> NoRoom:
        return NoRoom(
            f"{path} would take {size / 1e6:.1f} MB, and {self.folder} has {_free(self.folder) / 1e6:.1f} MB left",
            fix="make shared memory larger (mount -o remount,size=... /dev/shm), keep parities in place of far"
            " copies (copies.mode = xor:N), or switch copies off (copies.mode = off)",
        )

    def _take(self, place: CopyKey, size: int) -> tuple[int, torch.Tensor]:
        path = self._path(place)
        self._let_go(place)
        path.unlink(missing_ok=True)  # a reader of the old bytes keeps them
        self._check_room(place, size)
        try:
            return self._mapped(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, size)
        except (NoRoom, OSError):
            path.unlink(missing_ok=True)
            raise

    def _check_room(self, place: CopyKey, size: int) -> None:
        if self._at_most is None:
            return
        sizes = self._sizes()
        used, then = _claimed(sizes), _claimed(sizes | {place: size})
        if then <= max(used, self._at_most):
            return
        raise NoRoom(
            f"{self._path(place)} would take {(then - used) / 1e6:.1f} MB, copies on this host have "
            f"{used / 1e6:.1f} MB, and copies.max_host_gb is {self._at_most / 1e9}",
            fix="raise it, keep fewer far copies (copies.count), parities in place of them (copies.mode = xor:N),"
            " or near copies only (copies.mode = near)",
        )

    def _mapped(self, path: Path, flags: int, size: int) -> tuple[int, torch.Tensor]:
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory, inode = mmap.mmap(descriptor, size), os.fstat(descriptor).st_ino
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise self._full(path, size) from error
        finally:
            os.close(descriptor)
        return inode, torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def used(self) -> int:
        """Bytes of all copies on this host, and of the room that goes with parities."""
        return _claimed(self._sizes())

    def _sizes(self) -> dict[CopyKey, int]:
        found = ((CopyKey.read(path.name), path) for path in self.folder.iterdir())
        return {place: _size(path) for place, path in found if place is not None}

    # ------------------------------------------------ finding

    def found(self) -> Iterator[tuple[CopyKey, Manifest]]:
        """Yield all complete copies on this host."""
        for path in sorted(self.folder.glob("*.json")):
            place = CopyKey.read(path.stem)
            manifest = self.manifest(place) if place is not None else None
            if place is not None and manifest is not None:
                yield place, manifest

    def versions(self) -> Iterator[tuple[CopyKey, Version, tuple[int, ...]]]:
        """Yield, for each of these, its version and the slots that have parts of the version."""
        for place, manifest in self.found():
            yield place, manifest.version, manifest.holders

    def manifest(self, place: CopyKey) -> Manifest | None:
        """The manifest of a copy; None if there is no complete copy."""
        manifest = self._manifest(place)
        whole = manifest is not None and _size(self._path(place)) >= manifest.size
        return manifest if whole else None

    def broken(self) -> Iterator[tuple[CopyKey, Version | None]]:
        """Yield the copies that were complete once: the manifest is there, but it or the bytes are not as they were."""
        for path in sorted(self.folder.glob("*.json")):
            place = CopyKey.read(path.stem)
            if place is not None and self.manifest(place) is None and path.exists():
                manifest = self._manifest(place)
                yield place, manifest.version if manifest is not None else None

    def _manifest(self, place: CopyKey) -> Manifest | None:
        try:
            return Manifest.decode(self._manifest_path(place).read_bytes())
        except FileNotFoundError:
            return None

    def read(self, place: CopyKey, held: CopiedSlice) -> dict[str, torch.Tensor]:
        """Read the values of a slice, entry by entry, into memory that nobody changes after they were verified."""
        values = {}
        with self._path(place).open("rb") as file:
            for entry in held.entries:
                memory = torch.empty(held.bytes_of(entry), dtype=torch.uint8)
                file.seek(entry.offset)
                if file.readinto(memory.numpy()) != len(memory):
                    raise EOFError(f"{place} ends before {held.tensor_slice.tensor} ({entry.name})")
                values[entry.name] = memory.view(DTYPES[entry.dtype])
        return values

    def read_into(self, place: CopyKey, memory: torch.Tensor) -> None:
        """Read the first bytes of a copy, as many as fit."""
        with self._path(place).open("rb") as file:
            if file.readinto(memory.numpy()) != len(memory):
                raise EOFError(f"{place} ends before {len(memory)} bytes")

    def copy(self, place: CopyKey, into: "Store") -> bool:
        """Copy a copy into another store while others may write here; False if it was overwritten."""
        before = self.manifest(place)
        if before is None:
            return False
        memory = into.open(place, before.size)
        try:
            self.read_into(place, memory)
        except (FileNotFoundError, EOFError):
            return False
        if self.manifest(place) != before:  # it is removed before the first byte changes, so it describes what was read
            return False
        into.complete(place, before)
        return True

    # ------------------------------------------------ removing

    def forget(self, place: CopyKey) -> None:
        """Remove a copy, and release its memory."""
        self._manifest_path(place).unlink(missing_ok=True)
        self._path(place).unlink(missing_ok=True)
        self._let_go(place)

    def forget_before(self, epoch: int) -> None:
        """Remove all copies in layouts of earlier epochs, whoever wrote them."""
        for place in list(self._maps):  # other threads add to it
            if place.epoch < epoch:
                self._let_go(place)
        with contextlib.suppress(FileNotFoundError):
            for path in list(self.folder.iterdir()):
                found = CopyKey.read(path.name.removesuffix(".json"))
                if found is not None and found.epoch < epoch:
                    self.forget(found)

    def forget_since(self, step: int) -> None:
        """Remove all copies of later steps, whoever wrote them, and incomplete ones, whose step is unknown."""
        kept = {place for place, manifest in self.found() if manifest.version.step <= step}
        for path in list(self.folder.iterdir()):
            found = CopyKey.read(path.name.removesuffix(".json"))
            if found is not None and found not in kept:
                self.forget(found)

    def forget_all(self) -> None:
        """Remove all copies."""
        for path in list(self.folder.iterdir()):
            if (found := CopyKey.read(path.name.removesuffix(".json"))) is not None:
                self.forget(found)

    def close(self) -> None:
        """Release the memory; the copies stay."""
        for place in list(self._maps):
            self._let_go(place)

    def _let_go(self, place: CopyKey) -> None:
        _, memory = self._maps.pop(place, (0, None))  # the mapping ends with the last tensor on it
        if memory is not None and place in self._pinned:
            self._pinned.remove(place)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))  # type: ignore[no-untyped-call]

    def _path(self, place: CopyKey) -> Path:
        return _paths(self.folder, place)[0]

    def _manifest_path(self, place: CopyKey) -> Path:
        return _paths(self.folder, place)[1]


@functools.lru_cache(_REMEMBERED)
def _paths(folder: Path, place: CopyKey) -> tuple[Path, Path]:
    """The paths of the bytes and of their manifest; to build them takes as long as what the system does with them."""
    return folder / str(place), folder / f"{place}.json"


def _claimed(sizes: Mapping[CopyKey, int]) -> int:
    """Bytes with room for one member of each parity; rebuilt copies are in that room."""
    rooms: dict[tuple[int, int], int] = {}
    for place, size in sizes.items():
        if place.kind == PARITY:
            group = place.slot, place.epoch
            rooms[group] = max(size, rooms.get(group, 0))
    return sum(rooms.values()) + sum(size for place, size in sizes.items() if place.kind != REBUILT)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _free(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize
