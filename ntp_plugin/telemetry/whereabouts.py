"""On which machine a process is, so that whoever reads its number in a record knows whether he may look for it."""

from pathlib import Path

from ntp_plugin.telemetry.job_state import JobState

_PROC = Path("/proc")


def here() -> str:
    """Where numbers of processes mean what they mean to this one: the kernel since its start, and the namespace in it.
    Empty where the system does not say."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether there is such a process here that has not ended."""
    try:
        state = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def nobody_is_left(job: JobState) -> bool:
    """Of those who are told of; never where some are on another machine, of which nothing is known."""
    on_this_one = bool(here()) and set(job.machines.values()) == {here()}
    return on_this_one and not any(is_alive(pid) for pid in job.pids.values())
