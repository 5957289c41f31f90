"""How long a test waits for what must come.

Only a test that hangs ends by it. Whatever else takes longer than it should on a busy machine is still waited for: a
test that is to show how fast something is counts what it does, and asks no clock.
"""

PATIENCE_S = 600.0
