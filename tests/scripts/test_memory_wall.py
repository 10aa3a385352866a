import builtins
import json

import pytest

from model.presets import PRESETS
from roofline.dtypes import parse_dtype
from scripts.memory_wall import load_config, main
from scripts.memory_wall_text import si, table

BASE = ["--model", "llama-3-70b", "--chip", "h100"]


def run(capsys, *options):
    code = main([*options])
    out, err = capsys.readouterr()
    return code, out, err


def numbers(capsys, *options):
    code, out, err = run(capsys, *options, "--json", "-")
    assert code == 0, err
    return json.loads(out)


def test_the_memory_wall_of_the_70b_on_an_h100(capsys):
    r = numbers(capsys, *BASE, "--dtype", "bf16", "--params", "70e9")
    assert r["weight_bytes"] == 140e9
    assert round(r["ridge_flops_per_byte"]) == 295
    assert r["prefill"]["intensity"] == pytest.approx(2_000, rel=0.03)
    assert r["decode"]["intensity"] == 1.0
    assert r["kv_bytes_per_token"] == 327_680
    assert r["ceiling"][0]["context"] == 0
    assert round(r["ceiling"][0]["tokens_per_s"], 1) == 23.9
    assert r["ceiling"][-1]["context"] == 128_000
    assert round(r["ceiling"][-1]["tokens_per_s"], 1) == 18.4
    assert round(r["decode"]["ceiling_ms"], 1) == 41.8


def test_exact_counts_by_default(capsys):
    r = numbers(capsys, *BASE)
    assert r["params"] == 70_553_706_496
    assert r["weight_bytes"] == 141_107_412_992
    assert r["ceiling"][0]["tokens_per_s"] == pytest.approx(3.35e12 / 141_107_412_992)


def test_latency_has_a_row_for_each_tp_at_the_largest_context(capsys):
    r = numbers(capsys, *BASE, "--tp", "4,1", "--context", "1000,32000,0")
    assert [row["tp"] for row in r["latency"]] == [1, 4]
    assert [row["context"] for row in r["ceiling"]] == [0, 1_000, 32_000]
    for row in r["latency"]:
        assert row["context"] == 32_000
        assert row["tpot_ms"] == pytest.approx(sum(row["terms_ms"].values()))
        assert row["ideal_ms"] <= row["tpot_ms"]
        assert row["by_context"][-1]["tpot_ms"] == row["tpot_ms"]
        assert row["by_context"][0]["terms_ms"]["kv"] == 0
    assert r["latency"][0]["terms_ms"]["collectives"] == 0


def test_quantised_weights_state_their_scales(capsys):
    r = numbers(capsys, "--model", "llama-3.1-8b", "--dtype", "int4", "--kv-dtype", "int8")
    assert r["weight_bytes"] == 8_030_261_248 / 2
    assert r["weight_scale_bytes"] == pytest.approx(8_030_261_248 / 128 * 2, rel=0.01)
    assert r["kv_bytes_per_token"] == 65_536
    assert r["ceiling"][0]["bytes_per_step"] == r["weight_bytes"] + r["weight_scale_bytes"]


def test_the_table_shows_formulas_and_fits_a_terminal(capsys):
    code, out, _ = run(capsys, *BASE, "--params", "70e9")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 110
    for text in ("295 op/byte", "C / B", "327,680 B", "140.0 GB", "P x 2 bytes", "23.9", "18.4", "41.8 ms"):
        assert text in out
    assert "1,955 op/byte" in out
    assert "1.00 op/byte" in out
    assert "beyond the 8,192 positions" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("name", [*PRESETS])
def test_every_preset_on_every_kind_of_chip_fits_the_width(capsys, name):
    for chip in ("b200", "v5e"):
        code, out, err = run(
            capsys, "--model", name, "--chip", chip, "--dtype", "int8", "--tp", "1,3,16", "--batch", "64"
        )
        assert code == 0, err
        assert max(len(line) for line in out.splitlines()) <= 110, out


def test_what_does_not_fit_is_a_warning_with_the_shortfall_and_the_cure(capsys):
    code, out, _ = run(capsys, *BASE, "--tp", "1,2,4", "--context", "0")
    assert code == 0
    assert "SHORT by 61.1 GB" in out
    assert "it fits from tp = 2" in out
    r = numbers(capsys, *BASE, "--tp", "1,2", "--context", "0")
    assert [m["fits"] for m in r["memory"]] == [False, True]
    assert r["smallest_tp_that_fits"] == 2


def test_the_verdict_is_on_the_counts_that_hold_the_model(capsys):
    """The gain over a count that does not fit is over nothing, and doubling begins where the model fits."""
    r = numbers(capsys, *BASE, "--tp", "1,2,4", "--context", "0")
    alone = numbers(capsys, *BASE, "--tp", "2,4", "--context", "0")["verdict"]
    assert r["verdict"] == alone | {"text": f"{alone['text']}; they do not fit at tp = 1"}
    assert r["doubling"]["from"] == 2
    one = numbers(capsys, *BASE, "--tp", "1,2", "--context", "0")["verdict"]
    assert one["pays_until"] == 2
    assert one["text"].startswith("only tp = 2 holds the model and its cache: nothing to compare")
    none = numbers(capsys, *BASE, "--tp", "1", "--context", "0")["verdict"]
    assert (none["pays_until"], none["stopped_by"]) == (None, "memory")
    _, out, _ = run(capsys, *BASE, "--tp", "1", "--context", "0")
    assert "verdict: tp = 1: the model and its cache do not fit" in out
    # 16 devices hold it, and the wires join 8.
    assert numbers(capsys, *BASE, "--dtype", "f32", "--tp", "4", "--batch", "64")["doubling"] is None


def test_more_devices_than_the_wires_join_is_said(capsys):
    _, out, _ = run(capsys, *BASE, "--tp", "16")
    assert "NVLink 4 joins 8 devices; tp = 16" in out


def test_the_verdict_is_in_words(capsys):
    _, out, _ = run(capsys, "--model", "llama-3.2-1b", "--chip", "v5e", "--tp", "1,2,4,8,16")
    assert "collectives are" in out
    assert "gains" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama-9", "--chip", "h100"], r"unknown model 'llama-9': use one of llama-2-7b, "),
        (["--model", "llama-3-8b", "--chip", "h900"], r"unknown chip 'h900': use one of a100, h100"),
        (["--model", "llama-3-8b", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["--model", "llama-3-8b", "--kv-dtype", "int4"], "unknown cache dtype"),
        (["--model", "llama-3-8b", "--params", "-1"], "params is -1"),
        (["--model", "llama-3-8b", "--bandwidth-efficiency", "2"], "bandwidth is 2"),
        (
            ["--model", "llama-3-8b", "--chip", "v5e", "--all-reduce", "tree"],
            "tree does not exist on a torus",
        ),
        (["--model", "llama-3-8b", "--chip", "v5e", "--dtype", "f32"], "no compute rate for 'f32'"),
        (["--model", "llama-3-8b", "--collectives", "/nowhere.json"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, options, message):
    code, out, err = run(capsys, *options)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [["--tp", "0"], ["--tp", "1,x"], ["--context", "-5"], ["--batch", "1,2"], ["--prompt-len", "0"]],
)
def test_lists_that_are_not_numbers_are_refused(capsys, options):
    with pytest.raises(SystemExit) as stop:
        main([*BASE, *options])
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_a_model_folder_and_a_config_file(tmp_path):
    config = PRESETS["smollm2-135m"]
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert load_config(str(tmp_path)).parameter_count() == config.parameter_count()
    assert load_config(str(tmp_path / "config.json")).num_kv_heads == 3


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "holds a list"), ("{}", "")])
def test_a_broken_config_is_named(tmp_path, capsys, text, message):
    (tmp_path / "config.json").write_text(text)
    code, _, err = run(capsys, "--model", str(tmp_path))
    assert code == 2
    assert message in err


def test_a_damaged_gguf_is_an_error(tmp_path, capsys):
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(b"not a model" * 10)
    code, _, err = run(capsys, "--model", str(tmp_path / "x.gguf"))
    assert code == 2
    assert "x.gguf" in err


def test_a_path_is_titled_by_its_last_name(tmp_path, capsys):
    folder = tmp_path / ("long" * 30) / "my-model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(PRESETS["llama-3-8b"].to_hf()))
    _, out, _ = run(capsys, "--model", str(folder))
    assert out.startswith("my-model on H100 SXM, ")


def test_options_that_would_do_nothing_are_refused(tmp_path, capsys):
    (tmp_path / "c.json").write_text("{")
    measured = ["--collectives", str(tmp_path / "c.json")]
    code, _, err = run(capsys, *BASE, *measured, "--collective-scale", "2")
    assert code == 2
    assert "do not apply" in err
    code, _, err = run(capsys, *BASE, *measured)
    assert code == 2
    assert "is not JSON" in err


def test_a_chip_file_and_measured_collectives(tmp_path, capsys):
    chip = tmp_path / "mine.toml"
    chip.write_text(
        'name = "mine"\nbytes_per_s = 1e12\nmemory_bytes = 24e9\nflops_per_s = {bf16 = 1e14}\n'
        '[interconnect]\ntopology = "switch"\nlink_bytes_per_s = 1e10\nlaunch_s = 1e-5\nhop_s = 1e-6\n'
    )
    lines = tmp_path / "collectives.json"
    rows = [{"op": "all_reduce", "devices": 2, "alpha_s": 1e-4, "bytes_per_s": None}]
    lines.write_text(json.dumps({"collectives": rows, "note": "other keys are ignored"}))
    options = ["--model", "llama-3.1-8b", "--chip", str(chip), "--tp", "1,2", "--collectives", str(lines)]
    r = numbers(capsys, *options)
    assert r["chip"]["name"] == "mine"
    # 65 all-reduces at 0.1 ms, and the sampler's gather at half of one
    assert r["latency"][1]["terms_ms"]["collectives"] == pytest.approx(6.55)
    assert r["doubling"] is None


def test_the_cpu_is_measured_on_the_spot_and_labelled(capsys, monkeypatch):
    import roofline.cpu

    quick = roofline.cpu.measure_cpu(megabytes=4, matrix=32, repeats=1)
    monkeypatch.setattr(roofline.cpu, "measure_cpu", lambda: quick)
    code, out, _ = run(capsys, "--model", "smollm2-135m", "--chip", "cpu", "--context", "2000")
    assert code == 0
    assert "measured on this machine" in out
    assert "datasheet" not in out
    assert "1/n each" in out


def test_json_and_plot_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    target, picture = tmp_path / "wall.json", tmp_path / "wall.png"
    code, out, err = run(capsys, *BASE, "--json", str(target), "--plot", str(picture))
    assert code == 0, err
    assert "ridge" in out
    assert json.loads(target.read_text())["kv_bytes_per_token"] == 327_680
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_panels_have_labels_units_and_legends_that_cover_nothing(capsys):
    pytest.importorskip("matplotlib")
    from scripts.plots import draw_memory_wall

    figure = draw_memory_wall(numbers(capsys, *BASE))
    figure.canvas.draw()
    labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]
    assert labels == [
        ("arithmetic intensity (operations per byte)", "attainable rate (TFLOP/s)"),
        ("context (positions in the cache)", "ceiling (tokens/s)"),
        ("devices (tp)", "time per output token (ms)"),
    ]
    boxes = [axes.get_window_extent() for axes in figure.axes]
    legend = figure.axes[2].get_legend().get_window_extent()
    assert not legend.overlaps(boxes[2])
    for axes in figure.axes[:2]:
        box = axes.get_legend().get_window_extent()
        for line in axes.get_lines():
            if line.get_marker() not in ("None", None, ""):
                points = axes.transData.transform(line.get_xydata())
                assert not any(box.contains(x, y) for x, y in points)


def test_without_matplotlib_the_message_says_what_to_install(tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    code, _, err = run(capsys, *BASE, "--plot", str(tmp_path / "wall.png"))
    assert code == 2
    assert "pip install matplotlib" in err


def test_text_helpers():
    assert si(141.107e9, "B") == "141.1 GB"
    assert si(12.0, "B") == "12.0 B"
    assert si(-61e9, "B") == "-61.0 GB"
    assert table([["a", "bb"], ["ccc", "d"]], right=(1,)) == ["  a    bb", "  ccc   d"]
    assert parse_dtype("int4").bytes_per_number == 0.5
