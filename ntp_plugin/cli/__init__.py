"""The `ntp` command.

main.py          the commands, and how an error becomes one line and an exit code
parser.py        a parser that complains in one line
configured.py    what a command is asked for by a file and by flags
plan.py          `ntp plan`: from words to a plan
plan_tables.py   a plan as tables on a terminal
run.py           `ntp run`: our flags, the rest is torchrun's
store.py         `ntp store`
copies.py        `ntp copies`; export.py is one of its commands
simulate.py      `ntp simulate`: from a scenario to what losses cost; simulate_tables.py and simulate_plots.py show it
chaos.py         `ntp chaos`: a recipe, or a strike at a job that runs
chaos_outside.py  `ntp chaos outside`: faults by signals alone, into a job that is started as a user starts it
status.py        `ntp status`; report.py: `ntp report`
screen.py        a job as a grid that changes while one looks
"""
