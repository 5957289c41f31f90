"""Builds Megatron's layers for a degraded layout: uneven widths, sequence parallelism, dropout."""
