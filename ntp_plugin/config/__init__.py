"""What a user may say: one schema, read from TOML files, JSON objects and command-line flags alike.

    sections.py   the keys themselves, with types, defaults, bounds and relations
    schema.py     how a section is checked, built and turned into flags; knows no key by name
    files.py      a TOML or JSON file on disk into a plain mapping

Every route ends in `schema.build`, so a value means the same wherever it was written.
"""
