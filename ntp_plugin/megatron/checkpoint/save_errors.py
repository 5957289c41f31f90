"""Makes an error of the file system in a save known to all ranks, so that all of them give the save up together.

Megatron raises where a file cannot be written. That is on one rank, and the others wait for it in the next collective.
Here such an error is noted, and the rank goes on to that collective. Before the first file, and where Megatron has all
ranks wait for each other in a save, they sum up whether one of them has noted an error. If so, all raise.

The wrapped functions use files and no collective. So the loss of another rank is never noted: its error comes out of a
collective, and a recovery follows as anywhere else.

The number of the newest checkpoint is written under another name and renamed. Megatron empties the file first, and on a
full disk no checkpoint could be found any more.
"""

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from megatron.training import checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from ntp_plugin.patching import Replacement

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_SERIALIZATION = "megatron.core.dist_checkpointing.serialization"
_CHECKPOINTING = "megatron.training.checkpointing"
_TRACKER = Path(checkpointing.get_checkpoint_tracker_filename("")).name
_NEW = ".new"


class _GivenUp(Exception):
    """Raised on all ranks that save, because a rank has noted an error."""


class _TrackerNotWritten(OSError):
    """The number of the newest checkpoint was not written; raised on the one rank that writes it."""


class SaveErrors:
    """The errors of the save in flight on this rank."""

    def __init__(self, slot: str) -> None:
        """`slot` is this rank's name in messages."""
        self._slot = slot
        self._noted: list[tuple[Path, str]] = []
        self._folder: Path | None = None
        """The folder of the save, once it is known; a thread may still write for an earlier save, into another one."""
        self._made: Path | None = None
        """The folder, if this rank has made it for this save."""
        self._in_a_save = False

    def begin(self) -> None:
        """Forget the save before."""
        self._noted.clear()
        self._folder = self._made = None

    @property
    def has_noted(self) -> bool:
        """Whether this rank has noted an error of this save."""
        return bool(self.own())

    def own(self) -> tuple[str, ...]:
        """The errors of this rank, without those of threads that still write for a save that a loss has made void."""
        known = {Path(), self._folder}
        return tuple(text for folder, text in self._noted if self._folder is None or folder in known)

    def attempt(self, work: Callable[[], object]) -> tuple[str, ...]:
        """Run a part of a save; all ranks that save call this.

        Returns:
            Why the save has failed, one entry for each error of any rank. Empty if none is known to have failed.
        """
        self._in_a_save = True
        try:
            work()
        except (_GivenUp, CheckpointException) as error:
            return self._of_all_ranks(error)
        except _TrackerNotWritten as error:
            self.note(error)
            return self._of_all_ranks(error, asks=True)
        finally:
            self._in_a_save = False
        return ()

    def note(self, error: BaseException, file: str | os.PathLike[str] | None = None) -> None:
        """Note an error of a file of this save, or of the save as a whole."""
        folder = Path(file).parent if file is not None else self._folder or Path()
        self._noted.append((folder, f"{self._slot}: {_of_the_system(error)}"))

    def ask(self) -> None:
        """Raise on all ranks if one of them has noted an error; all ranks that save call this."""
        failed = torch.tensor([int(self.has_noted)], dtype=torch.int, device=torch.cuda.current_device())
        dist.all_reduce(failed)
        if int(failed[0]):
            raise _GivenUp

    def remove_what_was_made(self) -> bool:
        """Remove the folder that this rank has made for the failed save; return whether no folder is left of it.

        Its files hold no checkpoint, and the next save may need their room.
        """
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
        left = self._made or self._folder
        return left is None or not left.exists()

    def _of_all_ranks(self, error: BaseException, *, asks: bool = False) -> tuple[str, ...]:
        if asks:  # the others are in the last question of this save
            with contextlib.suppress(_GivenUp):
                self.ask()
        gathered: list[tuple[str, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(gathered, self.own())
        return tuple(dict.fromkeys(text for texts in gathered for text in texts)) or (
            str(error).strip().splitlines()[-1],
        )

    # ------------------------------------------------ Megatron's functions

    def asking(self, barrier: Any) -> Any:
        """`torch.distributed.barrier`: in a save, ask all ranks for errors."""

        @functools.wraps(barrier)
        def ask_or_wait(*args: Any, **kwargs: Any) -> None:
            if self._in_a_save and not (args or kwargs):
                self.ask()
            else:
                barrier(*args, **kwargs)

        return ask_or_wait

    def table(self) -> tuple[Replacement, ...]:
        """Return the hooks that note errors instead of raising them."""
        writer = f"{_STRATEGIES}.filesystem_async:FileSystemWriterAsync"
        alone = "it raises on the rank that writes this file, and the others wait"
        return (
            Replacement(target=f"{_CHECKPOINTING}:ensure_directory_exists", why=alone, make=self._folder_made),
            Replacement(
                target="megatron.core.dist_checkpointing:save",
                why="a folder that could not be made is found here, before the first collective",
                make=self._into_a_folder,
            ),
            Replacement(target=f"{writer}.prepare_local_plan", why=alone, make=self._planned),
            Replacement(
                target=f"{writer}.write_preloaded_data",
                why="it returns the error, and Megatron keeps no more of it than its class",
                make=self._file_written,
            ),
            Replacement(target=f"{writer}.write_preloaded_data_multithread", why=alone, make=self._part_written),
            Replacement(target=f"{writer}.finish", why=alone, make=self._noting),
            Replacement(target=f"{_SERIALIZATION}:save_config", why=alone, make=self._noting),
            Replacement(target=f"{_SERIALIZATION}:save_integrity_manifest", why=alone, make=self._noting),
            Replacement(
                target=f"{_STRATEGIES}.async_utils:AsyncRequest.add_finalize_fn",
                why="what it adds is called after the last question of an asynchronous save, and writes a file",
                make=lambda add: lambda request, function: add(request, self._noting(function)),
            ),
            Replacement(target="torch:save", why=f"in the format torch, {alone}", make=self._object_written),
            Replacement(
                target=f"{_CHECKPOINTING}:maybe_msc",
                why="it empties the file with the number of the newest checkpoint before it writes another one",
                make=_Files,
            ),
        )

    def _noting(self, original: Any) -> Any:
        @functools.wraps(original)
        def noting(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except Exception as error:
                self.note(error)
                return None

        return noting

    def _folder_made(self, original: Any) -> Any:
        @functools.wraps(original)
        def ensure(filename: str, check_parent: bool = True) -> None:
            folder = Path(filename).parent if check_parent else Path(filename)
            was_there = folder.exists()
            try:
                original(filename, check_parent)
            except OSError as error:
                if not self._in_a_save:
                    raise
                self.note(error)
            else:
                self._made = None if was_there else folder

        return ensure

    def _into_a_folder(self, original: Any) -> Any:
        @functools.wraps(original)
        def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            if self._in_a_save:
                self._folder = Path(checkpoint_dir)
                self.ask()
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)

        return save

    def _planned(self, original: Any) -> Any:
        """It makes the folder on every host, and returns the plan as it is."""

        @functools.wraps(original)
        def prepare(writer: Any, plan: Any) -> Any:
            try:
                return original(writer, plan)
            except OSError as error:
                self.note(error)
                return plan

        return prepare

    def _file_written(self, original: Any) -> Any:
        @functools.wraps(original)
        def write(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if result is not None and isinstance(result[1], Exception):
                self.note(result[1], kwargs["write_bucket"][0])
            return result

        return write

    def _part_written(self, original: Any) -> Any:
        """It leaves no result then, which Megatron finds on all ranks together."""

        @functools.wraps(original)
        def write(transforms: Any, use_msc: Any, rank: int, buckets: Any, results: Any) -> None:
            try:
                original(transforms, use_msc, rank, buckets, results)
            except Exception as error:
                if not self.has_noted:  # else it is the error of a file, which is noted with more words
                    self.note(error, buckets[0][0])

        return write

    def _object_written(self, original: Any) -> Any:
        @functools.wraps(original)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if not (self._in_a_save and isinstance(f, str | os.PathLike)):
                original(obj, f, *args, **kwargs)
                return
            try:
                original(obj, f, *args, **kwargs)
            except (OSError, RuntimeError) as error:
                self.note(error)

        return save


def _of_the_system(error: BaseException) -> BaseException:
    """Return the system's error that led to this one: torch raises another one when it closes a file that it could not
    write."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


class _Files:
    """Megatron's file functions, of which the one that writes the number of the newest checkpoint is safe."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file; that of the newest checkpoint becomes another one when it is closed, or stays as it was."""
        if mode == "w" and Path(path).name == _TRACKER and self._original.open is open:
            return _renamed(Path(path))
        return self._original.open(path, mode, *args, **kwargs)


@contextlib.contextmanager
def _renamed(path: Path) -> Iterator[IO[str]]:
    new = path.with_name(path.name + _NEW)
    try:
        with new.open("w") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # it was perhaps never made
            new.unlink()
        raise _TrackerNotWritten(*error.args) from error
