"""What a training step consumes, independent of the layout: samples, micro-batches, dropout masks, optimizers.

Adapters use it so that a replica computes the same numbers in any layout, and a step can run again.

    samples.py     PURE: which samples a replica computes
    stream.py      PURE: which micro-batches a rank draws from its own data loader
    dropout.py     dropout masks that do not depend on which rank computes what
    optimizers.py  which optimizers are element-wise, and what each keeps for a parameter

Plain torch, without a framework. Next: `ntp_plugin/resharding`.
"""
