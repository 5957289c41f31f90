"""On which machine a process is, so that whoever reads its number in a record knows whether he may look for it."""

from pathlib import Path

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
