"""Copies of dead runs are kept for a time, and the oldest are removed earlier if a new run needs the room."""

import dataclasses
import os
import time
from pathlib import Path

import pytest

from ntp_plugin.cli import copies as cli_copies
from ntp_plugin.cli import run as cli_run
from ntp_plugin.cli.main import main
from ntp_plugin.errors import ConfigError
from ntp_plugin.launch import kept_copies
from ntp_plugin.launch.kept_copies import DAY_S, DeadRun, Room, dead_run, in_words, new_folder, to_remove
from ntp_plugin.launch.run_folder import COPIES, RunFolder, free

NOW = 1_000_000.0
HOUR, MB = 3600.0, 1_000_000
PLENTY = Room(free=1000 * MB, total=1000 * MB)


def dead(name, hours, *, keep_h=24.0, mb=10):
    return DeadRun(folder=Path(name), died_at=NOW - hours * HOUR, keep_s=keep_h * HOUR, size=mb * MB)


def names(runs, *, room=PLENTY, spared=()):
    return [folder.name for folder in to_remove(runs, spared, now=NOW, room=room)]


def test_each_stays_for_its_own_time():
    runs = [
        dead("young", 1),
        dead("old", 23.9),
        dead("past", 24),
        dead("long", 40, keep_h=48),
        dead("none", 0, keep_h=0),
    ]
    assert names(runs) == ["past", "none"]
    goes = to_remove(runs, [], now=NOW, room=PLENTY)
    assert goes[Path("past")] == "its run has been dead for 1 d, and its copies were to stay for 1 d"


def test_a_run_without_copies_is_removed():
    assert names([dataclasses.replace(dead("empty", 0), died_at=0.0, size=0)]) == ["empty"]


def test_the_oldest_are_removed_until_the_room_of_the_largest_is_free():
    runs = [dead("new", 1, mb=100), dead("oldest", 9, mb=100), dead("older", 5, mb=300), dead("tiny", 8, mb=1)]
    for unused, removed in (
        (300, []),
        (299, ["oldest"]),
        (150, ["oldest", "tiny", "older"]),
        (0, ["oldest", "tiny", "older"]),
    ):
        assert names(runs, room=Room(free=unused * MB, total=400 * MB)) == removed, unused
    assert names(runs, room=Room(free=0, total=4000 * MB)) == ["oldest", "tiny", "older", "new"], "a quarter of all"
    reason = to_remove(runs, [], now=NOW, room=Room(free=299 * MB, total=400 * MB))[Path("oldest")]
    assert reason == (
        "the oldest dead run (9 h dead) takes 100.0 MB, 299.0 MB are free, and this run may need 300.0 MB"
    )


def test_expired_runs_are_removed_before_others():
    runs = [dead("past", 30, mb=100), dead("old", 20, mb=100)]
    assert names(runs, room=Room(free=0, total=400 * MB)) == ["past"]


def test_spared_runs_stay_and_the_needed_room_is_reported():
    runs, resumed = [dead("other", 1, mb=50)], dead("resumed", 20, mb=300)
    assert names(runs, spared=[resumed], room=Room(free=299 * MB, total=400 * MB)) == ["other"]
    assert names(runs, spared=[resumed], room=Room(free=300 * MB, total=400 * MB)) == []


def test_durations_in_words():
    texts = {
        0: "0 s",
        59.9: "59 s",
        60: "1 min",
        3661: "1 h 1 min",
        86399: "23 h 59 min",
        90000.5: "1 d 1 h",
        -5: "0 s",
    }
    assert {seconds: in_words(seconds) for seconds in texts} == texts


# ---------------------------------------------------------------- on a disk


@pytest.fixture
def shared(tmp_path, monkeypatch):
    for module in (kept_copies, cli_copies, cli_run):
        monkeypatch.setattr(module, "shared_memory", lambda: tmp_path)
    monkeypatch.setattr(kept_copies, "room_in", lambda _: PLENTY)
    monkeypatch.setenv("COLUMNS", "250")
    return tmp_path


def log_of(keep_s=DAY_S, spares=lambda _: False):
    messages = []
    return new_folder(keep_s=keep_s, spares=spares, log=messages.append), messages


def left(*, hours, keep_s=DAY_S, size=1000):
    """Create the copies of a run that died so long ago."""
    run, _ = log_of(keep_s)
    (run.path / "host-0").mkdir(mode=0o700)
    (run.path / "host-0/near-0-e0-0").write_bytes(bytes(size))
    manifest = run.path / "host-0/near-0-e0-0.json"
    manifest.write_text("")
    os.utime(manifest, (time.time() - hours * HOUR,) * 2)
    run.leave()
    return run.path


def test_a_new_run_keeps_copies_that_another_job_may_resume(shared):
    """Earlier any next run of the same user removed it."""
    waits, short = left(hours=2), left(hours=2, keep_s=HOUR)
    run, messages = log_of()
    assert set(shared.iterdir()) == {waits, run.path}
    assert messages == [f"removing {short}: its run has been dead for 2 h, and its copies were to stay for 1 h"]
    run.remove()


def test_removed_copies_are_reported(shared):
    past = left(hours=25)
    run, messages = log_of()
    assert messages == [f"removing {past}: its run has been dead for 1 d 1 h, and its copies were to stay for 1 d"]
    run.remove()


def test_the_resumed_run_stays_at_any_age(shared):
    old = left(hours=400)
    run, messages = log_of(spares=lambda folder: folder == old)
    assert (old.exists(), messages) == (True, [])
    run.remove()


def test_the_keep_time_is_stored_with_the_run_and_defaults_to_a_day(shared):
    folder = left(hours=0, keep_s=12.5)
    assert dead_run(folder).keep_s == 12.5
    for text in ("", "nan", "-1", "inf", "soon"):
        (folder / "keep-s").write_text(text)
        assert dead_run(folder).keep_s == DAY_S, text
    (folder / "keep-s").unlink()
    assert dead_run(folder).keep_s == DAY_S


def test_a_run_folder_is_described(shared):
    found = dead_run(left(hours=1, size=100_000))
    assert found.died_at == pytest.approx(time.time() - HOUR, abs=600)
    assert 100_000 <= found.size < 120_000
    empty = RunFolder(COPIES, shared, sparing=lambda _: True)
    assert (dead_run(empty.path).died_at, dead_run(empty.path).size) == (0.0, 0)
    empty.remove()


def test_there_is_a_room():
    room = kept_copies.room_in(Path("/dev/shm"))
    assert room.free >= 0
    assert room.total > 0


def test_latest_is_the_one_that_died_last(shared):
    """Not the run with the newest folder, which may have died before."""
    last, first = left(hours=1), left(hours=3)
    assert cli_run._resumed("latest") == last
    assert cli_run._resumed(str(first)) == first


def test_a_resuming_run_locks_the_folder_or_reports_that_it_cannot(shared):
    first = left(hours=1)
    with cli_run._held(first), pytest.raises(BlockingIOError), free(first):
        pass
    with (
        free(first),
        pytest.raises(ConfigError, match="another command is exporting or removing it"),
        cli_run._held(first),
    ):
        pass
    with cli_run._held(None):
        pass


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("90", 90), ("90s", 90), ("1.5m", 90), ("12h", 43200), ("2d", 2 * DAY_S)]
)
def test_how_long_is_written(text, seconds):
    assert cli_run._seconds("--ntp-copies-keep", text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1", "1w", "1e3", "1 d", "soon", "nan", "9" * 10])
def test_invalid_durations_are_refused(text, capsys):
    with pytest.raises(ConfigError, match="is not a duration"):
        cli_run._seconds("--ntp-copies-keep", text)
    assert main(["run", f"--ntp-copies-keep={text}", "train.py"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_copies_that_are_being_resumed_are_not_cleaned(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli_copies, "shared_memory", lambda: tmp_path)
    left = RunFolder(COPIES, tmp_path)
    left.leave()
    with free(left.path, shared=True):
        assert main(["copies", "clean"]) == 0
        assert left.path.exists()
    assert "a run resumes from it" in capsys.readouterr().out
    assert main(["copies", "clean"]) == 0
    assert not left.path.exists()
