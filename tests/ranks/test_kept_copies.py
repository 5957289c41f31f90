"""`ntp run` beside copies that a dead run of another job has left in this host's memory."""

import shutil

from ntp_plugin.launch.kept_copies import dead_run
from ntp_plugin.launch.run_folder import COPIES, RunFolder
from tests.ranks.command import NTP, Command


def test_a_run_leaves_the_copies_of_another_job_that_has_just_died(tmp_path):
    run = RunFolder(COPIES, sparing=lambda _: True)
    (run.path / "host-0").mkdir(mode=0o700)
    for name in ("near-0-e0-0", "near-0-e0-0.json"):
        (run.path / "host-0" / name).write_text("{}")
    run.leave()
    try:
        (tmp_path / "train.py").write_text("print('trained')")
        words = [*NTP, "run", "--standalone", "--nproc-per-node", "1", str(tmp_path / "train.py")]
        code, output = Command(words, tmp_path / "log").end()
        assert (code, "trained" in output) == (0, True), output
        assert dead_run(run.path).size, output
        assert f"removing {run.path}" not in output
    finally:
        shutil.rmtree(run.path, ignore_errors=True)
