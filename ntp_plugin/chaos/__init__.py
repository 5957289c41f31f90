"""Inject faults into a training job and check that it trains what it trains without them: `ntp chaos`, `ntp report`.

    recipe.py          read a recipe of recipes/chaos/: the job, and the faults to inject
    schedule.py        PURE: decide which fault comes next, from what the job has recorded so far
    faults.py          one fault, and the file that orders it
    fault_injector.py  write the orders, and send the signals
    attach.py          inject faults into a job that already runs
    worker.py          in a worker process: inject an ordered fault at its fault point
    hosting.py         run a campaign's job: on this machine, or on several emulated ones
    campaign.py        run a recipe: the job with faults, then the reference run
    ending.py          end a command on SIGINT, SIGTERM or SIGHUP, at its waits only
    history.py         the events of a run, by step and by recovery
    weights.py         PURE: compare the final weights with the reference run's
    verdict.py         PURE: decide what came of each fault, and whether the training is the reference run's
    charts.py          draw the charts of a report
    page.py            write the report: an HTML page, and the verdict as JSON
    outside/           inject faults by signals alone, into a job without fault points

How a fault is injected. A recipe is a list of faults: kind, slot, fault point. The campaign starts `ntp run
--ntp-run-dir FOLDER --ntp-chaos`, so every worker runs its script through `worker.py`, and the campaign appends orders
to a file in that folder. At each fault point of the job (`recovery/fault_points.py`) a worker checks the size of the
file and reads new orders. If an order is for this slot and fault point, the worker first records it, then carries it
out. Faults that need another process, such as a signal to a rank that does not cooperate, are carried out by the
campaign. The verdict uses the record alone: it can be made again from the folder of a run, on any machine.

Security: no port is opened. Whoever can write the orders file can break the job. The file is in the folder of the run,
only its owner can read or write it, and every order repeats the token in its first line.

Read next: `recipe.py`, then `campaign.py`.
"""
