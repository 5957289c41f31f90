"""Ranks that can be started, killed, frozen and started again, for tests and for rehearsals of a recipe.

ranks.py      real processes with a real store, and a supervisor that publishes deaths
faults.py     what can happen to a rank, and when
harm.py       what a process can do to itself
twin.py       whether a job that lost ranks trained what its undisturbed twin trained
stateless.py  a trainer with nothing to train
machines.py   several machines in one, with wires that can be cut
leaks.py      what a rehearsal must not leave behind
signal_handlers.py  a script with signal handlers that hang, raise, exit, or hold the interpreter lock
"""
