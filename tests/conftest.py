"""Settings of all tests."""

import os
import sys

from hypothesis import HealthCheck, settings

# CI looks at the same examples every time; at a desk each run looks at new ones and prints what it took to fail.
settings.register_profile("desk", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("desk"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_runtest_teardown():
    """End the commands that a test has started, whether it failed or not."""
    command = sys.modules.get("tests.ranks.command")  # only tests that need it import it
    while command is not None and command.Command.started:
        command.Command.started.pop().stop()
