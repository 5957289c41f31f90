"""Copies that are not what was written, and who notices: what `make show-corruption` measures.

    python -m benchmarks.corruption             3,900 injections and 2,000 clean restores, some minutes
    SCALE=ci python -m benchmarks.corruption    the slice for CI: 260 and 100
    SEED=7 python -m benchmarks.corruption      another draw

Four slots on three hosts, as threads of one process, copy two versions of a small state with the code that real jobs
use: stores in shared memory, servers, replicators, one far copy of each part. Then some slots are lost, and the others
restore the second version into another layout, whose parts are uneven. Two slots share a host; with two hosts in all
each would have a copy of everything, and nothing would be read across. Of a slot that is lost with its host only the
far copy is left, of one that is lost alone its near copy is read by its neighbour.
The threads of a lost slot stay, and nobody asks them.

Two tensors are of more than three pages of a digest, one cut by rows and one by columns, so that the keys of pages take
part in what is found; each row says how many of its injections hit one of these. What has the same place in two pages
is exchanged as well: only the pages' keys tell that.

An injection changes the files as they lie in shared memory. Who reads what, and so which copies have to be named as
broken, is foreseen by a model of its own on sets of elements (`foresee`). What is injected is such that somebody would
read it. It is

    found           if all members name exactly the copies that the model names, and are told of each; a file that is
                    cut short is among these, and is not read at all
    right source    if then all members have the bits of that version, from other copies

In a tenth of the trials all copies of a part are hit. There it is found if all members say that the version is lost and
name the copies, and the right source is the version before, whose bits they must have then.

A clean restore is a false alarm if anybody is told of trouble, a copy is named, anything raises or a bit differs. As
negative controls the digests are not compared where copies are read, and not in the end either: this has to be seen.

    state.py        four slots, their copies, and what their values have to be
    restores.py     a restore by all members, and the model of it
    injections.py   what is done to copies
    parities.py     the same where slots share a parity in place of far copies
"""
