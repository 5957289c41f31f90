"""A file system of so many bytes, for tests of a disk that is full."""

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
