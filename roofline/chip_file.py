"""A chip of one's own, from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from roofline.chips import Chip
from roofline.collectives import Interconnect
from roofline.efficiency import Efficiency
from roofline.errors import RooflineError

_NUMBERS = ("bytes_per_s", "memory_bytes")
_OPTIONAL = ("shared_bytes_per_s", "shared_flops_per_s")
_LINK_COUNTS = ("dims", "wrap", "max_devices")
_LINK_NUMBERS = ("link_bytes_per_s", "launch_s", "hop_s")


def load_chip(path: str | Path) -> Chip:
    """Read a chip from TOML.

    Keys: `name`, `bytes_per_s`, `memory_bytes`, a table `flops_per_s` (dtype -> operations/s, bf16 at
    least), a table `interconnect` (`name`, `topology` = "switch" | "torus" | "ring",
    `link_bytes_per_s` in one direction, `launch_s`, `hop_s`, and optionally `dims`, `wrap`,
    `wrap_rule`, `algorithm`, `max_devices`), and optionally `shared_bytes_per_s`, `shared_flops_per_s` and a
    table `efficiency` with any of the fields of `Efficiency`.
    Raises RooflineError naming the file and the key that is missing, unknown or out of range.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise RooflineError(f"chip file {path} does not exist") from error
    except tomllib.TOMLDecodeError as error:
        raise RooflineError(f"chip file {path} is not TOML: {error}") from error
    _known_keys(path, "", data, {"name", "flops_per_s", "interconnect", "efficiency", *_NUMBERS, *_OPTIONAL})
    link = _table(path, data, "interconnect")
    _known_keys(
        path,
        "interconnect.",
        link,
        {"name", "topology", *_LINK_NUMBERS, *_LINK_COUNTS, "wrap_rule", "algorithm"},
    )
    rates = _table(path, data, "flops_per_s")
    if "bf16" not in rates:
        raise RooflineError(f"{path}: flops_per_s.bf16 is missing")
    numbers = {key: _number(path, "interconnect.", link, key, zero=key != "link_bytes_per_s") for key in _LINK_NUMBERS}
    counts = {key: _count(path, "interconnect.", link, key) for key in _LINK_COUNTS if key in link}
    topology = _required(path, "interconnect.", link, "topology")
    try:
        interconnect = Interconnect(
            str(link.get("name", "interconnect")),
            topology,
            link_bytes_per_s=numbers["link_bytes_per_s"],
            launch_s=numbers["launch_s"],
            hop_s=numbers["hop_s"],
            dims=counts.get("dims", 1),
            wrap=counts.get("wrap", 1),
            max_devices=counts.get("max_devices"),
            wrap_rule=link.get("wrap_rule", "length"),
            algorithm=link.get("algorithm", "auto"),
        )
    except RooflineError as error:
        raise RooflineError(f"{path}: interconnect: {error}") from error
    shared = {key: _number(path, "", data, key) if key in data else None for key in _OPTIONAL}
    return Chip(
        name=str(_required(path, "", data, "name")),
        flops_per_s={key: _number(path, "flops_per_s.", rates, key) for key in rates},
        bytes_per_s=_number(path, "", data, "bytes_per_s"),
        memory_bytes=_number(path, "", data, "memory_bytes"),
        interconnect=interconnect,
        efficiency=_efficiency(path, data),
        shared_bytes_per_s=shared["shared_bytes_per_s"],
        shared_flops_per_s=shared["shared_flops_per_s"],
    )


def _efficiency(path: Path, data: Mapping[str, Any]) -> Efficiency:
    if "efficiency" not in data:
        return Efficiency()
    table = _table(path, data, "efficiency")
    _known_keys(path, "efficiency.", table, {item.name for item in fields(Efficiency)})
    given = {key: _number(path, "efficiency.", table, key, zero=True) for key in table}
    try:
        return Efficiency(**given)
    except RooflineError as error:
        raise RooflineError(f"{path}: {error}") from error


def _known_keys(path: Path, prefix: str, table: Mapping[str, Any], known: set[str]) -> None:
    for key in table:
        if key not in known:
            raise RooflineError(f"{path}: unknown key {prefix}{key}: known are {', '.join(sorted(known))}")


def _required(path: Path, prefix: str, table: Mapping[str, Any], key: str) -> Any:
    if key not in table:
        raise RooflineError(f"{path}: {prefix}{key} is missing")
    return table[key]


def _table(path: Path, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = _required(path, "", data, key)
    if not isinstance(value, Mapping):
        raise RooflineError(f"{path}: {key} is {value!r}: it must be a table ([{key}])")
    return value


def _number(path: Path, prefix: str, table: Mapping[str, Any], key: str, zero: bool = False) -> float:
    value = _required(path, prefix, table, key)
    good = isinstance(value, int | float) and not isinstance(value, bool) and (value > 0 or (zero and value == 0))
    if not good:
        raise RooflineError(f"{path}: {prefix}{key} is {value!r}: it must be a {'' if zero else 'positive '}number")
    return float(value)


def _count(path: Path, prefix: str, table: Mapping[str, Any], key: str) -> int:
    value = _number(path, prefix, table, key)
    if value != int(value):
        raise RooflineError(f"{path}: {prefix}{key} is {value}: it must be a whole number")
    return int(value)
