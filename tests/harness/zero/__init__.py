"""DeepSpeed jobs in ranks of the harness, some of which die, and their differences from an undisturbed job."""
