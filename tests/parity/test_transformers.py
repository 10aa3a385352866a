"""Against Hugging Face transformers, live: every logit, where the golden files keep a few.

Needs the `parity` extra and is skipped without it. transformers runs in a process of its own; see
`tests.golden.transformers_side` for why.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.checkpoint.resolve import open_model
from model.config import LlamaConfig
from model.rope import inverse_frequencies, rope_tables
from tests.decode.running import (
    demo_decoder,
    golden_demo,
    golden_model,
    golden_random,
    make_decoder,
    run,
)
from tests.golden.ask import CHECKOUT, Answer, ask_transformers, clean_environment
from tests.golden.cases import CASES, ROPE_CASES, tensors, tokens, write_weights
from tests.golden.demo_folder import write_demo

pytestmark = pytest.mark.optimized

for package in ("torch", "transformers"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (the parity extra)", allow_module_level=True)

RANDOM_TOLERANCE = 5e-5
"""Both sides are float32 and sum in different orders; twice the largest difference seen."""

DEMO_TOLERANCE = 2e-3
NEW_TOKENS = 64
ROPE_POSITIONS = [0, 1, 2047, 8191, 8192, 8193, 50_000, 100_000, 131_071]

SAVED = ("llama-3.1", "llama-3.2", "biases")
"""Cases that transformers also saves itself: untied, tied, and with biases."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture(scope="module")
def answers(work: Path) -> Answer:
    """Logits and greedy tokens of every random model, twice: with transformers' config.json and with ours."""
    requests: list[dict[str, Any]] = []
    for case in CASES.values():
        text = tokens(case)
        asked = {"logits": [text, text[:1]], "greedy": [[text, case.new_tokens]]}
        theirs = write_weights(work / case.name, tensors(case))
        request = asked | {"name": case.name, "folder": str(theirs), "config": dict(case.config)}
        if case.name in SAVED:
            request |= {"save": str(work / f"{case.name}-saved"), "shard_size": "200KB"}
        ours = write_weights(work / f"{case.name}-ours", tensors(case))
        config = golden_model(case.name).config
        (ours / "config.json").write_text(json.dumps(config.to_hf() | {"dtype": "float32"}))
        requests += [request, asked | {"name": f"{case.name}-ours", "folder": str(ours), "config": None}]
    rope = {"positions": ROPE_POSITIONS, "configs": ROPE_CASES}
    return ask_transformers(work, requests, rope)


@pytest.fixture(scope="module")
def demo_answer(work: Path, demo_gguf: Path) -> dict[str, np.ndarray]:
    folder = work / "demo-answer"
    folder.mkdir()
    golden = golden_demo()
    request = {
        "name": "demo",
        "folder": str(folder / "model"),
        "config": write_demo(folder / "model", demo_gguf),
        "logits": [golden["tokens"]],
        "greedy": [[one["prompt"], NEW_TOKENS] for one in golden["runs"]],
    }
    return ask_transformers(folder, [request]).models["demo"]


@pytest.mark.xdist_group("parity")
class TestRandomModels:
    @pytest.mark.parametrize("name", sorted(CASES))
    def test_every_logit_and_greedy_token(self, answers: Answer, name: str) -> None:
        """Read with the config.json that this transformers writes, which may differ from the golden file's."""
        decoder = make_decoder(open_model(str(Path(answers.folder, name))))
        text, theirs = tokens(CASES[name]), answers.models[name]
        for ids, wanted in ((text, theirs["logits_0"]), (text[:1], theirs["logits_1"])):
            np.testing.assert_allclose(decoder.logits([ids])[0], wanted, rtol=0, atol=RANDOM_TOLERANCE)
        row = run(decoder, [text], CASES[name].new_tokens)[0]
        assert row.tokens == theirs["greedy_0"].tolist()

    @pytest.mark.parametrize("name", sorted(CASES))
    def test_transformers_reads_the_config_that_we_write(self, answers: Answer, name: str) -> None:
        theirs, ours = answers.models[name], answers.models[f"{name}-ours"]
        np.testing.assert_array_equal(ours["logits_0"], theirs["logits_0"])

    @pytest.mark.parametrize("name", SAVED)
    def test_a_folder_that_transformers_saved(self, answers: Answer, name: str) -> None:
        """In several shards, with its own index and generation_config.json."""
        folder = Path(answers.folder, f"{name}-saved")
        assert (folder / "model.safetensors.index.json").is_file()
        decoder = make_decoder(open_model(str(folder)))
        found = decoder.logits([tokens(CASES[name])])[0]
        np.testing.assert_allclose(found, answers.models[name]["logits_0"], rtol=0, atol=RANDOM_TOLERANCE)

    def test_golden_files_are_what_transformers_says_today(self, answers: Answer) -> None:
        """When this fails, `python -m tests.golden.make` and see what changed."""
        for name, golden in golden_random().items():
            theirs = answers.models[name]
            logits = theirs["logits_0"][golden["positions"]]
            found = np.take_along_axis(logits, np.array(golden["top_ids"]), axis=-1)
            np.testing.assert_allclose(found, golden["top_logits"], rtol=0, atol=RANDOM_TOLERANCE)
            assert theirs["greedy_0"].tolist() == golden["greedy"]


@pytest.mark.xdist_group("parity")
@pytest.mark.parametrize("name", sorted(ROPE_CASES))
def test_rope_tables_at_true_positions(answers: Answer, name: str) -> None:
    """Angles differ by the last bits of the frequencies, times the position: see tests/model/test_llama_rope.py."""
    theirs = answers.rope[f"{name}/inv_freq"]
    ours = inverse_frequencies(LlamaConfig.from_hf({"model_type": "llama"} | ROPE_CASES[name]))
    np.testing.assert_allclose(ours, theirs, rtol=4e-7, atol=0)
    tables = jax.jit(rope_tables)(theirs, jnp.array([ROPE_POSITIONS], jnp.int32))
    for table, kind in zip(tables, ("cos", "sin"), strict=True):
        np.testing.assert_allclose(table[0], answers.rope[f"{name}/{kind}"], rtol=0, atol=5e-7)


@pytest.mark.xdist_group("demo")
class TestDemoModel:
    def test_every_logit_of_a_text(self, demo_answer: dict[str, np.ndarray]) -> None:
        """200 positions by 49,152 tokens."""
        found = demo_decoder().logits([golden_demo()["tokens"]])[0]
        assert found.shape == demo_answer["logits_0"].shape == (200, 49_152)
        np.testing.assert_allclose(found, demo_answer["logits_0"], rtol=0, atol=DEMO_TOLERANCE)

    def test_greedy_tokens(self, demo_answer: dict[str, np.ndarray]) -> None:
        """Five prompts in one batch, 64 tokens each, past every end-of-text token on both sides."""
        prompts = [one["prompt"] for one in golden_demo()["runs"]]
        rows = run(demo_decoder(), prompts, NEW_TOKENS)
        for index, row in enumerate(rows):
            assert row.tokens == demo_answer[f"greedy_{index}"].tolist()


def test_transformers_never_sees_our_kernels_package(tmp_path: Path) -> None:
    """A package `kernels` of Hugging Face's, installed beside this checkout, is the one its process imports.

    Ours would break `import transformers` there: it takes names from whatever is called `kernels` as soon as the
    installed distribution of that name has a version that it supports.
    """
    theirs = tmp_path / "site" / "kernels"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").write_text("")
    search = [str(CHECKOUT), str(theirs.parent)]
    probe = "import importlib.util; print(importlib.util.find_spec('kernels').origin)"
    for folder in (CHECKOUT, tmp_path):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(search))
            done = subprocess.run(
                [sys.executable, "-P", "-c", probe],
                env=clean_environment(),
                cwd=folder,
                capture_output=True,
                text=True,
                check=True,
            )
        assert Path(done.stdout.strip()).parent == theirs
