"""What every command does before and around its work: devices, caches, notes, and errors in one line."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from decode.batching.request import RequestError
from decode.cache import CacheOverflowError
from decode.compile_cache import CompileCache
from decode.decoder import NumericsError, PromptError
from decode.sampling import SamplingError
from decode.speculation.proposer import SpeculationError
from kernels import native
from kernels.cache_dir import cache_dir
from kernels.select import KernelError
from model.checkpoint.errors import CheckpointError
from model.checkpoint.resolve import ResolvedModel
from model.config import ConfigError
from model.quantize import KINDS, WIDE, Quantization, QuantizationError, WeightFormat
from model.tokenizer import TokenizerError
from model.wording import number_of
from roofline.errors import RooflineError
from scripts._files import UsageError as UsageError
from scripts._files import check_writable as check_writable
from scripts._files import hand_out as hand_out
from scripts._files import write_json as write_json
from scripts._interrupt import INTERRUPTED, raise_again
from scripts._processes import BROKEN_PIPE, join, run_as_member
from sharding.collectives import COLLECTIVE_FORMS, DEFAULT_COLLECTIVES, KERNEL_FORMS, CollectiveForm, Collectives
from sharding.mesh import LayoutError
from sharding.multihost import MultihostError, process_count
from sharding.self_check import MeshFaultError

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
STORED = "stored"
KV_DTYPES = {**DTYPES, "int8": "int8", "fp8": "float8_e4m3fn"}


USER_ERRORS = (
    CacheOverflowError,
    CheckpointError,
    ConfigError,
    KernelError,
    LayoutError,
    MeshFaultError,
    NumericsError,
    PromptError,
    QuantizationError,
    RequestError,
    RooflineError,
    SamplingError,
    SpeculationError,
    TokenizerError,
    UsageError,
    OSError,
)
"""Errors that the person at the terminal can mend; anything else is a fault of ours, with a traceback."""


def run_command(work: Callable[[], None], *, quiet: bool = False, processes: argparse.Namespace | None = None) -> int:
    """Run a command's work and return its exit status.

    0, or 1 after one line on stderr for an error in ``USER_ERRORS`` or a lack of memory, 130 when interrupted, and 141
    without a word when whoever read the output went away (``| head``).

    quiet: keep notes such as "fetching the demo model" from stderr; warnings still show.
    processes: the options of ``add_process_options``, where the command can be one of several processes. On all but
        process 0 the options that name files to write are set to None.
    """
    raise_again()
    try:
        member = None if processes is None else join(processes)
    except MultihostError as error:
        print(_error_line(str(error)), file=sys.stderr)
        return 1
    if member is not None:
        return run_as_member(member, lambda: _outcome(work, quiet))
    status, told = _outcome(work, quiet)
    if told:
        print(told, file=sys.stderr)
    return status


def _outcome(work: Callable[[], None], quiet: bool) -> tuple[int, str]:
    """Exit status and what to say on stderr."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows ? and not a traceback
        with _notes_on_stderr(logging.WARNING if quiet else logging.INFO):
            work()
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE, ""
    except USER_ERRORS as error:
        return 1, _error_line(str(error))
    except MemoryError as error:
        return 1, _error_line(_out_of_memory(error))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return 1, _error_line(_out_of_memory(error))
    except KeyboardInterrupt:
        return INTERRUPTED, "\ninterrupted"
    return 0, ""


def add_device_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--cpu-devices", type=positive, metavar="N", help="run on N fake CPU devices (in each process)")


def add_kernels_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--kernels",
        choices=("best", "xla"),
        default="best",
        help="best, each kernel's fastest implementation for the platform (default); xla, XLA's own operations",
    )


def add_quant_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--quant",
        choices=(*KINDS, STORED),
        help="keep the layers' matrices in fewer bits (embedding, head and norms stay wide), or every matrix as the "
        "checkpoint stores it",
    )
    parser.add_argument(
        "--group",
        type=positive,
        metavar="N",
        help="with --quant: values that share a scale, 32, 64 or 128 (default: int4 32, int8 and fp8 a whole row)",
    )
    add_quant_rule_option(parser)


def add_quant_rule_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--quant-rule",
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="a format of some matrices, such as embed=int8, layers.0.*=none or *.down=int8-g32; repeatable, the last "
        "that matches decides",
    )


def chosen_quantization(args: argparse.Namespace, model: ResolvedModel) -> Quantization:
    """``--quant``, ``--group`` and ``--quant-rule`` together, for this model."""
    asked = asked_quantization(args)
    return model.quantization_for(asked) if args.quant != STORED else model.stored_quantization().also(asked)


def asked_quantization(args: argparse.Namespace) -> Quantization:
    """The same as far as no model is needed: what can be refused is refused before anything slow."""
    if args.quant == STORED:
        if args.group is not None:
            raise UsageError("--group goes with a format; with --quant stored the checkpoint has its own groups")
        return Quantization.of_rules(args.quant_rule)
    if args.quant is None:
        if args.group is not None or args.quant_rule:
            raise UsageError(f"--group and --quant-rule go with --quant, which is one of {', '.join((*KINDS, STORED))}")
        return WIDE
    return Quantization.layers(WeightFormat.of(args.quant, args.group), args.quant_rule)


def add_kv_dtype_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--kv-dtype",
        choices=list(KV_DTYPES),
        help="of the KV cache; int8 and fp8 keep a scale a position and head (default: that of --dtype)",
    )


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """What a command that runs a model says of where, and of how weights and cache are kept."""
    machine = parser.add_argument_group("machine")
    machine.add_argument("--tp", type=positive, metavar="N", help="tensor-parallel devices (default: all)")
    add_device_options(machine)
    add_collective_option(machine)
    add_kernels_option(machine)
    machine.add_argument("--dtype", choices=list(DTYPES), help="default: bf16, on CPU f32; of what is not quantised")
    add_quant_options(machine)
    add_kv_dtype_option(machine)
    machine.add_argument("--layers", choices=("unrolled", "scan"), default="unrolled", help="scan compiles faster")


def chosen_kv_dtype(kv_dtype: str | None) -> str | None:
    """``--kv-dtype`` as ``Decoder`` takes it."""
    return None if kv_dtype is None else KV_DTYPES[kv_dtype]


def chosen_kernels(choice: str) -> str | None:
    """``--kernels`` as ``Decoder`` takes it."""
    return None if choice == "best" else choice


def kernel_facts(choice: str) -> str:
    """What decodes: "cpu_native" or "xla"."""
    native_here = choice == "best" and jax.default_backend() == "cpu" and native.problem() is None
    return "cpu_native" if native_here else "xla"


def add_collective_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--collective",
        choices=(*COLLECTIVE_FORMS, *KERNEL_FORMS),
        help="how a decode step adds up over devices: psum, one all-reduce; scatter, a reduce-scatter and an all-gather"
        " with the norm's sum in between; one_shot, an all-gather and a local sum; one_shot_dma on TPU and "
        "multimem on Hopper, a kernel (default "
        f"{DEFAULT_COLLECTIVES.collective})",
    )


def chosen_collectives(collective: CollectiveForm | None, tp: int) -> Collectives:
    """What ``--collective`` asked for, on at most ``tp`` devices.

    Raises:
        UsageError: asked for on one device, which adds up nothing.
    """
    if collective is None:
        return DEFAULT_COLLECTIVES
    if tp == 1:
        raise UsageError(f"--collective {collective} has no effect on one device; add --tp 2 or more")
    return Collectives(collective)


def set_up(cpu_devices: int | None, *, spare: int = 1) -> CompileCache:
    """Start JAX on the devices that were asked for, with the compilation cache on.

    cpu_devices: run on so many fake CPU devices in each process, whatever else the machine has.
    spare: without ``cpu_devices``, the least number of CPU devices to make, over all processes, where the CPU is all
        there is.

    Raises:
        UsageError: JAX cannot start, or was started before with other devices.
    """
    started = False
    try:
        if cpu_devices is not None:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
            jax.config.update("jax_platforms", "cpu")
        elif (spare := -(-spare // process_count())) > max(1, jax.config.jax_num_cpu_devices):  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", spare)
    except RuntimeError:  # the backend is up, and its number of devices fixed
        started = True
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # what JAX raises for a platform it cannot use, or cannot find
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        named = f" on the platforms {asked!r} (JAX_PLATFORMS)" if asked else ""
        raise UsageError(f"JAX cannot start{named}: {error or 'no such device here'}") from None
    if started and cpu_devices is not None and (devices[0].platform != "cpu" or len(devices) < cpu_devices):
        raise UsageError(
            f"--cpu-devices {cpu_devices} comes too late: JAX has started in this process with "
            f"{number_of(len(devices), f'{devices[0].platform} device')}; start a new one"
        )
    try:
        return CompileCache(cache_dir() / "jax")
    except RuntimeError as error:  # no home folder
        return CompileCache(None, problem=str(error))


def weight_dtypes() -> list[str]:
    """What a benchmark's ``--dtype`` takes: wide dtypes and quantised formats."""
    return [
        *DTYPES,
        *KINDS,
        *(f"{kind}-g{group}" for kind in ("int8", "int4") for group in (32, 64, 128)),
    ]


def weights_as(name: str, rules: Sequence[str]) -> tuple[str, Quantization]:
    """One of ``weight_dtypes``: the dtype of what is wide (bf16 beside quantised matrices), and the quantisation."""
    if name in DTYPES:
        return DTYPES[name], WIDE
    return DTYPES["bf16"], Quantization.layers(WeightFormat.parse(name), rules)


def default_dtype() -> str:
    """bf16 where the matrix units take it; f32 on CPU, where XLA runs it faster."""
    return "f32" if jax.devices()[0].platform == "cpu" else "bf16"


def versions() -> dict[str, str]:
    """The versions a measurement depends on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    names = ("shardstream", "jax", "jaxlib", "flax", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout that was not installed
            found[name] = "unknown"
    return found


def device_facts() -> dict[str, Any]:
    """What the program ran on."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    return _integer(text, 1)


def not_negative(text: str) -> int:
    """argparse type: an integer of at least 0."""
    return _integer(text, 0)


def positive_number(text: str) -> float:
    """argparse type: a number above 0, at most a million."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is out of range: it must be above 0, and at most 1000000")
    return value


def integers(text: str) -> list[int]:
    """argparse type: integers of at least 1, separated by commas; one given twice counts once."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """argparse type: some of ``allowed``, separated by commas; one given twice counts once."""

    def parse(text: str) -> list[str]:
        parts = text.split(",")
        for part in parts:
            if part not in allowed:
                raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(allowed)}")
        return list(dict.fromkeys(parts))

    return parse


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is too small: it must be at least {least}")
    return value


@contextmanager
def _notes_on_stderr(level: int) -> Iterator[None]:
    """Let what loaders and kernels log ("fetching the demo model") through to stderr, as plain lines, for the while.

    Once each: a library that sets up the root logger would print them again.
    """
    notes = logging.StreamHandler(sys.stderr)
    notes.setFormatter(logging.Formatter("%(message)s"))
    loggers = [logging.getLogger(package) for package in ("model", "kernels")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(notes)
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (old_level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(notes)
            logger.setLevel(old_level)
            logger.propagate = propagate


def _error_line(message: str) -> str:
    return "error: " + " ".join(message.split())


def _out_of_memory(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"out of memory ({first}); try a larger --tp, --dtype bf16, a smaller --batch or a shorter text"


def _discard_stdout() -> None:
    """Point stdout at nothing, so that Python's own flush at exit does not fail again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:  # stdout is not a file, as in a test
        return
