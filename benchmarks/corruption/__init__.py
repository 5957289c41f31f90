"""Corrupt copies and check that restores detect it: what `make show-corruption` measures.

    python -m benchmarks.corruption             3,900 injections and 2,000 clean restores, some minutes
    SCALE=ci python -m benchmarks.corruption    the slice for CI: 260 and 100
    SEED=7 python -m benchmarks.corruption      another draw

Four slots on three hosts, as threads of one process, copy two versions of a small state with the code that real jobs
use: stores in shared memory, servers, replicators, one far copy of each part. Then some slots are lost, and the others
restore the second version into another layout, whose parts are uneven. Two slots share a host; with two hosts in all
each would have a copy of everything, and nothing would be read across. A slot lost with its host leaves only its far
copy; a slot lost alone leaves its near copy, which its neighbour reads. The threads of a lost slot stay, and nobody
asks them.

Two tensors have more than three pages of a digest, one cut by rows and one by columns, so that the keys of pages
matter; each row says how many of its injections hit one of these. Equal places of two pages are exchanged as well: only
the keys of the pages reveal that.

An injection changes the files in shared memory. A model of its own on sets of elements (`foresee`) predicts who reads
what, and so which copies must be named as broken. An injection changes only bytes that a member would read. It is

    found           if all members name exactly the copies that the model names, and each copy is reported; a truncated
                    file is among these, and is not read at all
    right source    if then all members have the bits of that version, from other copies

In a tenth of the trials all copies of a part are hit. Such a trial is found if all members report the version as lost
and name the copies; the right source is the version before, whose bits they must then have.

A clean restore is a false alarm if any trouble is reported, a copy is named, anything raises or a bit differs. In the
negative controls digests are not compared when copies are read, nor at the end: the benchmark must detect this.

    state.py        four slots, their copies, and the values that they must have
    restores.py     a restore by all members, and its model
    injections.py   the changes to copies
    parities.py     the same for slots that share a parity in place of far copies
"""
