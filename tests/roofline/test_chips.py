from dataclasses import replace

import pytest

from roofline.chip_file import load_chip
from roofline.chips import CHIPS, get_chip
from roofline.errors import RooflineError

TABLE = {
    "a100": (312e12, 2.04e12, 80e9),
    "h100": (989e12, 3.35e12, 80e9),
    "h200": (989e12, 4.8e12, 141e9),
    "b200": (2.25e15, 8.0e12, 192e9),
    "tpu-v4": (275e12, 1.2e12, 32e9),
    "tpu-v5e": (197e12, 0.81e12, 16e9),
    "tpu-v5p": (459e12, 2.8e12, 96e9),
    "tpu-v6e": (920e12, 1.6e12, 32e9),
}

TOML = """
name = "mine"
bytes_per_s = 1e12
memory_bytes = 24e9
[flops_per_s]
bf16 = 1e14
[interconnect]
topology = "torus"
link_bytes_per_s = 5e10
launch_s = 0
hop_s = 1e-6
dims = 2
wrap = 16
max_devices = 64
[efficiency]
bandwidth = 0.7
"""


def test_datasheet_numbers():
    assert {n: (c.flops("bf16"), c.bandwidth(), c.memory()) for n, c in CHIPS.items()} == TABLE


@pytest.mark.parametrize(("name", "chip"), [("H100", "h100"), ("v5e", "tpu-v5e"), ("TPU v5e", "tpu-v5e")])
def test_names_are_forgiving(name, chip):
    assert get_chip(name) is CHIPS[chip]


def test_an_unknown_chip_lists_the_known():
    with pytest.raises(RooflineError, match=r"'h1000'.*a100, h100, .*tpu-v6e, cpu .*\.toml"):
        get_chip("h1000")


def test_compute_dtypes():
    assert CHIPS["h100"].flops("f16") == 989e12
    assert CHIPS["h100"].flops("int8") == 1979e12
    with pytest.raises(RooflineError, match="known are bf16, int8"):
        CHIPS["tpu-v4"].flops("f32")


def test_a_chip_from_toml(tmp_path):
    (tmp_path / "mine.toml").write_text(TOML)
    chip = get_chip(str(tmp_path / "mine.toml"))
    assert (chip.name, chip.flops(), chip.bandwidth(), chip.memory()) == ("mine", 1e14, 1e12, 24e9)
    assert (chip.efficiency.bandwidth, chip.efficiency.compute) == (0.7, 0.6)
    assert (chip.interconnect.dims, chip.interconnect.wrap, chip.interconnect.max_devices) == (2, 16, 64)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bytes_per_s = 1e12\n", "", "bytes_per_s is missing"),
        ("bytes_per_s = 1e12", "bytes_per_s = -1", r"bytes_per_s is -1: it must be a positive number"),
        ("bytes_per_s = 1e12", 'bytes_per_s = "fast"', "bytes_per_s is 'fast'"),
        ("bytes_per_s = 1e12", "bytes_per_s = true", "bytes_per_s is True"),
        ("memory_bytes = 24e9", "memory_byte = 24e9", "unknown key memory_byte"),
        ("hop_s = 1e-6", "hop_us = 1", r"unknown key interconnect\.hop_us"),
        ("hop_s = 1e-6\n", "", r"interconnect\.hop_s is missing"),
        ('topology = "torus"', 'topology = "mesh"', "topology is 'mesh': use one of switch, torus, ring"),
        ("bf16 = 1e14", "int8 = 1e14", r"flops_per_s\.bf16 is missing"),
        ("[flops_per_s]\nbf16 = 1e14", "flops_per_s = 1e14", "flops_per_s is 1"),
        ('name = "mine"', "name = ", "is not TOML"),
        ('topology = "torus"\n', "", r"interconnect\.topology is missing"),
        ("dims = 2", "dims = 2.5", r"interconnect\.dims is 2\.5: it must be a whole number"),
        ("max_devices = 64", "max_devices = 0", r"interconnect\.max_devices is 0"),
        ("bandwidth = 0.7", "bandwidth = 1.7", r"efficiency bandwidth is 1\.7"),
        ("bandwidth = 0.7", "bandwith = 0.7", r"unknown key efficiency\.bandwith"),
    ],
)
def test_bad_toml_names_file_and_key(tmp_path, old, new, message):
    assert old in TOML
    path = tmp_path / "bad.toml"
    text = TOML.replace(old, new, 1)
    if new.startswith("flops_per_s ="):  # a top-level key has to come before the tables
        text = new + "\n" + TOML.replace(old, "", 1)
    path.write_text(text)
    with pytest.raises(RooflineError, match=message) as caught:
        load_chip(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(RooflineError, match="does not exist"):
        load_chip(tmp_path / "none.toml")


def test_devices_that_share_a_memory_share_its_bandwidth():
    chip = replace(CHIPS["h100"], bytes_per_s=10e9, shared_bytes_per_s=16e9, shared_flops_per_s=1e12)
    assert [chip.bandwidth(n) for n in (1, 2, 4)] == [10e9, 8e9, 4e9]
    assert [chip.flops("bf16", n) for n in (1, 4)] == [1e12, 0.25e12]
    assert chip.memory(4) == 20e9


def test_cpu_is_measured_and_says_so():
    from roofline.cpu import measure_cpu

    chip = measure_cpu(megabytes=8, matrix=64, repeats=1)
    assert chip.measured
    assert chip.bandwidth() > 0
    assert chip.flops("f32") > 0
    assert chip.memory() > 0
    assert chip.bandwidth(4) == chip.bandwidth() / 4
    assert any("measured" in note for note in chip.notes)
