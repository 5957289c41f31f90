"""Saves and loads checkpoints of a degraded layout in Megatron's own format: any layout loads what any other saved."""
