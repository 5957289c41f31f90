"""The `ntp` command line: parses flags, calls the package that does the work, and prints its result.

main.py            all commands; turns an error into one line and an exit code
parser.py          the argument parser; reports a mistake in one line
configured.py      reads the settings of a command from a file and from flags
run.py             `ntp run`: starts a job as torchrun does, and keeps it running when a rank is lost
status.py          `ntp status`: shows a running job
report.py          `ntp report`: writes a page about a run, from its record
screen.py          draws the slots of a job as a grid in the terminal, and updates it
copies.py          `ntp copies`: lists, verifies and removes the copies of training state on this host
export.py          `ntp copies export`: writes copies as a checkpoint of the framework
store.py           `ntp store`: runs the store of a job on a machine of its own
check.py           `ntp check`: says whether a job is accepted, and which losses it survives
check_tables.py    prints a check as tables
plan.py            `ntp plan`: shows what every survivor would do if slots were lost
plan_tables.py     prints a plan as tables
simulate.py        `ntp simulate`: shows what losses cost, policy by policy
simulate_tables.py prints a simulation as tables
simulate_plots.py  draws a simulation as a figure
chaos.py           `ntp chaos`: runs a job with the faults of a recipe, or injects faults into a running job
chaos_outside.py   `ntp chaos outside`: sends signals to a job that is started by its own command line

Read next: `launch/`, which does the work of `ntp run`.
"""
