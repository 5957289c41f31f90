"""What would happen if this GPU died? The plan that every survivor would compute, without running anything.

python docs/examples/plan_a_loss.py
"""

from ntp_plugin.errors import StateLost
from ntp_plugin.planning import Job, Model, Parallel, plan

LAYOUT = Parallel(tp=8, pp=4, dp=32)
LLAMA_70B = Model(layers=80, hidden=8192, heads=64, groups=8, ffn=28672, vocab=128256)

found = plan(Job(parallel=LAYOUT, model=LLAMA_70B, lose=("r3.s1.t5",)))
print(f"degraded replicas {found.degraded}, dropped {found.dropped}, idle GPUs {len(found.idle)}")
print(f"micro-batches {found.batch.computed} of {found.batch.total}")
for group in found.groups:
    print(f"r{group.replica}.s{group.stage}: TP {LAYOUT.tp - len(group.before)} -> {LAYOUT.tp - len(group.after)}")

try:
    plan(Job(parallel=Parallel(tp=8, pp=4, dp=2), model=LLAMA_70B, lose=("r0.s1.t5", "r1.s1.t5")))
except StateLost as error:
    print(f"lost in both of two replicas: {error}")
