"""The `ntp` command.

main.py          the parser, and how an error becomes one line and an exit code
plan.py          `ntp plan`: from words to a plan
plan_tables.py   a plan as tables on a terminal
simulate.py      `ntp simulate`: from a scenario to what losses cost; simulate_tables.py and simulate_plots.py show it
"""
