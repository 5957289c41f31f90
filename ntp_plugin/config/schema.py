"""Checks and builds a section of the configuration, and turns it into command-line flags. Knows no key by name.

A *section* is a frozen dataclass whose fields are made by `key`. Values arrive as plain mappings (from TOML,
JSON or flags). `check` compares each with its field's type and rule; `build` merges them into the dataclass, where
earlier mappings take precedence. The section's own `__post_init__` checks relations between keys, and raises
`ConfigError`.
"""

import argparse
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ntp_plugin.errors import ConfigError

type Values = dict[str, Any]
type Naming = Callable[[tuple[str, ...]], str]
"""Formats the path of a key as the user wrote it: `model.heads`, `--heads`, `ntp.copies.count`."""

LARGEST_NUMBER = 10**12
_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_TRUE_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Constraints on a key's value beyond its type, and how its flag is shown."""

    help: str
    at_least: float | None = None
    at_most: float = LARGEST_NUMBER
    choices: tuple[str, ...] = ()
    flag: str | None = None
    metavar: str | None = None


def key(default: Any = dataclasses.MISSING, **rule: Any) -> Any:
    """Declare a field of a section, with its default (none: the key is required) and its `Rule`."""
    return dataclasses.field(default=default, metadata={"rule": Rule(**rule)})


def subsection(section: type, *, prefix: str = "") -> Any:
    """Declare a nested section; its flags carry `prefix`."""
    return dataclasses.field(default_factory=section, metadata={"prefix": prefix})


def dotted(where: str = "") -> Naming:
    """Format keys as files write them, after `where`."""
    return lambda path: where + ".".join(path)


# ---------------------------------------------------------------- checking


def check(section: type, raw: object, *, name: Naming, path: tuple[str, ...] = ()) -> Values:
    """Return the values of `raw` with types and bounds checked; nested mappings for nested sections."""
    if not isinstance(raw, Mapping):
        place = name(path).rstrip(". :") or "the file"
        raise ConfigError(f"{place} must be a table of keys, not {_show(raw)}", fix=f"known keys: {_known(section)}")
    kinds = typing.get_type_hints(section)
    checked: Values = {}
    for spelled, value in raw.items():
        if spelled not in kinds:
            raise ConfigError(
                f"{name((*path, str(spelled)))} is not a known key", fix=_did_you_mean(str(spelled), kinds)
            )
        here = (*path, spelled)
        if dataclasses.is_dataclass(kinds[spelled]):
            checked[spelled] = check(kinds[spelled], value, name=name, path=here)
        else:
            checked[spelled] = _checked_value(value, kinds[spelled], _rule(section, spelled), name(here))
    return checked


def build[Section](section: type[Section], *layers: Values, name: Naming, path: tuple[str, ...] = ()) -> Section:
    """Build the section from checked values; earlier layers take precedence."""
    merged: Values = {}
    kinds = typing.get_type_hints(section)
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        given = [layer[field.name] for layer in layers if field.name in layer]
        if dataclasses.is_dataclass(kinds[field.name]):
            merged[field.name] = build(kinds[field.name], *given, name=name, path=(*path, field.name))
        elif given:
            merged[field.name] = given[0]
        elif field.default is dataclasses.MISSING:
            raise ConfigError(
                f"{name((*path, field.name))} is missing", fix=f"give it: {_rule(section, field.name).help}"
            )
    return section(**merged)


def read[Section](section: type[Section], raw: object, *, where: str) -> Section:
    """Build a section from one mapping, e.g. the `ntp` block of a `ds_config.json` with `where="ntp."`."""
    return build(section, check(section, raw, name=dotted(where)), name=dotted(where))


def checked[Section](section: Section) -> Section:
    """Check and convert a section that a program made, as if a user had written it."""
    return read(type(section), _as_written(section), where="")


def require_valid(section: Any) -> None:
    """Check the values of a section that a program makes, before they are compared with each other."""
    check(type(section), _as_written(section), name=dotted())


def _as_written(section: Any) -> Values:
    return dataclasses.asdict(section, dict_factory=_without_nones)


def _without_nones(pairs: list[tuple[str, Any]]) -> Values:
    return {name: value for name, value in pairs if value is not None}


def _checked_value(value: object, kind: Any, rule: Rule, named: str) -> object:
    if _is_list(kind):
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{named} = {_show(value)} must be a list of texts", fix=rule.help)
        return tuple(value)
    kind = _without_none(kind)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{named} = {_show(value)} must be {_TYPE_WORDS[kind]}", fix=rule.help)
    if rule.choices and not any(_is_choice(str(value), choice) for choice in rule.choices):
        close = difflib.get_close_matches(str(value), rule.choices, n=1)
        hint = f'did you mean "{close[0]}"? ' if close else ""
        raise ConfigError(
            f"{named} = {_show(value)} is not allowed",
            fix=f"{hint}choose from {', '.join(filter(None, rule.choices))}",
        )
    if kind in (int, float):
        _check_bounds(typing.cast(float, value), rule, named)
    return value


def _is_choice(value: str, choice: str) -> bool:
    """A choice that ends with `:N` matches values with a whole number there."""
    name, colon, _ = choice.rpartition(":N")
    return value == choice if not colon else re.fullmatch(re.escape(name) + r":\d{1,9}", value, re.ASCII) is not None


def _check_bounds(value: float, rule: Rule, named: str) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{named} = {value} must be a finite number", fix=rule.help)
    if rule.at_least is not None and value < rule.at_least:
        raise ConfigError(f"{named} = {value} must be at least {rule.at_least}", fix=rule.help)
    if value > rule.at_most:
        raise ConfigError(f"{named} = {_show(value)} must be at most {rule.at_most}", fix=rule.help)


# ---------------------------------------------------------------- flags


def add_flags(parser: argparse._ActionsContainer, section: type, *, prefix: str = "") -> None:
    """Add one flag per key of the section; `flag_values` reads them."""
    for flag, target, kind, rule in _flags(section, prefix):
        default = _default_text(target[0], target[1][-1])
        text = f"{rule.help}{default}".replace("%", "%%")
        dest = _dest(flag)
        if kind is bool:
            parser.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif _is_list(kind):
            parser.add_argument(flag, dest=dest, action="append", default=None, metavar=rule.metavar, help=text)
        else:
            metavar = rule.metavar or "|".join(rule.choices) or {int: "N", float: "X", str: "TEXT"}[_without_none(kind)]
            parser.add_argument(flag, dest=dest, default=None, metavar=metavar, help=text)


def flag_values(section: type, parsed: argparse.Namespace, *, prefix: str = "") -> Values:
    """Return the checked values of the flags as the nested mapping that `build` takes. Omitted flags are absent."""
    values: Values = {}
    for flag, (_, path), kind, rule in _flags(section, prefix):
        given = getattr(parsed, _dest(flag))
        if given is None:
            continue
        table = values
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = _checked_value(_from_text(given, kind, flag), kind, rule, flag)
    return values


def flags(section: type, *, prefix: str = "") -> list[str]:
    """List the flags of all keys of the section."""
    return [flag for flag, *_ in _flags(section, prefix)]


def flag_name(section: type, path: tuple[str, ...], *, prefix: str = "") -> str:
    """The flag of the key at `path`."""
    return next(flag for flag, (_, here), _, _ in _flags(section, prefix) if here == path)


type _Flag = tuple[str, tuple[type, tuple[str, ...]], Any, Rule]


def _flags(section: type, prefix: str, path: tuple[str, ...] = ()) -> Iterator[_Flag]:
    kinds = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        kind, here = kinds[field.name], (*path, field.name)
        if dataclasses.is_dataclass(kind):
            yield from _flags(typing.cast(type, kind), prefix + field.metadata["prefix"], here)
        else:
            rule = _rule(section, field.name)
            yield "--" + prefix + (rule.flag or field.name.replace("_", "-")), (section, here), kind, rule


def _from_text(given: object, kind: Any, flag: str) -> object:
    if not isinstance(given, str):  # booleans and lists come typed from argparse
        return given
    kind = _without_none(kind)
    try:
        if kind is bool:
            return _TRUE_WORDS[given.lower()]
        return kind(given)
    except (ValueError, KeyError):
        raise ConfigError(f"{flag} = {_show(given)} must be {_TYPE_WORDS[kind]}") from None


def _dest(flag: str) -> str:
    return "key_" + flag.removeprefix("--").replace("-", "_")


def _default_text(section: type, name: str) -> str:
    default = next(field.default for field in dataclasses.fields(section) if field.name == name)
    return "" if default in (dataclasses.MISSING, None, ()) else f" (default: {default})"


# ---------------------------------------------------------------- words


def _rule(section: type, name: str) -> Rule:
    fields = {field.name: field for field in dataclasses.fields(section)}
    return typing.cast(Rule, fields[name].metadata["rule"])


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not types.NoneType)
    return kind


def _is_list(kind: Any) -> bool:
    origin: Any = typing.get_origin(kind)
    return origin is tuple


def _known(section: type) -> str:
    return ", ".join(field.name for field in dataclasses.fields(section))


def _did_you_mean(spelled: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(spelled, known, n=1)
    hint = f'did you mean "{close[0]}"? ' if close else ""
    return f"{hint}known keys: {', '.join(known)}"


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
