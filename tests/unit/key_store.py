"""A `KeyStore` in memory, for members in one process. Each method is one step of Python, so threads may share it."""


class Keys(dict):
    """Key -> value."""

    def read(self, key):
        return self.get(key)

    def create(self, key, value):
        return self.setdefault(key, value)

    def present(self, keys):
        return all(key in self for key in keys)
