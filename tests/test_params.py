"""The parameter block: Python's list of words and the CUDA struct say the same."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from cuattn import params

HEADER = Path(__file__).parent.parent / "kernels_cu" / "params.cuh"


def test_the_struct_lists_the_same_fields() -> None:
    body = HEADER.read_text().split("struct Params {")[1].split("};")[0]
    declared = re.findall(r"^\s*(.+?)(\*?) (\w+);$", body, re.M)
    assert [name for _, _, name in declared] == list(params.FIELDS)
    kinds = {name: "pointer" if star else kind for kind, star, name in declared}
    assert all(kinds[name] == "pointer" for name in params.POINTERS)
    assert all(kinds[name] == "i64" for name in params.INTEGERS)
    assert all(kinds[name] == "double" for name in params.FLOATS)
    assert f"8 * {params.WORDS}" in HEADER.read_text()


def test_pack() -> None:
    block = params.pack({"window_left": -1, "softcap": 2.5, "batch": 3})
    assert len(block) == 8 * params.WORDS
    assert struct.unpack_from("<q", block, 8 * params.INDEX["window_left"])[0] == -1
    assert struct.unpack_from("<d", block, 8 * params.INDEX["softcap"])[0] == 2.5
    assert struct.unpack_from("<q", block, 8 * params.INDEX["q"])[0] == 0
    with pytest.raises(KeyError):
        params.pack({"no_such_word": 1})
