"""A job whose output is no longer read ends as it would have ended."""

import os
import subprocess
import sys

SCRIPT = """
import os, sys
from ntp_plugin.cli import main as entry, run
from ntp_plugin.launch import agent

def unread(words):
    agent._say("what nobody reads")
    return 5

run.run = unread
code = entry.main(["run", "x.py"])
os._exit(code)
"""


def test_the_exit_code_is_the_jobs():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", SCRIPT], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.returncode == 5, done.stderr
