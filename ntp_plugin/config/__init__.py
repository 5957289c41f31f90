"""Reads and checks the user's configuration: one schema for TOML files, JSON objects and command-line flags.

    sections.py   the keys, with types, defaults, bounds and relations
    layer_frequency.py  which layers have experts, as Megatron's --moe-layer-freq says it
    schema.py     checks and builds a section, and turns it into flags; knows no key by name
    files.py      reads a TOML or JSON file into a plain mapping

Every source ends in `schema.build`, so a value means the same wherever the user wrote it. Next: `planning/`, which
works from these sections.
"""
