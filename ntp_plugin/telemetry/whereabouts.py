"""Tells on which machine a process runs, so that the reader of a record knows whether a pid is one of its own."""

from pathlib import Path

from ntp_plugin.telemetry.job_state import JobState

_PROC = Path("/proc")


def here() -> str:
    """Identify the space in which this process's pids are valid: the boot of the kernel, and the pid namespace.
    Empty if the system does not provide them."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """True if a process with this pid exists here and has not ended."""
    try:
        state = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def all_have_ended(job: JobState) -> bool:
    """True if all recorded processes have ended. False if some ran on another machine, where this one cannot look."""
    on_this_one = bool(here()) and set(job.machines.values()) == {here()}
    return on_this_one and not any(is_alive(pid) for pid in job.pids.values())
