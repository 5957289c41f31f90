"""Ends the job on all hosts because of one rank.

The rank failed by an error of its own script (`--ntp-on-error`; `recovery/script_failure.py` decides). Or it was lost
before others had begun to train, and nothing would ever interrupt their wait. The supervisor of its host writes the
reason to the job's store, and the supervisors of the other hosts look for it there. Each host confirms that it has read
the reason, so that the host of the store does not end before.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from ntp_plugin.errors import NotStarted, ScriptError, StoreLost
from ntp_plugin.membership.protocol import MemberId
from ntp_plugin.membership.store import KeyStore
from ntp_plugin.recovery.script_failure import OnError, ScriptFailure, ends_the_job, forget, read_code, read_failure

_KEY = "script error"
_ERROR, _REPEATED, _NOT_STARTED = "error", "repeated error", "not started"
_LOOK_S = 0.25
"""Seconds between two looks into the store for the reason of another host."""
_POLL_S = 0.02
BESIDE_S = 10.0
"""A failure within this time after a loss may be its consequence: it counts only when it comes again."""


class ScriptErrors:
    """Decides for a supervisor whether a failed rank ends the job. It is used on the supervisor's thread."""

    def __init__(
        self,
        store: KeyStore,
        folder: Path,
        *,
        on_error: OnError,
        host: int,
        hosts: int,
        log: Callable[[str], None],
    ) -> None:
        """`folder` is where the workers of this host write their failures."""
        self._store, self._folder, self._on_error, self._log = store, folder, on_error, log
        self._host, self._hosts = host, hosts
        self._looks_at = 0.0

    def forget(self, pid: int) -> None:
        """Remove the report of a process that was replaced: a later process may get the same pid."""
        forget(self._folder, pid)

    def judge(
        self, member_id: MemberId, pid: int, *, is_member: bool, beside_a_loss: bool, others_are_done: bool
    ) -> None:
        """Read the report of a lost process.

        Args:
            member_id: The rank.
            pid: Its process.
            is_member: Whether the rank has joined the job.
            beside_a_loss: Whether another rank was lost within `BESIDE_S`.
            others_are_done: Whether other ranks have come to the end of the job.

        Raises:
            ScriptError: Its failure ends the job.
        """
        failure = read_failure(self._folder, pid)
        if failure is None:
            return
        again = self._on_error != "evict" and self._has_failed_before(failure, member_id, is_member=is_member)
        if ends_the_job(
            failure,
            on_error=self._on_error,
            again=again,
            is_member=is_member,
            beside_a_loss=beside_a_loss,
            others_are_done=others_are_done,
        ):
            self._log(f"slot {member_id.slot} (pid {pid}) failed:\n{failure.traceback.rstrip()}")
            self._end_by(
                self._store.create(_KEY, json.dumps([_REPEATED if again else _ERROR, member_id.slot, failure.in_words]))
            )
        self._log(f"slot {member_id.slot} failed, and is taken for lost: {failure.in_words}")

    def refuse_to_begin(self, slot: int, reason: str) -> None:
        """End the job because a slot is lost while others, which have not begun to train, wait for it.

        Raises:
            NotStarted: Always, unless the job has been ended for another reason before.
        """
        self._end_by(self._store.create(_KEY, json.dumps([_NOT_STARTED, slot, reason])))

    def code_of(self, pid: int) -> int | None:
        """Return the exit code that a worker of this host has written before its end, if it has."""
        return read_code(self._folder, pid)

    def look(self, now: float) -> None:
        """Look whether another host has ended the job, and raise its `ScriptError` or `NotStarted`."""
        if self._hosts == 1 or now < self._looks_at:
            return
        self._looks_at = now + _LOOK_S
        if (reason := self._store.read(_KEY)) is not None:
            self._end_by(reason)

    def wait_for_other_hosts(self, seconds: float) -> None:
        """Wait until all hosts have read the reason, or the time is over."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(StoreLost):  # the host of the store has read it, and has ended
            while time.monotonic() < deadline:
                if self._store.present([f"{_KEY}/{host}" for host in range(self._hosts)]):
                    return
                time.sleep(_POLL_S)

    def _has_failed_before(self, failure: ScriptFailure, member_id: MemberId, *, is_member: bool) -> bool:
        """Whether another process has failed alike. A process that never joined is not recorded."""
        if failure.by_a_fault:
            return False
        digest = hashlib.blake2b(failure.identity.encode(), digest_size=8).hexdigest()
        key, mine = f"{_KEY}/like/{digest}", f"{member_id.slot} {member_id.incarnation}"
        before = self._store.create(key, mine) if is_member else self._store.read(key)
        return before not in (None, mine)

    def _end_by(self, reason: str) -> None:
        self._store.create(f"{_KEY}/{self._host}", "known")
        cause, slot, in_words = json.loads(reason)
        if cause == _NOT_STARTED:
            raise NotStarted(
                f"slot {slot} was lost before all others had begun to train, and these wait for it: {in_words}",
                fix="start the job again; nothing was trained",
            )
        repeated = ", which another process had before" * (cause == _REPEATED)
        raise ScriptError(
            f"slot {slot} ended by an error of its own script{repeated}: {in_words}",
            fix="fix the script and start again from the last checkpoint or from copies (ntp copies list);"
            " with --ntp-on-error retry or evict the job goes on without the rank",
        )
