"""`python -m scripts.generate` as a user runs it, on a tiny model, and once on the demo model."""

from __future__ import annotations

import io
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from model.checkpoint.resolve import open_model
from scripts import convert_checkpoint, generate
from tests.decode.running import make_decoder, run, small_tensors
from tests.model.checkpoint_files import write_gguf, write_hf
from tests.model.tokenizer_files import byte_level_metadata
from tests.scripts.several import session_cache
from tests.scripts.tiny import BOS, CONFIG, EOS, answer, poison, text_of, tokens_of, write_tiny

ROOT = Path(generate.__file__).parents[1]
PROMPT = "Once upon"
N = 12

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def command(in_process: None, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command: (status, stdout, stderr). One device, unless --tp is given."""

    def call(*options: str | Path) -> tuple[int, str, str]:
        one = [] if "--tp" in options else ["--tp", "1"]
        status = generate.main([*map(str, options), *one])
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def measured(command: Run, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command quietly and returns its JSON."""

    def call(*options: str | Path) -> dict[str, Any]:
        target = tmp_path / "found.json"
        status, out, err = command(*options, "--quiet", "--json", target)
        assert (status, err) == (0, "")
        found = json.loads(target.read_text())
        assert out == "".join(one["text"] + "\n" for one in found["completions"])
        return found

    return call


def test_quiet_prints_the_text_alone(command: Run, tiny: Path) -> None:
    expected = answer(tiny, tokens_of(PROMPT), N)
    assert EOS not in expected
    status, out, err = command("--model", tiny, "--prompt", PROMPT, "--max-new-tokens", str(N), "--quiet")
    assert (status, out, err) == (0, text_of(expected) + "\n", "")


def test_text_and_report_on_stdout_and_notes_on_stderr(command: Run, tiny: Path) -> None:
    jax.config.update("jax_enable_compilation_cache", False)  # which is a note
    status, out, err = command("--model", tiny, "--prompt", PROMPT, "--max-new-tokens", str(N), "--tp", "3")
    assert status == 0
    text = text_of(answer(tiny, tokens_of(PROMPT), N))
    assert out.startswith(f"{text}\n\nload ")
    labels = [line.split()[0] for line in out.removeprefix(f"{text}\n\n").splitlines()]
    assert labels == ["load", "compile", "TTFT", "TPOT", "bytes", "achieved", "mesh"]
    assert "for a prompt of 10 tokens" in out
    assert "1 data x 3 kv_head x 1 kv_seq; 1 all-gather, 3 all-reduce a step" in out
    started, cache, loaded = err.splitlines()
    assert started == (
        f"{tiny}: {CONFIG.parameter_count():,} parameters in float32, unrolled layers; "
        "tp=3 as 3 kv_head x 1 kv_seq (mesh 1x3x1, cpu)"
    )
    assert cache.startswith("note: compilation cache off: ")
    assert loaded.startswith("loaded in ")


def test_json_says_everything(measured: Callable[..., dict[str, Any]], tiny: Path) -> None:
    found = measured("--model", tiny, "--prompt", PROMPT, "--max-new-tokens", str(N), "--tp", "3")
    expected = answer(tiny, tokens_of(PROMPT), N)
    assert found["token_ids"] == expected
    assert found["text"] == text_of(expected)
    assert (found["finish_reason"], found["prompt_tokens"], found["generated_tokens"]) == ("length", 10, N)
    assert found["completions"] == [
        {"prompt": PROMPT}
        | {key: found[key] for key in ("token_ids", "logprobs", "text", "finish_reason")}
        | {key: found[key] for key in ("prompt_tokens", "generated_tokens")}
    ]
    decoder = make_decoder(open_model(str(tiny)))
    logits = decoder.logits([[*tokens_of(PROMPT), *expected]])[0, 9:-1].astype(np.float64)
    chosen = logits[np.arange(N), expected] - np.log(np.exp(logits).sum(axis=1))
    np.testing.assert_allclose(found["logprobs"], chosen, atol=1e-4)

    assert found["tp"] == 3
    assert found["mesh"] == {"data": 1, "kv_head": 3, "kv_seq": 1}
    assert found["collectives_per_step"] == {"all-gather": 1, "all-reduce": 1 + 2 * CONFIG.num_layers}
    assert (found["model"], found["dtype"], found["layers"]) == (str(tiny), "float32", "unrolled")
    assert (found["batch"], found["max_len"], found["context"]) == (1, 10 + N, 16)
    assert found["sampling"]["temperature"] == 0.0
    assert found["compile_cache"] in ("cache hit", "cache miss") or "hit" in found["compile_cache"]

    # Each device holds a third of what divides by three: 258 rows of vocabulary, heads, 45 rows of F; norms are whole.
    D, H, F, V = CONFIG.hidden_size, CONFIG.head_dim, CONFIG.intermediate_size, CONFIG.vocab_size
    layer = ((6 + 3 + 3) * H * D + 6 * H * D + 3 * F * D) // 3 + 2 * D
    assert found["weight_bytes_per_device"] == 4 * (2 * V * D // 3 + CONFIG.num_layers * layer + D)
    assert (
        found["step_bytes_per_device"] == found["step_weight_bytes_per_device"] + found["step_cache_bytes_per_device"]
    )
    assert found["step_cache_bytes_per_device"] == 2 * CONFIG.num_layers * 16 * H * 4  # one KV head of three
    read = found["step_weight_bytes_per_device"]
    assert 0 < found["weight_bytes_per_device"] - read <= 4 * V * D // 3  # of the embedding a step reads one row
    assert found["achieved_gb_per_s"] == pytest.approx(found["step_bytes_per_device"] / found["tpot_s"] / 1e9)
    assert found["limit_fraction"] == pytest.approx(found["achieved_gb_per_s"] / found["limit_gb_per_s"])
    assert found["limit_gb_per_s"] == max(found["limit_samples_gb_per_s"])
    for key in ("load_s", "compile_s", "ttft_s", "tpot_s", "tokens_per_s"):
        assert found[key] > 0, key
    assert min(found["tpot_samples_s"]) <= found["tpot_s"] <= max(found["tpot_samples_s"])
    assert found["versions"]["jax"]
    assert found["device"]["platform"] == "cpu"


def test_scanned_layers(measured: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The loop over layers is one body in the program, and runs three times: collectives count as often."""
    folder = write_tiny(tmp_path / "deep", replace(CONFIG, num_layers=3))
    found = measured("--model", folder, "--prompt", PROMPT, "--max-new-tokens", "6", "--layers", "scan", "--tp", "3")
    assert found["token_ids"] == answer(folder, tokens_of(PROMPT), 6)
    assert found["layers"] == "scan"
    assert found["collectives_per_step"] == {"all-gather": 1, "all-reduce": 1 + 2 * 3}


def test_bf16_halves_the_bytes(measured: Callable[..., dict[str, Any]], tiny: Path) -> None:
    found = measured("--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "6", "--dtype", "bf16")
    assert found["dtype"] == "bfloat16"
    assert found["weight_bytes_per_device"] == 2 * CONFIG.parameter_count()
    assert found["generated_tokens"] == 6


def test_the_cache_may_be_smaller(measured: Callable[..., dict[str, Any]], tiny: Path) -> None:
    """int8: a quarter of the float32 bytes, and 4 bytes of scale a position and head."""
    options = ("--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "4")
    wide, small = measured(*options), measured(*options, "--kv-dtype", "int8")
    assert (wide["kv_dtype"], small["kv_dtype"]) == ("float32", "int8")
    numbers = wide["step_cache_bytes_per_device"] // 4
    assert small["step_cache_bytes_per_device"] == numbers + numbers // CONFIG.head_dim * 4
    assert small["step_weight_bytes_per_device"] == wide["step_weight_bytes_per_device"]


def test_one_token_has_no_step_to_time(command: Run, tiny: Path, tmp_path: Path) -> None:
    options = ["--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "1", "--json", tmp_path / "x.json"]
    status, out, _ = command(*options)
    assert status == 0
    assert "TPOT      not measured: no token was decoded after the first" in out
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["token_ids"] == answer(tiny, tokens_of(PROMPT), 1)
    nothing = ("tpot_s", "tokens_per_s", "achieved_gb_per_s", "limit_fraction")
    assert [found[key] for key in nothing] == [None] * 4
    assert found["ttft_s"] > 0


def test_max_len_ends_the_text(measured: Callable[..., dict[str, Any]], tiny: Path) -> None:
    found = measured("--model", tiny, "--prompt", PROMPT, "--max-len", "14")
    assert found["token_ids"] == answer(tiny, tokens_of(PROMPT), 4)
    assert (found["finish_reason"], found["max_len"]) == ("length", 14)


def test_several_prompts_are_each_as_if_alone(
    measured: Callable[..., dict[str, Any]], command: Run, tiny: Path, tmp_path: Path
) -> None:
    """In the order of the command line; five in batches of two, the last smaller."""
    lines = "first line\r\n\n  kept blank\n" + "two\u2028halves\n"
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    asked = ["--prompt", "a", "--prompts-file", tmp_path / "prompts.txt", "--chat", "Hi"]
    options = ["--model", tiny, *asked, "--batch", "2", "--max-new-tokens", "5"]
    found = measured(*options)
    texts = ["a", "first line", "  kept blank", "two\u2028halves", "Hi"]
    chat = [BOS, *tokens_of("user:Hi;", bos=False)]
    expected = [answer(tiny, tokens, 5) for tokens in (*map(tokens_of, texts[:-1]), chat)]
    assert [one["prompt"] for one in found["completions"]] == texts
    assert [one["token_ids"] for one in found["completions"]] == expected
    assert [one["prompt_tokens"] for one in found["completions"]] == [2, 11, 13, 13, 9]
    assert found["token_ids"] == expected[0]
    assert (found["batch"], found["max_len"]) == (2, 18)
    assert found["context"] == round(statistics.mean([2, 11, 13, 13]) + 2.5)  # of the two full batches

    status, out, _ = command(*options)
    assert status == 0
    shown = "".join(f"### {text}\n{text_of(tokens)}\n\n" for text, tokens in zip(texts, expected, strict=True))
    assert out.startswith(shown + "\nload ")
    assert "for 2 prompts together, the longest of 13 tokens" in out


def test_prompts_from_standard_input(command: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo")))
    status, out, err = command("--model", tiny, "--prompts-file", "-", "--max-new-tokens", "3", "--quiet")
    texts = [text_of(answer(tiny, tokens_of(text), 3)) for text in ("one", "two")]
    assert (status, out, err) == (0, "".join(f"{text}\n" for text in texts), "")


def test_chat_with_a_system_message(measured: Callable[..., dict[str, Any]], tiny: Path) -> None:
    found = measured("--model", tiny, "--chat", "Hi", "--system", "Be brief", "--max-new-tokens", "3")
    prompt = [BOS, *tokens_of("system:Be brief;", bos=False), BOS, *tokens_of("user:Hi;", bos=False)]
    assert found["prompt_tokens"] == len(prompt)
    assert found["token_ids"] == answer(tiny, prompt, 3)


def test_stop_tokens_and_stop_strings(measured: Callable[..., dict[str, Any]], tiny: Path, tmp_path: Path) -> None:
    tokens = answer(tiny, tokens_of(PROMPT), N)
    fourth = next(at for at in range(3, N) if tokens[at] < 128 and tokens[at] not in tokens[:at])
    other = write_tiny(tmp_path / "stops", replace(CONFIG, eos_token_ids=(EOS, tokens[fourth])))
    found = measured("--model", other, "--prompt", PROMPT, "--max-new-tokens", str(N))
    assert (found["token_ids"], found["finish_reason"]) == (tokens[: fourth + 1], "stop")
    assert found["text"] == text_of(tokens[:fourth])

    stop = text_of([tokens[fourth]])
    found = measured("--model", tiny, "--prompt", PROMPT, "--stop", "never", "--stop", stop)
    assert (found["token_ids"], found["finish_reason"]) == (tokens[: fourth + 1], "stop")
    assert found["text"] == text_of(tokens[:fourth])


def test_sampling_options_and_the_seed_at_every_degree(measured: Callable[..., dict[str, Any]], tiny: Path) -> None:
    filters = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 11}
    options = [text for name, value in filters.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    for tp in ("1", "4"):
        found = measured("--model", tiny, "--prompt", PROMPT, "--max-new-tokens", str(N), "--tp", tp, *options)
        assert found["sampling"] == filters
        assert found["token_ids"] == answer(tiny, tokens_of(PROMPT), N, **filters)
    assert found["token_ids"] != answer(tiny, tokens_of(PROMPT), N, **{**filters, "seed": 12})


@pytest.mark.parametrize(
    ("form", "counts"),
    [
        ("scatter", {"all-gather": 2 * CONFIG.num_layers + 2, "reduce-scatter": 2 * CONFIG.num_layers + 1}),
        ("one_shot", {"all-gather": 2 * CONFIG.num_layers + 2}),
    ],
)
def test_forms_of_all_reduce(
    measured: Callable[..., dict[str, Any]], tiny: Path, form: str, counts: dict[str, int]
) -> None:
    options = ["--prompt", PROMPT, "--max-new-tokens", str(N), "--tp", "3", "--collective", form]
    found = measured("--model", tiny, *options)
    assert found["token_ids"] == answer(tiny, tokens_of(PROMPT), N)
    assert (found["collective"], found["collectives_per_step"]) == (form, counts)


def test_json_on_stdout_stands_alone(command: Run, tiny: Path) -> None:
    options = ["--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "3", "--json", "-"]
    expected = answer(tiny, tokens_of(PROMPT), 3)
    status, out, err = command(*options)
    assert (status, json.loads(out)["token_ids"]) == (0, expected)
    assert f"\n{text_of(expected)}\n\nload " in err
    status, out, err = command(*options, "--quiet")
    assert (status, json.loads(out)["token_ids"], err) == (0, expected, "")


def test_orbax_saved_at_one_degree_and_run_at_another(
    measured: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path
) -> None:
    assert convert_checkpoint.main([str(tiny), str(tmp_path / "saved"), "--tp", "2"]) == 0
    capsys.readouterr()
    found = measured("--model", tmp_path / "saved", "--chat", "Hi", "--max-new-tokens", "5", "--tp", "3")
    assert found["token_ids"] == answer(tiny, [BOS, *tokens_of("user:Hi;", bos=False)], 5)


def test_gguf_file(measured: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    config = replace(CONFIG, vocab_size=265)
    metadata = byte_level_metadata(bos_token_id=..., eos_token_id=...)
    file = write_gguf(tmp_path / "m.gguf", config, dict(small_tensors(config)), metadata=metadata)
    found = measured("--model", file, "--prompt", "hi", "--max-new-tokens", "5")
    prompt = open_model(str(file)).load_tokenizer().encode("hi")
    decoder = make_decoder(open_model(str(write_hf(tmp_path / "same", config, dict(small_tensors(config))))))
    assert found["token_ids"] == run(decoder, [prompt], 5)[0].tokens


def test_bad_input_is_one_line_before_anything_is_loaded(
    command: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("model.checkpoint.resolve.load_params", loaded)
    monkeypatch.setattr(generate, "measure_read_bandwidth", loaded)
    plain = write_tiny(tmp_path / "plain", chat=False, bos=False)
    bare = write_hf(tmp_path / "bare", CONFIG, dict(small_tensors(CONFIG)))
    small = replace(CONFIG, vocab_size=50, bos_token_id=1, eos_token_ids=(2,))
    mixed = write_tiny(tmp_path / "mixed", small)
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "blank.txt").write_text(" \n\n")
    before = sorted(tmp_path.rglob("*"))

    hello = ["--model", tiny, "--prompt", "hello"]
    cases: list[tuple[list[Any], str]] = [
        (["--model", tiny], 'nothing to do: give --chat "a message", --prompt "a text", or --prompts-file PATH'),
        ([*hello, "--system", "x"], "--system goes with --chat"),
        (["--prompts-file", "a", "--prompts-file", "b"], "--prompts-file is given more than once"),
        (["--model", plain, "--prompt", "a", "--prompt", ""], "prompt 2 of 2 ('') is empty: it has no token"),
        (["--model", plain, "--chat", "Hi"], "this model has no chat template"),
        (["--model", bare, "--prompt", "Hi"], "bare has no tokenizer.json"),
        (["--model", mixed, "--prompt", "Hi"], "the prompt has token id 256, and this model's ids end at 49"),
        ([*hello, "--max-len", "6"], "the prompt has 6 tokens, which leaves no room for a new one in max_len 6"),
        ([*hello, "--max-len", "65"], "max_len 65 is more than the 64 positions"),
        (["--model", tiny, "--prompt", "x" * 64], "the prompt has 65 tokens, which leaves no room"),
        ([*hello, "--tp", "9"], "tp=9 (times data=1) needs 9 devices, but JAX sees 8 (cpu)"),
        ([*hello, "--collective", "scatter"], "--collective scatter has no effect on one device; add --tp 2 or more"),
        ([*hello, "--cpu-devices", "9"], "--cpu-devices 9 comes too late"),
        ([*hello, "--top-k", "5", "--min-p", "0.1"], "--top-k, --min-p have no effect at temperature 0"),
        ([*hello, "--top-p", "0.5"], "--top-p has no effect at temperature 0"),
        ([*hello, "--temperature", "-1"], "temperature is -1.0; it must be 0 (greedy) or more"),
        ([*hello, "--temperature", "nan"], "temperature is nan"),
        ([*hello, "--temperature", "1", "--top-p", "1.5"], "top_p is 1.5; it must be above 0 and at most 1"),
        ([*hello, "--seed", str(2**64)], "seed is 18446744073709551616"),
        ([*hello, "--stop", ""], "stop string '' is not usable"),
        ([*hello, "--json", tmp_path / "gone" / "x.json"], "there is no folder"),
        ([*hello, "--json", tmp_path], "it is a folder"),
        (["--prompts-file", tmp_path / "gone.txt"], "gone.txt: No such file or directory"),
        (["--prompts-file", tmp_path], "Is a directory"),
        (["--prompts-file", tmp_path / "latin.txt"], "latin.txt is not UTF-8: byte 3 is 0xe9"),
        (["--prompts-file", tmp_path / "blank.txt"], "blank.txt holds no prompt"),
        (["--model", tmp_path / "gone", "--prompt", "Hi"], "there is no file or folder"),
        (["--model", "llama-3-8b", "--prompt", "Hi"], "is a preset"),
        (["--model", tiny, "--prompt", "\udcff"], "the text is not valid Unicode"),
    ]
    for options, message in cases:
        status, out, err = command(*options)
        assert (status, out) == (1, ""), options
        assert err.startswith("error: "), options
        assert message in err, err
        assert err.count("\n") == 1, err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "options",
    [
        ["--dtype", "f16"],
        ["--layers", "looped"],
        ["--max-new-tokens", "0"],
        ["--tp", "0"],
        ["--collective", "ring"],
        ["--batch", "x"],
        ["--top-k", "-1"],
        ["--nonsense"],
    ],
)
def test_options_that_argparse_refuses(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        generate.main(["--prompt", "x", *options])
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_unwritable_cache_folder_says_how_to_go_on(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    status, out, err = command("--chat", "Hi")
    assert (status, out) == (1, "")
    told = f"error: cannot write the demo model to the cache folder {tmp_path / 'file'}/shardstream (Not a directory)"
    assert err.splitlines()[-1].startswith(told)
    assert "set XDG_CACHE_HOME" in err
    assert "pass --model" in err


def _start(
    folder: Path, cache: Path, *options: str, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scripts.generate", "--model", str(folder), "--prompt", PROMPT, *options]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_second_run_finds_its_programs_in_the_cache(tiny: Path, tmp_path: Path) -> None:
    """Fresh processes, where --cpu-devices comes in time; without --tp all devices are used."""
    found = []
    for _ in range(2):
        process = _start(tiny, tmp_path, "--cpu-devices", "2", "--max-new-tokens", "4", "--quiet", "--json", "-")
        out, err = process.communicate()
        assert process.returncode == 0, err
        found.append(json.loads(out))
    assert [one["tp"] for one in found] == [2, 2]
    assert found[0]["token_ids"] == found[1]["token_ids"] == answer(tiny, tokens_of(PROMPT), 4)
    assert "miss" in found[0]["compile_cache"]  # the read probe is compiled twice, and may be found the second time
    assert "hit" in found[1]["compile_cache"]  # a program near the least time may be compiled again
    assert (tmp_path / "shardstream" / "jax").is_dir()


def test_a_reader_that_goes_away_and_an_interrupt_end_it_quietly(tiny: Path, tmp_path: Path) -> None:
    process = _start(tiny, tmp_path, "--quiet", **session_cache())
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait()) == ("", 141)

    # Its first word does not fit into this pipe, so that it is surely at work when the signal comes.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    process = _start(tiny, tmp_path, stdout=writing, **session_cache())
    os.close(writing)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(f"{tiny}: ")
    process.send_signal(signal.SIGINT)
    with open(reading, "rb") as pipe:
        pipe.read()
    _, err = process.communicate()
    assert process.returncode == 130
    assert err.endswith("\ninterrupted\n")
    assert "Traceback" not in err


@pytest.mark.optimized
@pytest.mark.xdist_group("demo")
def test_the_capital_of_france(demo_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's first command."""
    assert generate.main(["--chat", "What is the capital of France?", "--tp", "1", "--quiet"]) == 0
    assert capsys.readouterr() == ("The capital of France is Paris.\n", "")


def test_many_prompts_go_through_the_engine_in_their_order(command: Run, tiny: Path, tmp_path: Path) -> None:
    """More than ``GROUPED``: each as if alone, with speculation too; a stop string ends the texts that hold it."""
    texts = [f"{number} is a number" for number in range(generate.GROUPED + 3)]
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    expected = [answer(tiny, tokens_of(text), 6) for text in texts]
    stop = text_of(expected[0])[2:4]
    options = ["--model", tiny, "--prompts-file", tmp_path / "prompts.txt", "--batch", "1", "--max-new-tokens", "6"]
    options += ["--speculate", "ngram", "--k", "1"]
    status, out, err = command(*options, "--stop", stop, "--json", tmp_path / "found.json")
    assert (status, "error" in err) == (0, False)
    shown = [text_of(tokens).split(stop)[0] for tokens in expected]
    assert out.startswith("".join(f"### {text}\n{cut}\n\n" for text, cut in zip(texts, shown, strict=True)))
    assert "35, at most 1 at a time" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["prompt"] for one in found["completions"]] == texts
    assert [one["text"] for one in found["completions"]] == shown
    whole = [one["finish_reason"] == "length" for one in found["completions"]]
    assert whole == [stop not in text_of(tokens) for tokens in expected]
    for one, tokens in zip(found["completions"], expected, strict=True):
        assert one["token_ids"] == tokens[: one["generated_tokens"]]
    assert found["tokens_per_s"] > 0
    assert found["engine"]["accepted_tokens"] <= found["engine"]["proposed_tokens"]


def test_a_poisoned_prompt_among_many_fails_alone(command: Run, tmp_path: Path) -> None:
    """Its token's embedding is NaN; the others' texts are what they are alone, and the status says that one failed."""
    folder = write_tiny(tmp_path / "model")
    texts = ["~ is a number" if number == 2 else f"{number} is a number" for number in range(generate.GROUPED + 1)]
    expected = [answer(folder, tokens_of(text), 3) for text in texts]
    poison(folder, "~")
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    options = ["--model", folder, "--prompts-file", tmp_path / "prompts.txt", "--batch", "2", "--max-new-tokens", "3"]
    status, out, err = command(*options, "--json", tmp_path / "found.json")
    assert status == 1
    assert f"### {texts[2]}\n\nerror: the model produced NaN" in out
    assert "error: 1 prompt failed, and all others are complete; the first is prompt 3 of 33: the" in err
    found = json.loads((tmp_path / "found.json").read_text())["completions"]
    assert (found[2]["finish_reason"], found[2]["token_ids"]) == ("error", [])
    assert "NaN" in found[2]["error"]
    for place, (one, tokens) in enumerate(zip(found, expected, strict=True)):
        assert place == 2 or (one["token_ids"], one.get("error")) == (tokens, None)

    # In a group all fail, and the error says which group it was.
    few = [option for text in texts[:3] for option in ("--prompt", text)]
    status, _, err = command("--model", folder, *few, "--batch", "2", "--max-new-tokens", "1", "--quiet")
    assert (status, err.split(" the model")[0]) == (1, "error: prompt 3 of 3:")
    assert "NaN or infinite logits for the prompt; check" in err
