"""Keys that are written once, read over a wire.

A key is only ever added, so the store at some moment is its first n keys. A look takes two messages: what comes back is
what stood there when the question arrived, and may be old when the answer does.
"""

from collections.abc import Callable

from ntp_plugin.membership.gathering import Read
from ntp_plugin.simulator.protocol.virtual_time import VirtualTime, Wires


class VirtualStore:
    """The job's store."""

    def __init__(self, time: VirtualTime, wires: Wires, created: Callable[[str], None]) -> None:
        """`created` hears of every new key."""
        self._time, self._wires, self._created = time, wires, created
        self._keys: dict[str, tuple[int, str]] = {}

    def now(self, key: str) -> str | None:
        """What stands there, for whoever checks: no process knows it so soon."""
        found = self._keys.get(key)
        return None if found is None else found[1]

    def look(self, then: Callable[[Read], None]) -> None:
        """Ask; `then` hears the answer."""
        self._time.after(self._wires.delay(), self._answer, then)

    def write(self, key: str, value: str, then: Callable[[str], None]) -> None:
        """Create the key unless somebody has; `then` hears what stands there."""
        self._time.after(self._wires.delay(), self._create, key, value, then)

    def _answer(self, then: Callable[[Read], None]) -> None:
        first = len(self._keys)

        def read(key: str) -> str | None:
            found = self._keys.get(key)
            return found[1] if found is not None and found[0] < first else None

        self._time.after(self._wires.delay(), then, read)

    def _create(self, key: str, value: str, then: Callable[[str], None]) -> None:
        if key not in self._keys:
            self._keys[key] = (len(self._keys), value)
            self._created(key)
        self._time.after(self._wires.delay(), then, self._keys[key][1])
