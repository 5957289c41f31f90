"""Breaking a job on purpose, and seeing what comes of it.

    recipe.py     what a file of recipes/chaos/ says: the job, and what is to break in it
    schedule.py   PURE: which strike comes next, by what the job has told so far
    faults.py    one strike, and the file by which it is ordered
    fault_injector.py  gives the orders, and sends the signals
    attach.py     a strike at a job that runs already
    worker.py     in a worker: strikes by its own hand, at the moment that the order names
    hosting.py    where a job runs: here, or on several machines made for it
    campaign.py   runs the job and the undisturbed reference run
    ending.py     where a command that breaks jobs ends, if it is asked to
    history.py    what a run has told, step by step and recovery by recovery
    weights.py    PURE: how far the weights are from the reference run's
    verdict.py    PURE: what came of each strike, and whether the training is the reference run's
    charts.py    the pictures
    outside/      faults by signals alone, into a job that carries no fault points
    page.py       the page that holds all of it, and the table for the terminal

The way of a strike. A recipe is a list of faults: what, on which slot, at which moment. The campaign starts `ntp run
--ntp-run-dir FOLDER --ntp-chaos`, which has every worker run its script through `worker.py`, and appends orders to a
file in that folder. A worker looks at the file's size at each of the job's moments (`recovery/fault_points.py`), reads
what is new, and where an order is for this slot and this moment it first tells the record of the run, and then does
it. What has to come from outside, a signal to a process that does not cooperate, the campaign does itself. The record
is all that is looked at afterwards: a verdict can be made again from the folder of a run, on any machine.

Nothing listens anywhere. Whoever may write the file may break the job: it lies in the folder of the run and is its
owner's alone, and holds the token of the run, which every order repeats.
"""
