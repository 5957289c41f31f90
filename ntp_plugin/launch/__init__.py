"""Starts the workers of a host, watches them, and replaces those that are lost: the work of `ntp run`.

agent.py              runs a job as torchrun's agent does, but does not stop the other workers when one dies
supervisor.py         watches the processes and heartbeats of a host, and publishes which ranks are lost
hosts.py              watches the other hosts of the job through the job's store
host_membership.py    decides which host of the job this machine is: a founder, or the replacement of a lost host
reachability.py       tests whether hosts can connect to each other
job_store.py          starts the job's store, and decides the token that the hosts share
signed_rendezvous.py  signs the state of torch's rendezvous, and refuses state that no process of the job has written
torchrun_flags.py     checks torchrun's flags and the script before anything starts
recording.py          writes the record of a run, and starts the relay to Weights & Biases and Prometheus
records.py            keeps the record of a run that was given no folder, and finds the newest one
run_folder.py         makes the folder of a run in shared memory, and finds the folders of dead runs
kept_copies.py        decides how long the copies of a dead run stay
started_by.py         writes the command line of a run beside its copies
script_errors.py      ends the job on all hosts when a rank fails by an error of its own script
script.py             runs a worker's script, with hooks in the framework that it imports
accelerate_on_cpu.py  lets accelerate start a DeepSpeed job on a machine without accelerators
spares.py             keeps warm spare processes with imports done, which become workers on demand
fork_server.py        forks workers from one process that has done the imports
bound.py              starts a process that the kernel kills when its supervisor dies
reaper.py             kills the descendants of workers when the supervisor was killed
process_end.py        sends a signal to a worker and its process group
quick_exit.py         ends a process without Python's teardown

Read next: `membership/`, whose failure detector and protocol the supervisor uses.
"""
