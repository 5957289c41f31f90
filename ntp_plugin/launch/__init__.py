"""Who looks after the ranks of a host.

supervisor.py   watches processes and heartbeats, and publishes who is gone
agent.py        `ntp run`: torchrun's agent, but a dead worker does not end its siblings
"""
