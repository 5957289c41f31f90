"""Reads which layers of a model have experts, written as Megatron's `--moe-layer-freq`.

A whole number N means every N-th layer, from the first one on. A pattern has one number for each layer, 1 where the
layer has experts: `([0]*3+[1]*58)`. Megatron evaluates the pattern; here only lists, `+`, `*` and whole numbers are
understood, so a file that somebody sends runs nothing.
"""

import ast

from ntp_plugin.errors import ConfigError

_MOST_LAYERS = 100_000


def layers_by_frequency(text: str, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts.

    Raises:
        ConfigError: The text is neither a number nor a pattern, or the pattern has another number of layers.
    """
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(
            f"moe_layer_freq = {text[:60]!r} is neither a number nor a pattern", fix="write 2, or ([0]*3+[1]*58)"
        ) from None
    if isinstance(found, int):
        if found < 1:
            raise ConfigError(f"moe_layer_freq = {found} must be at least 1")
        return tuple(layer % found == 0 for layer in range(layers))
    if len(found) != layers or not set(found) <= {0, 1}:
        raise ConfigError(
            f"moe_layer_freq = {text[:60]} has {len(found)} layers, and the model {layers}",
            fix="write 0 or 1 for each layer",
        )
    return tuple(number == 1 for number in found)


def _value(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.List(elts=parts):
            numbers = [number for number in map(_value, parts) if isinstance(number, int)]
            if len(numbers) == len(parts):
                return numbers
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = _value(left), _value(right)
            if isinstance(both[0], list) and isinstance(both[1], list):
                return both[0] + both[1]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, times = _value(left), _value(right)
            if isinstance(one, list) and isinstance(times, int) and len(one) * times <= _MOST_LAYERS:
                return one * times
    raise ValueError(ast.dump(node))
