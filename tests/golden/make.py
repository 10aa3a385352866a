"""Makes the golden files: `python -m tests.golden.make` in an environment with the `parity` extra.

Run it again when a case is added. Files record the versions that made them; the float32 results of other versions or
processors differ in the last digits, which the tolerances of the tests allow.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint.demo import GGUF_SHA256, fetch_demo
from model.checkpoint.resolve import open_model
from tests.golden.ask import ask_transformers
from tests.golden.cases import (
    CASES,
    DEMO,
    RANDOM_MODELS,
    ROPE,
    ROPE_CASES,
    ROPE_POSITIONS,
    checksum,
    tensors,
    tokens,
    write_weights,
)
from tests.golden.demo_folder import write_demo
from tests.golden.demo_text import CHATS, TEXT, TEXT_TOKENS, UNFINISHED

TOP = 6
PROBES = 8
NEW_TOKENS = 64
RANDOM_MARGIN, DEMO_MARGIN = 0.001, 0.01
"""A greedy run with a closer call than this could turn on rounding, so make asks for another prompt. Rounding moves a
logit by about 1e-5 in the random models and 1e-4 in the demo model."""


def make_random_models(work: Path) -> None:
    requests = []
    for case in CASES.values():
        folder = write_weights(work / case.name, tensors(case))
        text = tokens(case)
        requests.append(
            {
                "name": case.name,
                "folder": str(folder),
                "config": dict(case.config),
                "logits": [text],
                "greedy": [[text, case.new_tokens]],
            }
        )
    answer = ask_transformers(work, requests)
    cases = {}
    for case in CASES.values():
        found = answer.models[case.name]
        check_margin(case.name, found["margin_0"], RANDOM_MARGIN)
        logits = found["logits_0"]
        positions = sorted({0, 1, case.length // 2, case.length - 2, case.length - 1})
        cases[case.name] = {
            "config": json.loads((work / case.name / "config.json").read_text()),
            "weights_sha256": checksum(tensors(case)),
            "tokens": tokens(case),
            "logsumexp": rounded(logsumexp(logits)),
            "positions": positions,
            **top(logits[positions]),
            "greedy": found["greedy_0"].tolist(),
        }
    write(RANDOM_MODELS, answer.made_with, {"cases": cases})


def make_demo(work: Path) -> None:
    gguf = fetch_demo()
    tokenizer = open_model(str(gguf)).load_tokenizer()
    text = tokenizer.encode(TEXT)[:TEXT_TOKENS]
    if len(text) < TEXT_TOKENS:
        raise SystemExit(f"the text has {len(text)} tokens; {TEXT_TOKENS} are needed")
    prompts = [tokenizer.encode_chat([{"role": "user", "content": chat}]) for chat in CHATS]
    prompts += [tokenizer.encode(start) for start in UNFINISHED]
    config = write_demo(work / "demo", gguf)
    request = {
        "name": "demo",
        "folder": str(work / "demo"),
        "config": config,
        "logits": [text],
        "greedy": [[prompt, NEW_TOKENS] for prompt in prompts],
    }
    answer = ask_transformers(work, [request])
    found = answer.models["demo"]
    logits = found["logits_0"]
    probes = np.linspace(0, logits.shape[1] - 1, PROBES).astype(int)
    runs = []
    for index, prompt in enumerate(prompts):
        check_margin(f"prompt {index}", found[f"margin_{index}"], DEMO_MARGIN)
        runs.append({"prompt": prompt, "greedy": found[f"greedy_{index}"].tolist()})
    content = {
        "gguf_sha256": GGUF_SHA256,
        "tokens": text,
        "logsumexp": rounded(logsumexp(logits)),
        **top(logits),
        "probe_ids": probes.tolist(),
        "probe_logits": rounded(logits[:, probes]),
        "runs": runs,
    }
    write(DEMO, answer.made_with, content)


def make_rope(work: Path) -> None:
    answer = ask_transformers(work, rope={"positions": list(ROPE_POSITIONS), "configs": ROPE_CASES})
    cases = {}
    for name, config in ROPE_CASES.items():
        cases[name] = {
            # inv_freq is kept to the last bit; the tables to a bit more than float32 holds near 1.
            "inv_freq": [float(value) for value in answer.rope[f"{name}/inv_freq"]],
            "head_dim": config["hidden_size"] // config["num_attention_heads"],
            "rope_parameters": config["rope_parameters"],
            "cos": rounded(answer.rope[f"{name}/cos"], 7),
            "sin": rounded(answer.rope[f"{name}/sin"], 7),
        }
    write(ROPE, answer.made_with, {"positions": list(ROPE_POSITIONS), "cases": cases})


def check_margin(name: str, margins: np.ndarray, smallest: float) -> None:
    print(f"{name}: closest call of the greedy run {margins.min():.4f}")
    if margins.min() < smallest:
        raise SystemExit(f"{name} has a call closer than {smallest}: change its text")


def top(logits: np.ndarray) -> dict[str, Any]:
    """The largest logits of each row [T, TOP] and their ids, best first."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP]
    return {"top_ids": ids.tolist(), "top_logits": rounded(np.take_along_axis(logits, ids, axis=-1))}


def logsumexp(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    peak = wide.max(axis=-1)
    return peak + np.log(np.exp(wide - peak[:, None]).sum(axis=-1))


def rounded(values: np.ndarray, digits: int = 5) -> list[Any]:
    return np.round(values.astype(np.float64), digits).tolist()


def write(file: Path, made_with: Mapping[str, str], content: Mapping[str, Any]) -> None:
    """One key a line, so that a change shows which."""
    parts: dict[str, Any] = {"made_with": dict(made_with), **content}
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in parts.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{file.name}: {file.stat().st_size:,} bytes")


def _lines(value: Any) -> str:
    if isinstance(value, dict) and all(isinstance(inner, dict) for inner in value.values()):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(inner)}" for key, inner in value.items()) + "\n}"
    return json.dumps(value)


def main() -> None:
    for part in (make_random_models, make_demo, make_rope):
        with tempfile.TemporaryDirectory() as folder:
            part(Path(folder))


if __name__ == "__main__":
    main()
