"""A `KeyStore` that notices when keys are deleted behind the job's back, reports it, and writes them again.

Whoever reaches torch's store can delete its keys. Without `view/1` and `view/2` survivors that were told of epoch 2
look for these views, find none, and end by whatever error their broken connections raise. But a key of the job is
written once, so every process that has read or created it can write it again: each remembers what it knows.

Looking costs questions to the store, so there is one for every `_EVERY` answers of "not there", which is what a process
gets that waits: a supervisor always looks for the next view, and a rank in an agreement for the reports of others.
"""

from collections.abc import Callable, Iterator, Sequence

from ntp_plugin.errors import StoreLost
from ntp_plugin.membership.store import KeyStore

_EVERY = 8
"""With it a store that many wait at answers an eighth more."""
_VIEW = "view"
_OF_AN_EPOCH = (_VIEW, "report", "entry", "arrived", "done", "asked", "opened", "come", "round", "standstill")
"""Kinds of keys whose second word is an epoch."""


class RestoredKeys:
    """A `KeyStore` around another one, for one thread.

    It remembers all views, and of what belongs to an epoch that of the newest two.
    """

    def __init__(self, store: KeyStore, *, report: Callable[[str, str], None]) -> None:
        """Begin to remember.

        Args:
            store: The job's store.
            report: Called with a key that was deleted, or overwritten by who has not the job's token, and with a line
                that says so; once for each key, so that a stranger does not fill the record. The key is there again.
        """
        self._store, self._report = store, report
        self._known: dict[str, str] = {}
        self._newest = -1
        self._reported: set[str] = set()
        self._not_there = 0
        self._next = self._in_turn()

    def read(self, key: str) -> str | None:
        """The value, or None while nobody has created the key; a value that was known is written again.

        Raises:
            StoreLost: The key has another value than before, and that is signed as well.
        """
        value = self._store.read(key)
        if value is not None:
            return self._remember(key, value)
        if key in self._known:
            return self._restore(key)
        self._not_there += 1
        if self._not_there % _EVERY == 0 and (known := next(self._next)) is not None:
            self._look_at(known)
        return None

    def create(self, key: str, value: str) -> str:
        """Create the key unless somebody has; returns the value that it has now."""
        return self._remember(key, self._store.create(key, self._known.get(key, value)))

    def present(self, keys: Sequence[str]) -> bool:
        """Whether all these keys were created."""
        return all(self.read(key) is not None for key in keys)

    def _remember(self, key: str, value: str) -> str:
        known = self._known.setdefault(key, value)
        if known != value:
            raise StoreLost(
                f"key {key} of the job's store was deleted and created anew with another value: somebody else writes to"
                " the store, or a second job uses its name",
                way_out="let only the job's hosts reach the store; restart the job from its last checkpoint",
            )
        kind, epoch = _of(key)
        if kind == _VIEW and epoch > self._newest:
            self._newest = epoch
            self._forget_before(epoch - 1)
        return value

    def _restore(self, key: str) -> str:
        value = self._remember(key, self._store.create(key, self._known[key]))
        if key not in self._reported:
            self._reported.add(key)
            self._report(
                key,
                f"key {key} of the job's store was deleted or overwritten, and was written again: somebody else writes"
                " to the store",
            )
        return value

    def _look_at(self, key: str) -> None:
        value = self._store.read(key)
        if value is None:
            self._restore(key)
        else:
            self._remember(key, value)

    def _in_turn(self) -> Iterator[str | None]:
        """The keys to look at: the newest view, which all survivors need first, and between these all others."""
        while True:
            newest = f"{_VIEW}/{self._newest}"
            for key in [one for one in self._known if one != newest]:
                if newest in self._known:
                    yield newest
                    newest = f"{_VIEW}/{self._newest}"
                if key in self._known:
                    yield key
            yield newest if newest in self._known else None

    def _forget_before(self, epoch: int) -> None:
        of_older = [key for key in self._known if _of(key)[0] not in ("", _VIEW) and _of(key)[1] < epoch]
        for key in of_older:
            del self._known[key]
            self._reported.discard(key)


def _of(key: str) -> tuple[str, int]:
    """The kind of a key and its epoch; no kind where it belongs to none."""
    kind, *rest = key.split("/", 2)
    if kind in _OF_AN_EPOCH and rest and rest[0].isdecimal():
        return kind, int(rest[0])
    return "", -1
