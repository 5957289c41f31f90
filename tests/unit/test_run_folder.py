"""A run's folder is removed with the run, also if the run is killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ntp_plugin.launch.run_folder import RunFolder, free, left_by_the_dead

KILLED = """
import os, signal, sys
from pathlib import Path
from ntp_plugin.launch.run_folder import RunFolder
RunFolder("run-", Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_is_not(tmp_path):
    code = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode
    assert code == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    first = RunFolder("run-", tmp_path)
    assert not left.exists()
    second = RunFolder("run-", tmp_path)
    assert set(tmp_path.iterdir()) == {first.path, second.path}
    first.remove()
    second.remove()
    assert not any(tmp_path.iterdir())


def test_foreign_folders_are_left_alone(tmp_path):
    other = tmp_path / "run-of-somebody-else"
    other.mkdir()
    RunFolder("run-", tmp_path).remove()
    assert list(tmp_path.iterdir()) == [other]


def test_its_lock_is_not_handed_to_children(tmp_path):
    folder = RunFolder("run-", tmp_path)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        held = [str(descriptor.resolve()) for descriptor in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert not [path for path in held if path.startswith(str(folder.path))]
    finally:
        child.kill()
        child.wait()
        folder.remove()


def test_reading_the_folder_of_a_dead_run_does_not_mark_it_alive(tmp_path):
    folder = RunFolder("run-", tmp_path)
    assert not list(left_by_the_dead(tmp_path, "run-"))
    folder.leave()
    for _ in left_by_the_dead(tmp_path, "run-"):  # it is being looked at
        assert list(left_by_the_dead(tmp_path, "run-")) == [folder.path]
        with pytest.raises(BlockingIOError), free(folder.path):
            pass


def test_a_folder_in_use_is_not_removed(tmp_path):
    folder = RunFolder("run-", tmp_path)
    folder.leave()
    with free(folder.path, shared=True):
        RunFolder("run-", tmp_path).remove()
        assert folder.path.exists()
    RunFolder("run-", tmp_path).remove()
    assert not folder.path.exists()
