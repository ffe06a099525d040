"""No feature costs a call that does not use it: dense kernels do not even read a feature's parameter words.

Needs NVRTC (``pip install 'cuattn[compile]'``), no GPU. Every number a feature has (strides, thresholds,
pointers) reaches a kernel through its parameter block, so PTX that loads none of its words can do none of its
work. What features cost where they are used is measured: docs/performance.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import Any

import cases
import pytest

from cuattn import device, jit, params
from cuattn.backends import cuda
from cuattn.program import Kernel, Launch
from cuattn.spec import GRADIENTS, AttentionSpec

pytest.importorskip("cupy")
pytestmark = pytest.mark.usefixtures("compiler")
QKV = frozenset("qkv")
SWITCHES = {
    "HAS_LEFT", "VARIABLE", "VARLEN", "SOFTCAP", "BIAS", "MASK", "ALIBI", "SINKS", "SEGMENTS", "DROPOUT",
    "DETERMINISTIC", "DLSE",
}  # fmt: skip
# What each feature is called with, and how the words of the parameter block that are its own begin.
FEATURES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "softcap": ({"options": {"softcap": 5.0}}, ("softcap",)),
    "dropout": ({"options": {"dropout_p": 0.1, "dropout_seed": 3}}, ("dropout_",)),
    "window": ({"options": {"window_size": (60, 0)}}, ("window_left",)),
    "bias": ({"operands": {"bias": (1, 4, 256, 256)}}, ("bias", "dbias")),
    "mask": ({"operands": {"mask": (2, 1, 256, 256)}}, ("mask", "live_tiles")),
    "alibi": ({"operands": {"alibi_slopes": (4,)}}, ("alibi_",)),
    "sinks": ({"operands": {"sinks": (4,)}}, ("sinks", "dsinks")),
    "segments": ({"operands": {"segments": ()}}, ("q_segment_ids", "kv_segment_ids", "live_tiles")),
    "lengths": ({"operands": {"kv_seqlens": (256, 77), "q_seqlens": (90, 256)}}, ("q_seqlens", "kv_seqlens")),
    "offsets": ({"operands": {"q_offset": (3, -12)}}, ("q_offset",)),
    "packed": (
        {"layout": "thd", "cu_seqlens_q": (0, 99, 256), "cu_seqlens_k": (0, 99, 256)},
        ("cu_seqlens_",),
    ),
}
FIXED = {"q_offset_mode", "q_offset_value"}  # read by every causal call
FAMILIES = [("sm90", "bfloat16", 64), ("sm90", "bfloat16", 128), ("mma", "bfloat16", 64)]
FAMILIES += [("mma", "float16", 128), ("wide", "float32", 64), ("wide", "float64", 64)]


def launches(spec: AttentionSpec, family: str) -> dict[str, list[Launch]]:
    """The launches of the family's forward and of its backward, as far as it takes the spec."""
    found = {}
    for part in ("", "_backward"):
        module, what = import_module(f"cuattn.families.{family}{part}"), (QKV,) if part else ()
        if module.refuses(spec, device.H200) is None:
            program = (module.backward if part else module.forward)(spec, device.H200, *what)
            found[part] = [step for step in program.steps if isinstance(step, Launch)]
    return found


def spec_of(dtype: str, head_dim: int, **more: Any) -> AttentionSpec:
    options = {"causal": True, **more.pop("options", {})}
    case = cases._dense("call", 256, 256, head_dim, options=options, **more)
    return cases.build(case, dtype).spec


@cache
def ptx(kernel: Kernel) -> str:
    """The kernel's PTX for Hopper: NVRTC without ptxas takes half a second."""
    nvrtc, ((file, text), *headers) = device.import_nvrtc(), jit._files(kernel.source).items()
    names, texts = [x.encode() for x, _ in headers], [x.encode() for _, x in headers]
    program = nvrtc.createProgram(text, file, texts, names)
    options = ["-arch=compute_90a", "-std=c++17", "-default-device"]
    nvrtc.compileProgram(program, [*options, *(f"-D{name}={value}" for name, value in kernel.defines)])
    found = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    return found if isinstance(found, str) else str(found.decode())


LOAD = re.compile(r"(?:@!?%p\d+\s+)?ld\.\S*?(?:\.v(\d))?\.\w(\d+)\s+[^\[]+\[([%\w]+)(?:\+(-?\d+))?\]")
COPY = re.compile(r"(?:mov\.\w64|cvta\.param\.u64)\s+(%rd\d+), ([%\w]+)$")
ADD = re.compile(r"add\.s64\s+(%rd\d+), (%rd\d+), (-?\d+)$")
SELECT = re.compile(r"selp\.b64\s+(%rd\d+), (%rd\d+), (%rd\d+), %p\d+$")


def words_read(kernel: Kernel) -> set[str]:
    """Names of the parameter words that the kernel's PTX loads; fails on a use that it does not follow."""
    block = f"{kernel.entry}_param_0"
    body = ptx(kernel).split(f".entry {kernel.entry}(", 1)[1].split(".entry ", 1)[0]
    at: dict[str, set[int]] = {block: {0}}  # bytes into the block that a register may point to
    found: set[int] = set()
    for line in (x.strip().rstrip(";") for x in body.splitlines()):
        if (copy := COPY.match(line)) and copy[2] in at:
            at.setdefault(copy[1], set()).update(at[copy[2]])
        elif (add := ADD.match(line)) and add[2] in at:
            at.setdefault(add[1], set()).update(x + int(add[3]) for x in at[add[2]])
        elif (select := SELECT.match(line)) and (select[2] in at or select[3] in at):
            at.setdefault(select[1], set()).update(at.get(select[2], set()) | at.get(select[3], set()))
        elif (load := LOAD.match(line)) and load[3] in at:
            size = int(load[2]) // 8 * int(load[1] or 1)
            for start in (x + int(load[4] or 0) for x in at[load[3]]):
                found.update(range(start // 8, -(-(start + size) // 8)))
        else:
            used = set(re.findall(r"%rd\d+|\w+_param_0\b", line)) & at.keys()
            assert not used or line.startswith(".param"), f"{kernel.entry}: {line}"
    return {params.FIELDS[i] for i in found}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype", "head_dim"), FAMILIES, ids=str)
def test_a_dense_call_reads_no_word_of_a_feature(family: str, dtype: str, head_dim: int) -> None:
    parts = launches(spec_of(dtype, head_dim), family)
    assert len(parts) == 2
    begins = tuple(x for _, words in FEATURES.values() for x in words)
    for kernel in {step.kernel for part in parts.values() for step in part}:
        assert {name for name in SWITCHES if dict(kernel.defines).get(name)} == set()
        read = words_read(kernel)
        assert not {name for name in read - FIXED if name.startswith(begins)}, kernel
        assert "heads_q" in read or "batch" in read or "semaphore" in read, "nothing was found at all"


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("family", "dtype", "head_dim"), FAMILIES[::2], ids=str)
def test_a_feature_reads_its_words(family: str, dtype: str, head_dim: int, feature: str) -> None:
    """Or the test above could not fail."""
    call, begins = FEATURES[feature]
    parts = launches(spec_of(dtype, head_dim, **call), family)
    for part, steps in parts.items():
        read = {name for step in steps for name in words_read(step.kernel)}
        wanted = feature != "sinks" or not part  # the gradients of q, k and v need LSE alone
        assert any(name.startswith(begins) for name in read - FIXED) == wanted


@pytest.mark.parametrize(("family", "dtype", "head_dim"), FAMILIES, ids=str)
def test_a_dense_call_launches_what_it_needs(family: str, dtype: str, head_dim: int) -> None:
    """The forward one kernel (and a reset of its tile counter), the backward row sums, products, rounding."""
    forward, backward = launches(spec_of(dtype, head_dim), family).values()
    names = {"sm90": ["fwd_sm90"], "mma": ["fwd"], "wide": ["fwd_wide"]}[family]
    assert [s.kernel.source for s in forward] == names
    names = {
        "sm90": ["bwd_sm90_delta", "bwd_sm90", "bwd_sm90_convert"],
        "mma": ["bwd_delta", "bwd", "bwd_convert", "bwd_convert", "bwd_convert"],
        "wide": ["bwd_wide_delta", "bwd_wide"],
    }[family]
    assert [s.kernel.source for s in backward] == names


WANTS = [
    ("q",),
    ("k",),
    ("v",),
    ("k", "v"),
    ("bias",),
    ("sinks",),
    ("q", "bias"),
    ("q", "k", "v", "bias", "sinks"),
]


@pytest.mark.parametrize("wants", WANTS, ids="".join)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_what_nobody_wants_is_not_worked_on(dtype: str, wants: tuple[str, ...]) -> None:
    """Gradients that are not wanted are neither outputs nor scratch, nor switched on in a kernel."""
    spec = spec_of(dtype, 64, operands={"bias": (4, 256, 256), "sinks": (4,)})
    program = cuda.backward_program(spec, device.H200, frozenset(wants))
    assert {b.name for b in program.outputs} == {f"d{name}" for name in wants}
    assert not {b.name for b in program.workspace} & {f"d{name}" for name in GRADIENTS}
    steps = [s for s in program.steps if isinstance(s, Launch)]
    products = {"bwd", "bwd_sm90", "bwd_wide"}
    for step in (s for s in steps if s.kernel.source in products):
        defines = dict(step.kernel.defines)
        assert {x for x in "qkv" if defines[f"WANT_D{x.upper()}"]} <= set(wants)
    found = {s.kernel.entry for s in steps}
    assert bool({s.kernel.source for s in steps} & products) == bool(QKV & set(wants))
    assert any("dbias" in name for name in found) == ("bias" in wants)
    assert any("dsinks" in name for name in found) == ("sinks" in wants)


def test_only_the_gradient_of_sinks_needs_no_products() -> None:
    """On Hopper too, whose main kernel makes dq, dk and dv in one go."""
    spec = spec_of("bfloat16", 128, operands={"sinks": (4,)})
    program = cuda.backward_program(spec, device.H200, frozenset(("sinks",)))
    found = [s.kernel.entry for s in program.steps if isinstance(s, Launch)]
    assert found == ["bwd_delta", "bwd_dsinks"]
