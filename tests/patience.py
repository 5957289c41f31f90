"""How long a test waits for what must happen, and for what must not.

Only a test that hangs ends by `PATIENCE_S`. A test waits for anything that is slow on a busy machine: a test of speed
counts operations, and reads no clock.
"""

import time

PATIENCE_S = 600.0
HUNG_S = 3.0
"""A limit for hung ranks in tests: they are found soon, and no other rank comes near it, e.g. waiting for a busy
store."""


def until(condition, seconds=PATIENCE_S):
    """Wait until another thread or process has had an effect."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)
