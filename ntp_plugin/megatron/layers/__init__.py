"""Megatron's layers in a degraded layout: uneven widths from unmodified classes, sequence parallelism, dropout."""
