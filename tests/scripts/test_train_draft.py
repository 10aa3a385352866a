"""`python -m scripts.train_draft` on a tiny teacher: what it writes, that it learns, and that it resumes exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.checkpoint.resolve import open_model
from model.training.draft_vocabulary import read_vocabulary
from scripts import train_draft
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.model.checkpoint_files import small_config
from tests.scripts.tiny import BOS, EOS, write_tiny

CONFIG = small_config(vocab_size=258, bos_token_id=BOS, eos_token_ids=(EOS,), num_layers=2)
SMALL = (
    *("--layers", "1", "--length", "32", "--batch", "4", "--held-out", "4", "--vocabulary", "64"),
    *("--warmup", "1", "--checkpoint-every", "3", "--tp", "1", "--dtype", "f32"),
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("teacher") / "model", CONFIG)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that repeats, so that there is something to learn."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 12)
    return file


def draft_of(path: Path) -> dict[Any, np.ndarray]:
    model = open_model(str(path))
    layout = Layout(make_mesh(1, model.config.num_kv_heads))
    return {path: np.asarray(value) for path, value in model.load_params(layout, "float32", progress=False).items()}


def train(teacher: Path, out: Path, *more: str | Path) -> int:
    return train_draft.main(["--model", str(teacher), "--out", str(out), *SMALL, *map(str, more)])


def test_a_killed_run_goes_on_to_the_same_weights(
    in_process: None, teacher: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--text", text, "--epochs", "3", "--learning-rate", "0.01")
    assert train(teacher, tmp_path / "whole", *options) == 0
    facts = json.loads((tmp_path / "whole.training" / "report.json").read_text())
    steps = facts["steps"]
    assert steps == 9
    assert facts["curve"][-1]["held_out_loss"] < 0.8 * facts["curve"][0]["held_out_loss"]
    assert (tmp_path / "whole.training" / "loss.png").read_bytes().startswith(b"\x89PNG")

    taken = 0

    class KilledError(Exception):
        pass

    original = train_draft._Run._inputs

    def inputs(self: Any, name: str, *arguments: Any) -> Any:
        nonlocal taken
        taken += name == "learnt"
        if taken == 5:  # after the checkpoint of step 3, and a step that is lost
            raise KilledError
        return original(self, name, *arguments)

    monkeypatch.setattr(train_draft._Run, "_inputs", inputs)
    with pytest.raises(KilledError):
        train(teacher, tmp_path / "cut", *options)
    monkeypatch.setattr(train_draft._Run, "_inputs", original)
    assert not (tmp_path / "cut").exists()
    assert train(teacher, tmp_path / "cut", *options) == 0
    whole, cut = draft_of(tmp_path / "whole"), draft_of(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    for path, value in whole.items():
        np.testing.assert_array_equal(value, cut[path], err_msg=str(path))
    curves = [json.loads((tmp_path / f"{name}.training" / "curve.json").read_text()) for name in ("whole", "cut")]
    assert curves[0] == curves[1]
    # Other options would make another draft.
    assert train(teacher, tmp_path / "cut", *options, "--overwrite", "--seed", "1") == 1


def test_the_teacher_writes_the_text(
    in_process: None, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(teacher, tmp_path / "draft", "--rows", "8", "--write-batch", "6", "--epochs", "1") == 0
    assert "1 layer, 64 tokens in its vocabulary" in capsys.readouterr().out
    model = open_model(str(tmp_path / "draft"))
    assert model.config.num_layers == 1
    assert model.load_tokenizer().stop_token_ids
    listed = read_vocabulary(tmp_path / "draft", model.config.vocab_size)
    assert listed is not None
    assert len(listed) == 64
    assert EOS in listed
    whole, draft = draft_of(teacher), draft_of(tmp_path / "draft")
    np.testing.assert_array_equal(draft["embed", "weight"], whole["embed", "weight"])
    np.testing.assert_array_equal(draft["head", "weight"], whole["head", "weight"])
    assert any((draft[path] != whole[path]).any() for path in draft if path[0] == "layers")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--layers", "2"), "give 1 to 1"),
        (("--length", "4"), "at least 8"),
        (("--length", "4096"), "more than the"),
        (("--learning-rate", "0"), "above 0"),
    ],
)
def test_what_cannot_work_is_refused(
    in_process: None,
    teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    told: str,
) -> None:
    assert train(teacher, tmp_path / "draft", *options) == 1
    assert told in capsys.readouterr().err
