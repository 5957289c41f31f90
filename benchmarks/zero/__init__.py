"""DeepSpeed jobs in ranks of the harness, some of which die; and what they differ by from an undisturbed one."""
