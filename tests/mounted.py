"""A file system of a given size, for tests of a full disk."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def disk(folder, size):
    """Mounted there; the test is skipped for who may not mount."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("only root can mount a file system that is small")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
