"""Every kernel family compiles for every architecture it is for, without warnings; tuned tiles do not spill.

Needs NVRTC (``pip install 'cuattn[compile]'``), no GPU. What is compiled is what a call there would run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import cases
import pytest

from cuattn import device, jit
from cuattn.program import Kernel, Launch
from cuattn.spec import GRADIENTS, AttentionSpec

pytest.importorskip("cupy")
pytestmark = pytest.mark.usefixtures("compiler")
ARCHS = (75, 80, 86, 89, 90, 100, 120)


@dataclass(frozen=True)
class Row:
    """A call whose kernels are compiled. ``tuned``: they must not spill."""

    family: str
    head_dim: int
    dtype: str = "bfloat16"
    options: Any = ()
    operands: Any = ()
    backward: bool = False
    tuned: bool = False
    spills: int = 0  # bytes that a tuned row may spill
    archs: tuple[int, ...] = ARCHS

    def spec(self, arch: int) -> AttentionSpec:
        dtype = "float16" if arch == 75 and self.dtype == "bfloat16" else self.dtype
        case = cases.Case(
            "row", seqlen_q=256, seqlen_kv=256, head_dim=self.head_dim,
            options=dict(self.options), operands=dict(self.operands),
        )  # fmt: skip
        return cases.build(case, dtype).spec


FULL, CAUSAL, WINDOW = (), (("causal", True),), (("window_size", (60, 20)),)
OPTIONS = (*CAUSAL, ("window_size", (60, 0)), ("softcap", 5.0), ("dropout_p", 0.2), ("dropout_seed", 9))
OPERANDS = (
    ("bias", (1, 4, 256, 256)), ("mask", (2, 1, 256, 256)), ("alibi_slopes", (4,)), ("sinks", (4,)),
    ("segments", ()), ("kv_seqlens", (256, 77)), ("q_seqlens", (90, 256)),
)  # fmt: skip
EVERYTHING = {"options": OPTIONS, "operands": OPERANDS}
HOPPER = (90,)
SCORES: tuple[dict[str, Any], ...] = (
    {"operands": OPERANDS[:1]},
    {"operands": OPERANDS[1:2], "options": CAUSAL},
    {"operands": (("segments", ()),), "options": CAUSAL},
    {"options": OPTIONS[-2:]},
    {"options": (*WINDOW, *OPTIONS[-2:])},
    {"options": OPTIONS[2:3]},
    {"operands": OPERANDS[2:3], "options": CAUSAL},
    {"operands": OPERANDS[:1], "options": OPTIONS[2:3]},
)
# And the bytes that may spill: a gradient's sums leave few registers for strides that are read once a tile.
BIASES = (
    (("bias", (2, 4, 256, 256)), 0), (("bias", (2, 1, 1, 256)), 0), (("bias", (1, 1, 256, 256)), 72),
    (("bias_float32", (4, 256, 256)), 72),
)  # fmt: skip
NOT_100 = tuple(
    arch for arch in ARCHS if arch != 100
)  # no tile of head dim 128 was measured there: the widest
ROWS = [
    *(Row("mma", 64, options=o, tuned=True) for o in (FULL, CAUSAL)),
    *(Row("mma", 128, options=o, tuned=True, archs=NOT_100) for o in (FULL, CAUSAL, WINDOW)),
    Row("mma", 128, options=CAUSAL, archs=(100,)),
    Row("mma", 96, options=CAUSAL, tuned=True),
    Row("mma", 256, options=CAUSAL, tuned=True, archs=ARCHS[1:]),
    Row("mma", 256, options=CAUSAL, archs=(75,)),  # spills: its 64 KB leave no choice
    Row("mma", 64, **EVERYTHING),
    *(Row("mma", d, options=FULL, backward=True, tuned=True) for d in (64, 128)),
    *(Row("mma", d, options=CAUSAL, backward=True, tuned=True) for d in (64, 96, 128, 192, 256)),
    Row("mma", 64, **EVERYTHING, backward=True),
    *(Row("sm90", d, options=o, tuned=True, archs=HOPPER) for d in (64, 128, 256) for o in (FULL, CAUSAL)),
    *(Row("sm90", d, **x, tuned=True, archs=HOPPER) for d in (192, 256) for x in SCORES),
    *(Row("sm90", d, options=CAUSAL, backward=True, tuned=True, archs=HOPPER) for d in (64, 128)),
    *(Row("sm90", d, **x, backward=True, tuned=True, archs=HOPPER) for d in (128, 256) for x in SCORES),
    *(
        Row("sm90", d, operands=(x,), options=o, backward=True, tuned=True, spills=most, archs=HOPPER)
        for d in (64, 128)
        for x, most in BIASES
        for o in (FULL, CAUSAL)
    ),
    Row("sm90", 64, options=OPTIONS[:2], operands=OPERANDS, backward=True, archs=HOPPER),
    *(Row("wide", 64, t, CAUSAL, backward=b) for t in ("float32", "float64") for b in (False, True)),
    # the float32 tiles that are fastest spill a few registers elsewhere: docs/performance/float32.md
    *(Row("wide", 128, "float32", o, tuned=True, archs=(90, 100)) for o in (FULL, CAUSAL)),
    *(Row("wide", 64, "float32", o, tuned=True, archs=(86, 89)) for o in (FULL, CAUSAL)),
    Row("wide", 128, "float32", CAUSAL, archs=(75, 80, 86, 89, 120)),
    Row("wide", 128, "float32", CAUSAL, backward=True),
    *(Row("wide", 256, "float32", CAUSAL, backward=b, archs=ARCHS[1:]) for b in (False, True)),
    Row("wide", 128, "float32", (("precision", "tf32"),), archs=(80, 90)),
    Row("wide", 64, "float32", **EVERYTHING, backward=True, archs=(75, 90)),
]


def kernels(row: Row, arch: int) -> Iterator[Kernel]:
    """The kernels of a row's program on an architecture's model; none where its family does not take it."""
    spec, model = row.spec(arch), device.MODELS[arch]
    family = import_module(f"cuattn.families.{row.family}{'_backward' if row.backward else ''}")
    if family.refuses(spec, model) is not None:
        assert (row.family, arch) not in (("sm90", 90), ("mma", 90), ("wide", 90)), row
        return
    if row.backward:
        wants = frozenset(name for name in GRADIENTS if getattr(spec, name) is not None)
        program = family.backward(spec, model, wants)
    else:
        program = family.forward(spec, model)
    yield from (step.kernel for step in program.steps if isinstance(step, Launch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "arch"), [(f, a) for a in ARCHS for f in ("mma", "sm90", "wide") if f != "sm90" or a == 90]
)
def test_compiles(family: str, arch: int) -> None:
    rows = {k: row for row in ROWS if row.family == family and arch in row.archs for k in kernels(row, arch)}
    found = jit.compile_all((kernel, arch) for kernel in rows)
    problems = [
        f"{kernel.source} {row}: spills {result.spill_bytes} bytes, {result.warnings}"
        for (kernel, row), result in zip(rows.items(), found, strict=True)
        if result.warnings or (row.tuned and result.spill_bytes > row.spills)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_rows_of_no_sequence_compile(arch: int) -> None:
    """The kernel of packed arrays that none of the rows above takes."""
    kernels = [Kernel("tail", "tail", (("DTYPE", code),)) for code in range(4)]
    assert all(not (x.warnings or x.spill_bytes) for x in jit.compile_all((k, arch) for k in kernels))
