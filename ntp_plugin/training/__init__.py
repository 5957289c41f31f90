"""What a training step consumes, independent of the layout: samples, micro-batches, dropout masks, optimizers.

    samples.py     PURE: which samples a replica computes
    stream.py      PURE: which micro-batches a rank draws, where ranks draw them by themselves
    dropout.py     dropout masks that do not depend on which rank computes what
    optimizers.py  which optimizers are element-wise, and what each keeps for a parameter

Plain torch, without a framework.
"""
