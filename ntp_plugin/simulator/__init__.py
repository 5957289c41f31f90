"""What a loss costs, and whether the protocol holds, without a cluster.

Nothing here touches a device, a clock or a network. Randomness comes from a seed that the caller gives, so that a seed
is a run. torch is not imported.

    protocol/   the live agreement and detector under a virtual clock: a seeded search over schedules
"""
