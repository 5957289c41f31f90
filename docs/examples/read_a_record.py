"""How long each recovery of a run took, from its record.

python docs/examples/read_a_record.py runs/today
"""

import sys
from pathlib import Path

from ntp_plugin.errors import NtpError
from ntp_plugin.telemetry import Committed, RankLost, Recovered, read_run

try:
    record = read_run(Path(sys.argv[1]))
except NtpError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)

for entry in record:
    if isinstance(entry.event, RankLost):
        print(f"rank {entry.event.number} lost: {entry.event.reason}")
    elif isinstance(entry.event, Recovered):
        print(f"{entry.slot} went on after {entry.event.seconds:.2f} s, without {', '.join(entry.event.lost)}")
steps = {entry.event.step for entry in record if isinstance(entry.event, Committed)}
print(f"{len(steps)} steps committed")
