"""End the job on all hosts because of one rank.

It failed by an error of its own script (`--ntp-on-error`; `recovery/script_failure.py` decides), or it was lost while
others had not begun to train, which nothing would ever interrupt. The supervisor of its host writes that to the job's
store, and those of the other hosts look for it there. Each host says that it has seen it, so that the one that keeps
the store does not take it away before.
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
"""Between two looks at the store for what another host has found."""
_POLL_S = 0.02
BESIDE_S = 10.0
"""A failure that comes within this time after a loss may be its consequence: it counts when it comes again."""


class ScriptErrors:
    """One for each supervisor, on its thread."""

    def __init__(
        self,
        store: KeyStore,
        folder: Path,
        *,
        on_error: OnError,
        host: int,
        hosts: int,
        said: Callable[[str], None],
    ) -> None:
        """`folder` is where the workers of this host report."""
        self._store, self._folder, self._on_error, self._said = store, folder, on_error, said
        self._host, self._hosts = host, hosts
        self._looks_at = 0.0

    def forget(self, pid: int) -> None:
        """The place of this process is taken by another: what it reported must not be laid to a later one of its
        number."""
        forget(self._folder, pid)

    def judge(
        self, member_id: MemberId, pid: int, *, is_member: bool, beside_a_loss: bool, others_are_done: bool
    ) -> None:
        """What a process that is found lost has reported; raises `ScriptError` where that ends the job."""
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
            self._said(f"slot {member_id.slot} (pid {pid}) failed:\n{failure.traceback.rstrip()}")
            self._end_by(
                self._store.create(_KEY, json.dumps([_REPEATED if again else _ERROR, member_id.slot, failure.in_words]))
            )
        self._said(f"slot {member_id.slot} failed, and is taken for lost: {failure.in_words}")

    def refuse_to_begin(self, slot: int, reason: str) -> None:
        """End the job because a slot is lost that others, who have not begun to train, would wait for without end.

        Raises:
            NotStarted: Always, unless the job has been ended for another reason before.
        """
        self._end_by(self._store.create(_KEY, json.dumps([_NOT_STARTED, slot, reason])))

    def code_of(self, pid: int) -> int | None:
        """The exit code that a worker of this host was about to end with, if it has said so."""
        return read_code(self._folder, pid)

    def look(self, now: float) -> None:
        """Whether another host has ended the job; raises `ScriptError` or `NotStarted` then."""
        if self._hosts == 1 or now < self._looks_at:
            return
        self._looks_at = now + _LOOK_S
        if (told := self._store.read(_KEY)) is not None:
            self._end_by(told)

    def wait_for_other_hosts(self, seconds: float) -> None:
        """Until all of them know, or have had so long."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(StoreLost):  # whoever keeps it knows
            while time.monotonic() < deadline:
                if self._store.present([f"{_KEY}/{host}" for host in range(self._hosts)]):
                    return
                time.sleep(_POLL_S)

    def _has_failed_before(self, failure: ScriptFailure, member_id: MemberId, *, is_member: bool) -> bool:
        """A process that never joined counts for nobody but itself: it leaves no trace."""
        if failure.by_a_fault:
            return False
        digest = hashlib.blake2b(failure.identity.encode(), digest_size=8).hexdigest()
        key, mine = f"{_KEY}/like/{digest}", f"{member_id.slot} {member_id.incarnation}"
        before = self._store.create(key, mine) if is_member else self._store.read(key)
        return before not in (None, mine)

    def _end_by(self, told: str) -> None:
        self._store.create(f"{_KEY}/{self._host}", "known")
        cause, slot, in_words = json.loads(told)
        if cause == _NOT_STARTED:
            raise NotStarted(
                f"slot {slot} was lost before all others had begun to train, and these wait for it: {in_words}",
                way_out="start the job again; nothing was trained",
            )
        repeated = ", which another process had before" * (cause == _REPEATED)
        raise ScriptError(
            f"slot {slot} ended by an error of its own script{repeated}: {in_words}",
            way_out="mend the script and start again from the last checkpoint or from copies (ntp copies list);"
            " --ntp-on-error retry or evict goes on without the rank instead",
        )
