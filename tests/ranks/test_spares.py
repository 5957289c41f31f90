"""A warm spare becomes the worker whose place it takes."""

from ntp_plugin.launch.spares import Spare

SHOWS = """
import os, sys
print(sys.argv[1:], os.environ["LOCAL_RANK"])
"""


def test_it_has_the_arguments_and_the_environment_of_that_worker(tmp_path):
    """torch puts a worker's local rank into its arguments: `--local_rank=${local_rank}`."""
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(SHOWS)
    spare = Spare(["-m", "ntp_plugin.launch.script", str(script), "--local_rank=0"])
    words = ["-u", "-m", "ntp_plugin.launch.script", str(script), "--local_rank=2"]
    spare.become(words, {"LOCAL_RANK": "2"}, str(output), None)
    assert spare.proc.wait(timeout=120) == 0
    assert output.read_text() == "['--local_rank=2'] 2\n"
