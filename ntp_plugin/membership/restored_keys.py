"""A `KeyStore` that notices when another program deletes keys of the job, reports it, and writes them again.

Any program that reaches torch's store can delete its keys. Without `view/1` and `view/2`, survivors in epoch 2 find no
newer view, and end by whatever error their broken connections raise. But a key of the job is written once, so every
process that has read or created it can restore it: each remembers the keys it knows.

Checks cost requests to the store. So there is one check for every `_EVERY` answers of "not there", which a waiting
process gets: a supervisor polls for the next view, and a rank in an agreement for the reports of others.
"""

from collections.abc import Callable, Iterator, Sequence

from ntp_plugin.errors import StoreLost
from ntp_plugin.membership.store import KeyStore

_EVERY = 8
"""A store at which many processes wait answers an eighth more requests with it."""
_VIEW = "view"
_OF_AN_EPOCH = (_VIEW, "report", "entry", "arrived", "done", "asked", "opened", "come", "round", "standstill")
"""Kinds of keys whose second word is an epoch."""


class RestoredKeys:
    """A `KeyStore` around another one, for one thread.

    It remembers all views, and the keys of the newest two epochs.
    """

    def __init__(self, store: KeyStore, *, report: Callable[[str, str], None]) -> None:
        """Start with no known keys.

        Args:
            store: The job's store.
            report: Called with a key that was deleted, or overwritten by a program without the job's token, and a line
                for the log; once per key, so that another program cannot fill the record. The key is restored by then.
        """
        self._store, self._report = store, report
        self._known: dict[str, str] = {}
        self._newest = -1
        self._reported: set[str] = set()
        self._not_there = 0
        self._next = self._in_turn()

    def read(self, key: str) -> str | None:
        """Return the value, or None while the key does not exist; a known value is restored.

        Raises:
            StoreLost: The key has a value that differs from the known one, and is signed as well.
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
        """Create the key unless it exists; return its value."""
        return self._remember(key, self._store.create(key, self._known.get(key, value)))

    def present(self, keys: Sequence[str]) -> bool:
        """Return True if all these keys exist."""
        return all(self.read(key) is not None for key in keys)

    def _remember(self, key: str, value: str) -> str:
        known = self._known.setdefault(key, value)
        if known != value:
            raise StoreLost(
                f"key {key} of the job's store was deleted and created anew with another value: another program writes"
                " to the store, or a second job uses its name",
                fix="let only the job's hosts reach the store; restart the job from its last checkpoint",
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
                f"key {key} of the job's store was deleted or overwritten, and was written again: another program"
                " writes to the store",
            )
        return value

    def _look_at(self, key: str) -> None:
        value = self._store.read(key)
        if value is None:
            self._restore(key)
        else:
            self._remember(key, value)

    def _in_turn(self) -> Iterator[str | None]:
        """Iterate over the keys to check: the newest view, which all survivors need first, between all others."""
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
    """Kind and epoch of a key; no kind if it belongs to no epoch."""
    kind, *rest = key.split("/", 2)
    if kind in _OF_AN_EPOCH and rest and rest[0].isdecimal():
        return kind, int(rest[0])
    return "", -1
