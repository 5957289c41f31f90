"""Who looks after the ranks of a host, and the hosts of a job.

torchrun_flags.py  torchrun's part of the command line, checked before anything starts
agent.py        `ntp run`: torchrun's agent, but a dead worker does not end its siblings
supervisor.py   watches processes and heartbeats, publishes who is gone, tells the ranks of new epochs
hosts.py        the hosts of a job, as each sees the others through the job's store
host_membership.py      which host of the job this machine is: its founder, a spare, or in the place of a lost one
job_store.py    where the job's store listens, and the token that hosts share
signed_rendezvous.py  torch's rendezvous reads only what a process of the job has written
reachability.py       whether hosts can connect to each other
recording.py      what a run tells, and to whom
records.py      the record of a run that was told no folder for it
started_by.py   the command of a run, left beside its copies
run_folder.py   the folder of a run in shared memory, and those that dead ones have left
kept_copies.py  how long the copies of a dead run stay, and which go where room is needed
script_errors.py  a rank that fails by an error of its own script ends the job
spares.py       processes that have done their imports, and wait to be told which worker to be
fork_server.py      one that has done them too, and forks workers
bound.py        how a process is started that ends with its supervisor; reaper.py ends what those have started
process_end.py  the end of a worker, with whatever it has started
script.py       a worker's script, with the hooks in the framework that it imports
quick_exit.py   the end of a process without Python's teardown
"""
