"""A recipe whose pauses between steps are over once a file is there: what a test waits for has happened by then.

GO_ON=FILE python paused.py    with the RECIPE in the environment
"""

import os
import runpy
import sys
import time
from pathlib import Path

go_on, sleep = Path(os.environ["GO_ON"]), time.sleep


def pause(seconds):
    is_the_recipes = sys._getframe(1).f_globals["__name__"] == "__main__"
    if not (is_the_recipes and go_on.exists()):
        sleep(seconds)


time.sleep = pause
runpy.run_path(os.environ["RECIPE"], run_name="__main__")
