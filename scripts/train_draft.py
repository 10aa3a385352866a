"""Trains a small draft model to imitate a large one, for speculative decoding.

    python -m scripts.train_draft --model demo --out draft-demo
    python -m scripts.generate --chat "What is gravity?" --speculate draft-demo

The draft begins as some of the teacher's layers, shares its embedding and head, and learns the teacher's next-token
distribution on text that the teacher writes itself. All work is kept in OUT.training: a run that was stopped goes on
where it was, and ends with the same weights as one that was not.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from decode.decoder import Decoder
from kernels.native.build import has_bf16_tiles
from model.checkpoint.orbax import save_params
from model.checkpoint.orbax_folder import check_destination
from model.checkpoint.resolve import ACCEPTED, ResolvedModel, open_model
from model.tokenizer import Tokenizer
from model.training.distill import Distiller, Scores, State, make_optimiser
from model.training.draft import cut_draft, draft_config, frequent_tokens
from model.training.draft_vocabulary import VOCABULARY_FILE, to_bytes
from model.training.text_pool import TextPool, joined, windows
from model.wording import number_of
from scripts._cli import (
    DTYPES,
    UsageError,
    add_device_options,
    default_dtype,
    device_facts,
    not_negative,
    positive,
    run_command,
    set_up,
    versions,
    write_json,
)
from scripts._draft_text import load_pool, save_pool, write_round
from sharding.layout import Layout
from sharding.mesh import make_mesh, place_on_mesh
from sharding.self_check import check_mesh

STATES_LIMIT = 4 << 30
"""Bytes of teacher states kept in host memory; a larger text has them computed anew each time it is met."""

PROGRESS_STEPS = 10
"""Steps between two points of the loss curve."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_draft", description="Train a draft model for speculative decoding."
    )
    parser.add_argument("--model", default="demo", help=f"the teacher: {ACCEPTED}. Default: demo")
    parser.add_argument("--out", required=True, metavar="PATH", help="folder of the finished draft")
    parser.add_argument("--overwrite", action="store_true", help="replace a draft that is at --out")

    shape = parser.add_argument_group("the draft")
    shape.add_argument(
        "--layers", type=positive, default=2, metavar="N", help="layers kept of the teacher's (default 2)"
    )
    shape.add_argument(
        "--vocabulary",
        type=not_negative,
        default=8192,
        metavar="N",
        help="most frequent tokens that the draft proposes: its head is cut to them (default 8192; 0 is all)",
    )

    text = parser.add_argument_group("the text")
    text.add_argument("--text", metavar="FILE", help="learn from this text in UTF-8 instead of the teacher's own")
    text.add_argument(
        "--rows", type=positive, default=1896, metavar="N", help="texts the teacher writes (default 1896)"
    )
    text.add_argument("--length", type=positive, default=256, metavar="N", help="tokens of a text (default 256)")
    text.add_argument(
        "--write-batch", type=positive, default=192, metavar="N", help="texts written together (default 192)"
    )
    text.add_argument("--held-out", type=positive, default=24, metavar="N", help="texts only measured on (default 24)")

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=positive, default=2, metavar="N", help="passes over the text (default 2)")
    training.add_argument("--batch", type=positive, default=1, metavar="N", help="texts a step (default 1)")
    training.add_argument("--learning-rate", type=float, default=1e-3, metavar="X", help="at its peak (default 0.001)")
    training.add_argument("--warmup", type=not_negative, default=40, metavar="N", help="steps to the peak (default 40)")
    training.add_argument("--clip", type=float, default=1.0, metavar="X", help="largest gradient norm (default 1)")
    training.add_argument("--seed", type=not_negative, default=0)
    training.add_argument(
        "--checkpoint-every", type=positive, default=400, metavar="N", help="steps between checkpoints (default 400)"
    )

    machine = parser.add_argument_group("machine")
    machine.add_argument("--tp", type=positive, metavar="N", help="tensor-parallel devices (default: all)")
    add_device_options(machine)
    machine.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="of forward passes; default: bf16, and f32 on a CPU without bf16 tiles (AMX)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: train(args))


def train(args: argparse.Namespace) -> None:
    """The command: raises ``scripts._cli.USER_ERRORS`` for what the user can mend."""
    _check(args)
    destination = check_destination(args.out, args.overwrite)
    work = destination.with_name(f"{destination.name}.training")
    set_up(args.cpu_devices)
    model = open_model(args.model)
    config = draft_config(model.config, args.layers)
    if args.length > model.config.max_position_embeddings:
        raise UsageError(
            f"--length {args.length} is more than the {model.config.max_position_embeddings} positions this model was "
            f"made for"
        )
    layout = Layout(make_mesh(args.tp or jax.device_count(), model.config.num_kv_heads))
    check_mesh(layout)
    dtype = DTYPES[args.dtype or ("bf16" if has_bf16_tiles() else default_dtype())]
    tokenizer = model.load_tokenizer()
    _agree(work, args, dtype, layout.tp)

    params = model.load_params(layout, dtype)
    began, cpu = time.perf_counter(), time.process_time()
    pool = _text(args, model, params, tokenizer, layout, dtype, work)
    wrote_s = time.perf_counter() - began
    if len(pool) < args.held_out + args.batch:
        raise UsageError(
            f"there are {len(pool)} texts of {args.length} tokens: fewer than --held-out {args.held_out} and --batch "
            f"{args.batch} need together"
        )
    learnt, held = pool.split(args.held_out)
    size = args.vocabulary or model.config.vocab_size
    vocabulary = None
    if size < model.config.vocab_size:
        vocabulary = frequent_tokens(learnt.counts(model.config.vocab_size), size, tokenizer.stop_token_ids)
    steps = len(learnt) // args.batch * args.epochs
    optimiser = make_optimiser(steps, args.learning_rate, args.warmup, args.clip)
    distiller = Distiller(model.config, config, layout, dtype, optimiser, vocabulary)
    run = _Run(args, distiller, params, layout, learnt, held, work, steps)
    state = run.to_the_end(cut_draft(params, model.config, args.layers))

    facts = {
        "teacher": args.model,
        "layers": args.layers,
        "draft_vocabulary": size,
        "texts": len(learnt),
        "tokens": int(learnt.counted.sum()),
        "steps": steps,
        "dtype": dtype,
        "tp": layout.tp,
        "text_s": wrote_s,
        "training_s": time.perf_counter() - began - wrote_s,
        "cpu_s": time.process_time() - cpu,
        "step_s": run.step_s(),
        "held_out": run.points[-1],
        "curve": run.points,
        "versions": versions(),
        "device": device_facts(),
    }
    files = {} if vocabulary is None else {VOCABULARY_FILE: to_bytes(vocabulary)}
    finished = {path: value.astype(dtype) for path, value in {**run.frozen, **state.params}.items()}
    save_params(
        destination,
        finished,
        config,
        layout,
        tokenizer=tokenizer,
        files={**model.generation_files(), **files},
        overwrite=args.overwrite,
    )
    write_json(str(work / "report.json"), facts)
    last = run.points[-1]
    print(
        f"{destination}: {number_of(args.layers, 'layer')}, {number_of(size, 'token')} in its vocabulary; on held-out "
        f"text it proposes the teacher's best token {last['greedy']:.1%} of the time, and a sampled one is accepted "
        f"{last['sampled']:.1%}.\n"
        f"This run: {facts['text_s']:.0f} s writing text, {facts['training_s']:.0f} s training, {facts['cpu_s']:.0f} s "
        f"of CPU in all; {work / 'loss.png'}"
    )


def _check(args: argparse.Namespace) -> None:
    for name in ("learning_rate", "clip"):
        if not 0 < getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    if args.length < 8:
        raise UsageError(f"--length is {args.length}; it must be at least 8")


def _agree(work: Path, args: argparse.Namespace, dtype: str, tp: int) -> None:
    """Refuse to go on with a run that was begun with other options."""
    work.mkdir(parents=True, exist_ok=True)
    passing = ("out", "overwrite", "checkpoint_every", "cpu_devices", "tp", "dtype")
    asked = {name: value for name, value in vars(args).items() if name not in passing} | {"dtype": dtype, "tp": tp}
    file = work / "options.json"
    if not file.exists():
        write_json(str(file), asked)
        return
    before = json.loads(file.read_text())
    odd = [name for name in asked if asked[name] != before.get(name)]
    if odd:
        told = ", ".join(f"{name} {before.get(name)} and not {asked[name]}" for name in odd)
        raise UsageError(f"{work} holds a run with {told}: give the same options to go on, or remove the folder")


def _text(
    args: argparse.Namespace,
    model: ResolvedModel,
    params: dict[Any, jax.Array],
    tokenizer: Tokenizer,
    layout: Layout,
    dtype: str,
    work: Path,
) -> TextPool:
    if args.text:
        try:
            text = Path(args.text).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(f"--text {args.text} is not UTF-8: {error.reason} at byte {error.start}") from None
        return windows(tokenizer.encode(text), args.length)
    decoder = Decoder(model.config, params, layout, dtype)
    total = args.rows + args.held_out
    pools: list[TextPool] = []
    with _bar() as bar:
        task = bar.add_task("writing text", total=total, note="")
        while (have := sum(map(len, pools))) < total:
            file = work / f"text-{len(pools):05}.npz"
            if not file.exists():
                rows = min(args.write_batch, total - have)
                save_pool(file, write_round(decoder, tokenizer, rows, args.length, args.seed, len(pools), have))
            pools.append(load_pool(file))
            bar.update(task, completed=sum(map(len, pools)))
    return joined(pools)


class _Run:
    """The loop: batches, teacher states, checkpoints, the curve. Its end depends on the options alone."""

    def __init__(
        self,
        args: argparse.Namespace,
        distiller: Distiller,
        teacher: dict[Any, jax.Array],
        layout: Layout,
        learnt: TextPool,
        held: TextPool,
        work: Path,
        steps: int,
    ):
        self.args, self.distiller, self.teacher, self.layout, self.work = args, distiller, teacher, layout, work
        self.learnt, self.held, self.steps = learnt, held, steps
        self.points: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.frozen: dict[Any, jax.Array] = {}
        self._step_samples: list[float] = []
        hidden = next(iter(teacher.values())).shape[-1]
        fits = (len(learnt) + len(held)) * args.length * hidden * 4 <= STATES_LIMIT
        self._kept: dict[tuple[str, int], np.ndarray] | None = {} if fits else None

    def to_the_end(self, draft: dict[Any, jax.Array]) -> State:
        state, self.frozen = self.distiller.start(draft)
        self.head = self.distiller.cut_head(self.frozen)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        logging.getLogger("absl").setLevel(logging.WARNING)
        with ocp.CheckpointManager((self.work / "state").absolute(), options=options) as manager, _bar() as bar:
            first, state = self._resume(manager, state)
            task = bar.add_task("training", total=self.steps, completed=first, note="")
            if not first:
                self._measure(0, state, float("nan"))
            batches = self.learnt.batches(self.args.batch, self.args.epochs, self.args.seed, first)
            for step, rows in enumerate(batches, start=first + 1):
                states, tokens, counted = self._inputs("learnt", self.learnt, rows)
                began = time.perf_counter()
                state, loss, _ = self.distiller.step(state, self.frozen, self.head, states, tokens, counted)
                self.losses.append(float(loss))
                self._step_samples.append(time.perf_counter() - began)
                if not np.isfinite(self.losses[-1]):
                    raise UsageError(f"the loss became {loss} at step {step}: try a smaller --learning-rate")
                if step % self.args.checkpoint_every == 0 or step == self.steps:
                    self._measure(step, state, statistics.fmean(self.losses[-PROGRESS_STEPS:]))
                    # The curve is part of the state: what a resumed run shows is whole.
                    write_json(str(self.work / "curve.json"), {"points": self.points, "losses": self.losses})
                    manager.save(step, args=ocp.args.StandardSave(_named(state)), force=True)
                    _plot(self.work / "loss.png", self.losses, self.points)
                last = self.points[-1]
                bar.update(
                    task,
                    completed=step,
                    note=f"loss {statistics.fmean(self.losses[-PROGRESS_STEPS:]):.3f}, held out: greedy "
                    f"{last['greedy']:.1%}, sampled {last['sampled']:.1%}",
                )
        return state

    def step_s(self) -> float | None:
        """Median seconds of an optimiser step of this process, the teacher's pass not included."""
        return statistics.median(self._step_samples) if self._step_samples else None

    def _resume(self, manager: ocp.CheckpointManager, state: State) -> tuple[int, State]:
        last = manager.latest_step()
        if last is None:
            return 0, state
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _named(state))
        restored = manager.restore(last, args=ocp.args.StandardRestore(abstract))
        curve = json.loads((self.work / "curve.json").read_text())
        self.points = [point for point in curve["points"] if point["step"] <= last]
        self.losses = curve["losses"][:last]
        return last, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(restored))

    def _inputs(self, name: str, pool: TextPool, rows: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Teacher states, tokens and mask of some rows; states are kept where there is room."""
        tokens = self._put(pool.tokens[rows], ("batch", None))
        counted = self._put(pool.counted[rows], ("batch", None))
        if self._kept is None:
            return self.distiller.teacher_states(self.teacher, tokens), tokens, counted
        for group in sorted({int(row) // len(rows) for row in rows if (name, int(row)) not in self._kept}):
            # Rows are computed with the same neighbours however a run was cut, so that they are equal to the last bit.
            members = np.arange(group * len(rows), (group + 1) * len(rows))
            placed = self._put(pool.tokens[np.minimum(members, len(pool) - 1)], TOKENS)
            found = np.asarray(self.distiller.teacher_states(self.teacher, placed))
            self._kept.update({(name, int(row)): value for row, value in zip(members, found, strict=True)})
        states = np.stack([self._kept[name, row] for row in rows.tolist()])
        return self._put(states, ("batch", None, None)), tokens, counted

    def _measure(self, step: int, state: State, loss: float) -> None:
        total = np.zeros(len(Scores._fields))
        batch = self.args.batch
        for at in range(0, len(self.held) // batch * batch, batch):
            states, tokens, counted = self._inputs("held", self.held, np.arange(at, at + batch))
            scores = self.distiller.evaluate(state.params, self.frozen, self.head, states, tokens, counted)
            total += np.array([float(one) for one in scores])
        sums = Scores(*total / max(total[-1], 1))
        self.points.append(
            {
                "step": step,
                "loss": loss,
                "held_out_loss": float(sums.loss),
                "greedy": float(sums.greedy),
                "sampled": float(sums.sampled),
            }
        )

    def _put(self, value: np.ndarray, axes: Sequence[str | None]) -> jax.Array:
        return place_on_mesh(value, self.layout.sharding(axes))


TOKENS = ("batch", None)


def _named(state: State) -> dict[str, Any]:
    """Leaves by number: Orbax stores no tuples as keys."""
    return {f"{index:05}": leaf for index, leaf in enumerate(jax.tree.leaves(state))}


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, refresh_per_second=1)


def _plot(path: Path, losses: Sequence[float], points: Sequence[dict[str, float]]) -> None:
    """Loss of every step, and acceptance on held-out text, as a PNG; without matplotlib there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("note: no loss plot, which needs matplotlib (pip install -e '.[plot]')", file=sys.stderr)
        return
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(losses) + 1), losses, linewidth=0.6, color="#9bb", label="each step")
    left.plot([one["step"] for one in points], [one["held_out_loss"] for one in points], "o-", label="held out")
    left.set(xlabel="step", ylabel="KL from the teacher (nats)", yscale="log")
    for name, told in (("greedy", "best token is the teacher's"), ("sampled", "sampled token is accepted")):
        right.plot([one["step"] for one in points], [one[name] for one in points], "o-", label=told)
    right.set(xlabel="step", ylabel="share of held-out positions", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
