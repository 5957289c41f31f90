"""Megatron's gradient buckets and its distributed optimizer, lane by lane."""
