"""Takes one version out of a store that others write to, so that it can be read undisturbed.

A committed version is overwritten when the next but one is begun, which is soon. A reader that takes longer copies the
version first. The copying may lose the race as well. It notices that, because a manifest is removed before the first
byte of its copy changes, and takes the newest version of that time instead.

The excerpt takes memory for one version, half of what the copies take. A run that loses a rank needs room as well, so
the excerpt takes no more than half of the free memory.
"""

import os
from concurrent.futures import ThreadPoolExecutor

from ntp_plugin.copies import restore
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.store import NEAR, PARITY, CopyKey, NoRoom, Store
from ntp_plugin.errors import NtpError, Refused

_ATTEMPTS = 5


def newest(store: Store) -> Version:
    """Return the newest version of which all parts are on this host; raises `Refused` if there is none."""
    for version in restore.restorable([restore.describe(store)]):
        return version
    holders_of = {version: set(holders) for _, version, holders in store.versions()}
    if not holders_of:
        raise Refused(f"{store.folder} has no copies", fix="ntp copies list shows where there are some")
    last = max(holders_of, key=lambda version: (version.step, version.epoch))
    there = [place for place, version, _ in store.versions() if version == last and place.kind != PARITY]
    missing = holders_of[last] - {place.slot for place in there}
    raise Refused(
        f"this host ({store.folder}) lacks parts of {last}: those of slots {', '.join(map(str, sorted(missing)))}",
        fix="ntp run --ntp-resume latest --save on all hosts that have parts of it; or keep far copies"
        " (--ntp-copies-far) so that each host has all",
    )


def take(store: Store, into: Store) -> Version:
    """Copy the newest version of one store into the other, which is empty."""
    tried: list[str] = []
    for _ in range(_ATTEMPTS):
        version = newest(store)
        places = _what_is_needed(store, version)
        _require_room(store, into, places)
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda place: store.copy(place, into), places))
        if restore.restorable([restore.describe(into)]) == [version]:  # and not a newer one for some slots
            return version
        tried.append(str(version))
        into.forget_all()
    raise NtpError(
        f"{store.folder}: each version was overwritten before it could be copied ({', '.join(tried)})",
        fix="--ntp-copies-lag-steps in the run makes each stay longer; or export when the run has ended",
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
            fix="make shared memory larger (mount -o remount,size=... /dev/shm), or export when the run has ended",
        )
