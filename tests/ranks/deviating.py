"""A recipe in which one process starts with other settings than the others: DEVIANT names its slot and the difference.

DEVIANT is SLOT:joining or SLOT:founding, then words for the script, VARIABLE=VALUE pairs, or version=V.
"""

import os
import runpy
import sys

import ntp_plugin

slot, when, *ways = os.environ["DEVIANT"].replace(":", " ").split()
if (os.environ["RANK"], when) == (slot, "joining" if os.environ.get("NTP_INCARNATION") else "founding"):
    for way in ways:
        name, is_pair, value = way.partition("=")
        if name == "version":
            ntp_plugin.__version__ = value
        elif is_pair and not way.startswith("--"):
            os.environ[name] = value
        else:
            sys.argv.append(way)
runpy.run_path(os.environ["PLAYED"], run_name="__main__")
