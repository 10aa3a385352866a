import pytest

from roofline.dtypes import BF16, parse_dtype, parse_kv_dtype
from roofline.errors import RooflineError


@pytest.mark.parametrize(
    ("name", "size"), [("f32", 4), ("bf16", 2), ("float16", 2), ("fp8", 1), ("int8", 1), ("INT4", 0.5)]
)
def test_bytes_per_number(name, size):
    assert parse_dtype(name).bytes_per_number == size


def test_plain_matrix_is_numbers_times_bytes():
    assert parse_dtype("bf16").matrix_bytes((3, 5), (7,)) == 3 * 5 * 7 * 2


def test_int8_has_one_16_bit_scale_a_row():
    assert parse_dtype("int8").matrix_bytes((10,), (4, 8)) == 10 * 32 + 10 * 2


def test_int4_has_one_scale_a_started_group():
    assert parse_dtype("int4").matrix_bytes((10,), (256,)) == 10 * 128 + 10 * 2 * 2
    assert parse_dtype("int4-g32").matrix_bytes((1,), (33,)) == 17 + 2 * 2  # 16.5 bytes round up; 2 groups


def test_a_parsed_dtype_passes_through():
    assert parse_dtype(BF16) is BF16


@pytest.mark.parametrize("bad", ["int3", "int4-g0", "int4-g", "", "bf16-g32"])
def test_unknown_names_list_the_known(bad):
    with pytest.raises(RooflineError, match=r"int4.*gN"):
        parse_dtype(bad)


def test_cache_formats_exclude_int4():
    assert parse_kv_dtype("int8").matrix_bytes((4,), (4,)) == 16  # no scales counted
    with pytest.raises(RooflineError, match="int8"):
        parse_kv_dtype("int4")
