import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from solaris_udf.codec import bytes_per_vector, decode, encode

vectors = st.tuples(st.integers(0, 5), st.integers(1, 9)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-1000, 1000, width=32))
)


def test_float16_bytes_are_little_endian_halves():
    assert encode([[1.0, -2.0]]).to_pylist() == [struct.pack("<2e", 1.0, -2.0)]


def test_int8_bytes_are_scale_then_signed_bytes():
    assert encode([[127.0, -63.5]], "int8").to_pylist() == [struct.pack("<f2b", 1.0, 127, -64)]


@given(vectors)
def test_float16_round_trip_is_within_half_precision(values):
    back = decode(encode(values))
    assert back.shape == values.shape or values.shape[0] == 0
    if len(values):
        np.testing.assert_array_equal(back, values.astype(np.float16).astype(np.float32))


@given(vectors)
def test_int8_error_is_at_most_half_a_step(values):
    back = decode(encode(values, "int8"), "int8")
    if len(values):
        step = np.abs(values).max(axis=1, keepdims=True) / 127
        assert (np.abs(back - values) <= step * 0.501 + 1e-6).all()


@pytest.mark.parametrize("codec", ["float16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(codec, bad):
    with pytest.raises(ValueError, match="not finite"):
        encode([[1.0, bad]], codec)


def test_what_overflows_float16_is_refused():
    with pytest.raises(ValueError, match="not finite as float16"):
        encode([[70000.0]])


def test_zero_vector_survives():
    assert decode(encode([[0.0, 0.0]], "int8"), "int8").tolist() == [[0.0, 0.0]]


def test_stored_width():
    for codec in ("float16", "int8"):
        assert len(encode(np.ones((1, 7)), codec)[0].as_py()) == bytes_per_vector(7, codec)


def test_sliced_arrow_arrays_decode():
    packed = encode(np.arange(8, dtype=np.float32).reshape(4, 2))
    assert decode(packed.slice(1, 2)).tolist() == [[2.0, 3.0], [4.0, 5.0]]


def test_lengths_that_differ_are_an_error():
    with pytest.raises(ValueError, match="differ in length"):
        decode([b"\0\0", b"\0\0\0\0"])


def test_unknown_codec_is_an_error():
    with pytest.raises(ValueError, match="float16, int8"):
        encode([[1.0]], "float8")
