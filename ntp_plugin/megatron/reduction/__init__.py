"""Reduces Megatron's gradient buckets and runs its distributed optimizer lane by lane, in a degraded layout."""
