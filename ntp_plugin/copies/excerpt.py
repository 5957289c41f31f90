"""One version out of a store that others write to, for somebody who wants to read it in peace.

A version that all have is overwritten when the next but one is begun, which is soon. Whoever takes longer than that to
use it has it copied first. The copying may lose the race as well: a manifest goes before the first byte of its copy
changes, so that is noticed, and the newest version of then is taken instead.

The excerpt takes memory for one version, half of what the copies take. A run that loses a rank needs room as well, so
no more than half of what is free is taken.
"""

import os
from concurrent.futures import ThreadPoolExecutor

from ntp_plugin.copies import restore
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.store import NEAR, PARITY, CopyKey, NoRoom, Store
from ntp_plugin.errors import NtpError, Refused

_ATTEMPTS = 5


def newest(store: Store) -> Version:
    """The last one of which all parts are here; raises where there is none."""
    for version in restore.standable([restore.describe(store)]):
        return version
    told = {version: set(holders) for _, version, holders in store.versions()}
    if not told:
        raise Refused(f"{store.folder} has no copies", way_out="ntp copies list shows where there are some")
    last = max(told, key=lambda version: (version.step, version.epoch))
    there = [place for place, version, _ in store.versions() if version == last and place.kind != PARITY]
    missing = told[last] - {place.slot for place in there}
    raise Refused(
        f"of {last} the parts of slots {', '.join(map(str, sorted(missing)))} are not on this host ({store.folder})",
        way_out="ntp run --ntp-resume latest --save on all hosts that have parts of it; or keep far copies"
        " (--ntp-copies-far) so that each host has all",
    )


def take(store: Store, into: Store) -> Version:
    """Have the newest version of the one in the other, which is empty."""
    tried: list[str] = []
    for _ in range(_ATTEMPTS):
        version = newest(store)
        places = _what_is_needed(store, version)
        _require_room(store, into, places)
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda place: store.copy(place, into), places))
        if restore.standable([restore.describe(into)]) == [version]:  # and nothing newer for some of the slots
            return version
        tried.append(str(version))
        into.forget_all()
    raise NtpError(
        f"{store.folder}: no version stayed for as long as it takes to copy it (overwritten meanwhile:"
        f" {', '.join(tried)})",
        way_out="--ntp-copies-lag-steps in the run makes each stay longer; or export when the run has ended",
    )


def _what_is_needed(store: Store, version: Version) -> list[CopyKey]:
    """For each slot its own copy, rather than one that others keep for it; and all parities."""
    found: dict[tuple[str, int], CopyKey] = {}
    for place, of, _ in store.versions():
        key = place.kind if place.kind == PARITY else "", place.slot
        if of == version and (place.kind == NEAR or key not in found):
            found[key] = place
    return list(found.values())


def _require_room(store: Store, into: Store, places: list[CopyKey]) -> None:
    size = sum(manifest.size for place in places if (manifest := store.manifest(place)) is not None)
    state = os.statvfs(into.folder)
    free = state.f_bavail * state.f_frsize
    if size > free / 2:
        raise NoRoom(
            f"a version of {size / 1e6:.1f} MB would be copied to {into.folder}, where {free / 1e6:.1f} MB are free,"
            " and the run that lives may need as much",
            way_out="make shared memory larger (mount -o remount,size=... /dev/shm), or export when the run has ended",
        )
