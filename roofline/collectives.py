"""What a collective costs, and which collectives one step of the decoder makes.

Costs are alpha-beta models: a latency that does not depend on the message (launch and hops) and the
message over a bandwidth. At decode the messages are rows of the hidden size, so latency decides.

Message sizes: for `all_reduce` the bytes of the array that is summed; for `all_gather`,
`reduce_scatter` and `all_to_all` the bytes of the whole array over the group (the gathered result, the
array before the scatter, all that one device holds before the exchange).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from roofline.errors import RooflineError

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Algorithm = Literal["auto", "ring", "tree", "one_shot", "two_shot"]
Topology = Literal["switch", "torus", "ring"]
# How a program writes its all-reduces: left to the compiler, a scatter and a gather, or a gather and a local sum.
SumForm = Literal["psum", "scatter", "one_shot"]
OPS: tuple[str, ...] = get_args(Op)
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
TOPOLOGIES: tuple[str, ...] = get_args(Topology)


class CollectiveModel(Protocol):
    """Anything that can price a collective: an interconnect, measured constants, one plain constant."""

    def time(self, op: str, nbytes: float, devices: int) -> float:
        """Seconds of one collective `op` on `nbytes` bytes over `devices` devices."""
        ...


@dataclass(frozen=True)
class Interconnect:
    """How the devices are wired, and the constants of the alpha-beta model.

    `link_bytes_per_s` is what one device can send in one direction: over a switch the whole port, on a
    torus one link of one axis. `launch_s` is paid once a collective, `hop_s` once for each step that
    waits for another device. `dims` is the number of torus axes; `wrap` says which axes close into a
    ring: those of at least `wrap` devices (wrap_rule "length"), or all when each is a multiple of `wrap`
    ("cube"). `algorithm` is the all-reduce used over a switch ("auto": the faster of ring and tree).
    `max_devices` is how many devices these wires can join (None: not stated); more need a slower network.
    """

    name: str
    topology: Topology
    link_bytes_per_s: float
    launch_s: float
    hop_s: float
    dims: int = 1
    wrap: int = 1
    wrap_rule: Literal["length", "cube"] = "length"
    algorithm: Algorithm = "auto"
    max_devices: int | None = None

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise RooflineError(f"topology is {self.topology!r}: use one of {', '.join(TOPOLOGIES)}")
        if self.algorithm not in ALGORITHMS:
            raise RooflineError(f"algorithm is {self.algorithm!r}: use one of {', '.join(ALGORITHMS)}")
        if self.wrap_rule not in ("length", "cube"):
            raise RooflineError(f"wrap_rule is {self.wrap_rule!r}: use length or cube")
        for key in ("link_bytes_per_s", "dims", "wrap"):
            if getattr(self, key) <= 0:
                raise RooflineError(f"{key} is {getattr(self, key)}: it must be positive")
        if self.max_devices is not None and self.max_devices < 1:
            raise RooflineError(f"max_devices is {self.max_devices}: it must be 1 or more")
        for key in ("launch_s", "hop_s"):
            if getattr(self, key) < 0:
                raise RooflineError(f"{key} is {getattr(self, key)}: it must not be negative")

    def scaled(self, factor: float) -> Interconnect:
        """The same wires with every latency multiplied by `factor`: the one constant of a library."""
        return replace(self, launch_s=self.launch_s * factor, hop_s=self.hop_s * factor)

    def using(self, algorithm: str) -> Interconnect:
        """The same wires with another all-reduce algorithm. Raises RooflineError for an unknown one."""
        return replace(self, algorithm=algorithm)  # type: ignore[arg-type]  # checked in __post_init__

    def time(self, op: str, nbytes: float, devices: int) -> float:
        """Seconds of one collective; 0 on one device. Raises RooflineError for an unknown op."""
        if op not in OPS:
            raise RooflineError(f"unknown collective {op!r}: use one of {', '.join(OPS)}")
        if devices <= 1:
            return 0.0
        if self.topology == "switch":
            return _switched(self, op, nbytes, devices)
        return _torus(self, op, nbytes, devices)


def _switched(link: Interconnect, op: str, nbytes: float, n: int) -> float:
    """Any-to-any wiring (NVSwitch, shared memory).

    ring: `launch + steps (hop + V / (n W))`, steps n - 1 for a gather or scatter, 2 (n - 1) for an
    all-reduce. tree: `launch + 2 ceil(log2 n) (hop + V / W)`. one-shot (everyone sends all to all, sums
    locally): `launch + hop + (n - 1) V / W`. two-shot (scatter, sum, gather):
    `launch + 2 (hop + V (n - 1) / (n W))`. Sources: Thakur, Rabenseifner and Gropp, "Optimization of
    collective communication operations in MPICH" (2005), for ring and tree; the names one-shot and
    two-shot are those of the custom all-reduce kernels of GPU inference libraries.
    """
    alpha, hop, width = link.launch_s, link.hop_s, link.link_bytes_per_s
    if op == "all_to_all":
        return alpha + hop + nbytes * (n - 1) / n / width
    if op in ("all_gather", "reduce_scatter"):
        if link.algorithm in ("one_shot", "two_shot"):
            return alpha + hop + nbytes * (n - 1) / n / width
        return alpha + (n - 1) * (hop + nbytes / n / width)
    times = {
        "ring": alpha + 2 * (n - 1) * (hop + nbytes / n / width),
        "tree": alpha + 2 * ceil(log2(n)) * (hop + nbytes / width),
        "one_shot": alpha + hop + (n - 1) * nbytes / width,
        "two_shot": alpha + 2 * (hop + nbytes * (n - 1) / n / width),
    }
    if link.algorithm == "auto":
        return min(times["ring"], times["tree"])
    return times[link.algorithm]


def torus_shape(devices: int, dims: int) -> tuple[int, ...]:
    """The most cubic way to lay `devices` on `dims` axes: the factors of least sum, ascending.

    8 devices are 2 x 4 on two axes and 2 x 2 x 2 on three, as TPU slices are.
    """
    if dims == 1:
        return (devices,)
    best: tuple[int, ...] | None = None
    for first in range(1, int(devices ** (1 / dims) + 1e-9) + 1):
        if devices % first == 0:
            shape = tuple(sorted((first, *torus_shape(devices // first, dims - 1))))
            if best is None or sum(shape) < sum(best):
                best = shape
    assert best is not None  # first = 1 always divides
    return best


def _torus(link: Interconnect, op: str, nbytes: float, n: int) -> float:
    """Nearest-neighbour wiring: count hops.

    A gather or scatter over the axes of a torus takes `max(hops x t_hop, V / (W x axes))`; an
    all-reduce is a scatter and a gather. An axis of length a has a / 2 hops when it closes into a ring
    and both directions of its links work (2 W); open, it has a - 1 hops and one direction. An all-to-all
    moves a quarter of the bytes of a gather. Source: "How to Scale Your Model", chapter on sharded
    matrices. Algorithms: auto and two_shot are scatter + gather; one_shot gathers n arrays and sums
    locally, half the hops for n times the bytes; ring is one open chain over all devices.
    """
    dims = link.dims if link.topology == "torus" and link.algorithm != "ring" else 1
    if link.algorithm == "tree":
        raise RooflineError("algorithm tree does not exist on a torus: use auto, ring, one_shot or two_shot")
    axes = [a for a in torus_shape(n, dims) if a > 1]
    closed = [_closes(link, a, torus_shape(n, dims)) for a in axes]
    hops = sum(a // 2 if ring else a - 1 for a, ring in zip(axes, closed, strict=True))
    width = link.link_bytes_per_s * sum(2 if ring else 1 for ring in closed)
    if op == "all_to_all":
        return link.launch_s + max(hops * link.hop_s, nbytes / 4 / width)
    if op in ("all_gather", "reduce_scatter"):
        return link.launch_s + max(hops * link.hop_s, nbytes / width)
    if link.algorithm == "one_shot":
        return link.launch_s + max(hops * link.hop_s, n * nbytes / width)
    return link.launch_s + 2 * max(hops * link.hop_s, nbytes / width)


def _closes(link: Interconnect, axis: int, shape: tuple[int, ...]) -> bool:
    """Whether an axis of this length has a wraparound link (two devices need none: they are neighbours)."""
    if axis <= 2:
        return False
    if link.wrap_rule == "cube":
        return all(a % link.wrap == 0 for a in shape)
    return axis >= link.wrap


@dataclass(frozen=True)
class Constant:
    """One latency for every collective, plus its bytes at `bytes_per_s`: the least a table can say."""

    alpha_s: float
    bytes_per_s: float = float("inf")

    def time(self, op: str, nbytes: float, devices: int) -> float:
        """Seconds of one collective: `alpha + V / W`, 0 on one device."""
        return self.alpha_s + nbytes / self.bytes_per_s if devices > 1 else 0.0


@dataclass(frozen=True)
class AlphaBeta:
    """A measured line `t = alpha + V / bytes_per_s` for one collective over one device count."""

    op: str
    devices: int
    alpha_s: float
    bytes_per_s: float

    @classmethod
    def from_samples(cls, op: str, devices: int, samples: Iterable[tuple[float, float]]) -> AlphaBeta:
        """Fit the line to (bytes, seconds) pairs by least squares on relative errors.

        Relative errors, because sizes span four decades and the small ones are what decode sends.
        A slope or intercept that comes out negative is set to zero and the other refitted.
        Raises RooflineError with fewer than two sizes.
        """
        points = [(float(v), float(t)) for v, t in samples]
        if len({v for v, _ in points}) < 2 or any(t <= 0 for _, t in points):
            raise RooflineError(f"{op} over {devices} devices: need positive times at two message sizes or more")
        w = [1 / t**2 for _, t in points]
        sw, swv = sum(w), sum(k * v for k, (v, _) in zip(w, points, strict=True))
        swvv = sum(k * v * v for k, (v, _) in zip(w, points, strict=True))
        swt = sum(k * t for k, (_, t) in zip(w, points, strict=True))
        swvt = sum(k * v * t for k, (v, t) in zip(w, points, strict=True))
        beta = (sw * swvt - swv * swt) / (sw * swvv - swv**2)
        alpha = (swt - beta * swv) / sw
        if alpha < 0:
            alpha, beta = 0.0, swvt / swvv
        elif beta <= 0:
            alpha, beta = swt / sw, 0.0
        return cls(op, devices, alpha, 1 / beta if beta else float("inf"))

    def time(self, nbytes: float) -> float:
        """Seconds for a message of `nbytes` bytes."""
        return self.alpha_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Measured:
    """Collectives as measured, one line for each (op, device count). See `save` for the file form.

    `skew`: by device count, the share of their work that devices wait for the slowest (see `Efficiency.skew`).
    """

    lines: tuple[AlphaBeta, ...]
    skew: Mapping[int, float] = field(default_factory=dict)

    def time(self, op: str, nbytes: float, devices: int) -> float:
        """Seconds from the line for this op and device count.

        A missing reduce_scatter or all_to_all takes the all_gather's line, a missing all_gather half
        the all_reduce's time (an all-reduce is a scatter and a gather). Raises RooflineError when the
        device count was not measured: extrapolating over device counts is what the model is for.
        """
        if devices <= 1:
            return 0.0
        known = {line.op: line for line in self.lines if line.devices == devices}
        if op in known:
            return known[op].time(nbytes)
        if op != "all_reduce" and "all_gather" in known:
            return known["all_gather"].time(nbytes)
        if op != "all_reduce" and "all_reduce" in known:
            return known["all_reduce"].time(nbytes) / 2
        measured = ", ".join(sorted({f"{line.op} x {line.devices}" for line in self.lines})) or "nothing"
        raise RooflineError(
            f"no measurement of {op} over {devices} devices: measured are {measured}; measure it too, with "
            f"scripts.bench_collectives --devices {devices} on so many devices"
        )

    def to_json(self) -> list[dict[str, Any]]:
        """A list of {op, devices, alpha_s, bytes_per_s}; an infinite bandwidth is written as null."""
        return [
            {
                "op": line.op,
                "devices": line.devices,
                "alpha_s": line.alpha_s,
                "bytes_per_s": None if line.bytes_per_s == float("inf") else line.bytes_per_s,
            }
            for line in self.lines
        ]

    @classmethod
    def from_json(cls, rows: Iterable[Mapping[str, Any]], skew: Iterable[Mapping[str, Any]] = ()) -> Measured:
        """Read what `to_json` and `skew_to_json` wrote. Raises RooflineError naming the row and key that is wrong."""
        lines = []
        for index, row in enumerate(rows):
            try:
                op, devices = str(row["op"]), int(row["devices"])
                alpha = float(row["alpha_s"])
                width = float("inf") if row["bytes_per_s"] is None else float(row["bytes_per_s"])
            except KeyError as error:
                raise RooflineError(f"collective row {index} has no key {error}") from error
            except (TypeError, ValueError) as error:
                raise RooflineError(f"collective row {index} is not numeric: {dict(row)}") from error
            if op not in OPS or devices < 1 or alpha < 0 or width <= 0:
                raise RooflineError(f"collective row {index} is out of range: {dict(row)}; ops are {', '.join(OPS)}")
            lines.append(AlphaBeta(op, devices, alpha, width))
        shares = {}
        for index, row in enumerate(skew):
            try:
                shares[int(row["devices"])] = share = float(row["share"])
            except (KeyError, TypeError, ValueError) as error:
                raise RooflineError(f"skew row {index} is not devices and share: {row!r}") from error
            if share < 0:
                raise RooflineError(f"skew row {index}: share is {share}; it must not be negative")
        return cls(tuple(lines), shares)

    def skew_to_json(self) -> list[dict[str, Any]]:
        """A list of {devices, share}."""
        return [{"devices": devices, "share": share} for devices, share in sorted(self.skew.items())]

    def save(self, path: str | Path) -> None:
        """Write {"collectives": [...], "skew": [...]} as JSON."""
        Path(path).write_text(json.dumps({"collectives": self.to_json(), "skew": self.skew_to_json()}, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Measured:
        """Read a file written by `save`: any JSON object with a `collectives` list, and perhaps a `skew` list.

        Raises RooflineError when the file is not JSON or has no such list.
        """
        try:
            data = json.loads(Path(path).read_text())
        except ValueError as error:
            raise RooflineError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, Mapping) or not isinstance(data.get("collectives"), list):
            raise RooflineError(f"{path} has no list called 'collectives'")
        skew = data.get("skew", [])
        if not isinstance(skew, list):
            raise RooflineError(f"{path}: skew is not a list")
        return cls.from_json(data["collectives"], skew)
