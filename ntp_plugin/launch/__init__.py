"""Who looks after the ranks of a host.

    heartbeat.py    the file in shared memory through which ranks tell that they live and move
    supervisor.py   watches processes and heartbeats, and publishes who is gone

`ntp run`, which starts the ranks, is not built yet.
"""
