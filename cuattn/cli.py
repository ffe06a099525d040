"""The command ``cuattn``: bench, verify, info, plan, precompile. Only words and colours live here.

What is measured, checked or gathered is in ``bench``, ``verify``, ``info`` and ``plan``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import bench as bench_
from . import info as info_
from . import verify as verify_
from .backends import backends

app = typer.Typer(
    help="Exact attention for NumPy, CuPy and JAX.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip
console = Console()

ARRAYS = ("numpy", "cupy", "jax")


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip


def _fail(message: str) -> typer.Exit:
    console.print(f"[red]{message}[/red]")
    return typer.Exit(2)


def _arrays(wanted: str) -> str:
    """The array library to use: CuPy where the cuda backend works, NumPy otherwise."""
    if wanted == "auto":
        return "cupy" if backends()["cuda"].available else "numpy"
    if wanted not in ARRAYS:
        raise _fail(f"--arrays takes auto, {', '.join(ARRAYS)}; got {wanted}")
    if wanted == "cupy" and not (state := backends()["cuda"]).available:
        raise _fail(f"CuPy arrays cannot be used here: {state.reason}")
    return wanted


def _backend(arrays: str, wanted: str | None) -> str:
    return wanted or ("cuda" if arrays == "cupy" else "numba")


# bench


@app.command()
def bench(
    arrays: Annotated[str, typer.Option(help="numpy, cupy, or auto: cupy where there is a GPU")] = "auto",
    backend: Annotated[str | None, typer.Option(help="cuda, numba or reference; default by arrays")] = None,
    dtype: Annotated[str | None, typer.Option(help="float16, bfloat16, float32, float64")] = None,
    lengths: Annotated[str | None, typer.Option(help="tokens, comma-separated and ascending")] = None,
    batch: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    heads_kv: Annotated[int | None, typer.Option(min=1, help="default: as many as --heads")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, max=256)] = None,
    causal: Annotated[bool, typer.Option(help="causal mask or none")] = True,
    backward: Annotated[bool, typer.Option(help="measure gradients too")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="short lengths only, some seconds")] = False,
    budget: Annotated[float, typer.Option(help="seconds; no length is begun that would exceed it")] = 150.0,
    out: Annotated[Path, typer.Option(help="folder for the record and the plot")] = Path("bench-out"),
) -> None:
    """Measure attention against standard attention: exactness, speed, peak memory, over lengths."""
    kind = _arrays(arrays)
    if kind == "jax":
        raise _fail("bench measures numpy and cupy arrays")
    setup = bench_.default_setup(kind, quick=quick)
    given: dict[str, Any] = {"dtype": dtype, "batch": batch, "heads": heads, "head_dim": head_dim}
    given["heads_kv"] = heads_kv or heads
    if lengths:
        try:
            given["lengths"] = tuple(sorted(int(n) for n in lengths.split(",")))
        except ValueError:
            raise _fail(f"--lengths takes integers like 512,1024; got {lengths}") from None
    setup = replace(
        setup, causal=causal, backward=backward, budget=budget,
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    name = _backend(kind, backend)
    facts = bench_.machine(kind)
    console.print(
        f"[bold]{name}[/bold] on {facts.get('gpu', facts['processor'])}, {setup.arrays} {setup.dtype}, batch "
        f"{setup.batch}, {setup.heads} heads of {setup.head_dim}, {'causal' if causal else 'full'}"
    )
    rows: list[bench_.Row] = []
    with _progress() as progress:
        task = progress.add_task("compiling", total=len(setup.lengths))
        for row in bench_.run(setup, backend):
            rows.append(row)
            following = setup.lengths[len(rows) : len(rows) + 1]
            progress.update(task, advance=1, description=f"{following[0]} tokens" if following else "done")
    console.print(_bench_table(setup, rows))
    for line in _bench_remarks(setup, rows):
        console.print(line)
    out.mkdir(parents=True, exist_ok=True)
    bench_.write_record(out / "attention.json", setup, name, rows)
    bench_.draw(out / "attention.png", setup, name, rows)
    console.print(f"wrote {out / 'attention.json'} and {out / 'attention.png'}")


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return (
        f"{value:.2f} s"
        if value >= 1
        else f"{value * 1e3:.3g} ms"
        if value >= 1e-3
        else f"{value * 1e6:.0f} µs"
    )


def _bytes(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.2f} MiB"


def _ratio(ours: float | None, theirs: float | None) -> str:
    if not ours or not theirs:
        return ""
    factor = theirs / ours
    return f"[green]{factor:.1f}×[/green]" if factor >= 1 else f"[red]{factor:.2f}×[/red]"


def _bench_table(setup: bench_.Setup, rows: list[bench_.Row]) -> Table:
    table = Table(
        "tokens", "", "forward", "backward", "GFLOP/s", "peak memory", "error",
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
        title="cuattn and plain attention; × says how many times faster or smaller",
        title_justify="left",
    )  # fmt: skip
    for i, column in enumerate(table.columns):
        column.justify = "left" if i == 1 else "right"
        column.no_wrap = True
    for row in rows:
        ours, plain = row.cuattn, row.standard
        versus = plain or bench_.Sample(0.0, None, 0, 0.0)
        table.add_row(
            str(row.length), "cuattn",
            f"{_seconds(ours.forward)} {_ratio(ours.forward, versus.forward)}".strip(),
            f"{_seconds(ours.backward)} {_ratio(ours.backward, versus.backward)}".strip(),
            _rates(setup, row.length, ours),
            f"{_bytes(ours.memory)} {_ratio(ours.memory, versus.memory)}".strip(),
            f"{ours.error:.1e}",
        )  # fmt: skip
        if plain:
            table.add_row(
                "", "plain", _seconds(plain.forward), _seconds(plain.backward),
                _rates(setup, row.length, plain), _bytes(plain.memory), f"{plain.error:.1e}", style="dim",
            )  # fmt: skip
        table.add_section()
    return table


def _rates(setup: bench_.Setup, length: int, sample: bench_.Sample) -> str:
    work = bench_.flops(setup, length) / 1e9
    back = f"/{2.5 * work / sample.backward:.0f}" if sample.backward else ""
    return f"{work / sample.forward:.0f}{back}"


def _bench_remarks(setup: bench_.Setup, rows: list[bench_.Row]) -> list[str]:
    remarks = [
        "GFLOP/s: forward/backward. Error: the largest of out, dq, dk and dv, relative, against float64."
    ]
    alone = [row for row in rows if row.standard is None]
    if alone:
        remarks.append(
            f"From {alone[0].length} tokens on cuattn runs alone: standard attention {alone[0].skipped}."
        )
    if len(rows) < len(setup.lengths):
        remarks.append(
            f"Stopped before {setup.lengths[len(rows)]} tokens to stay within {setup.budget:.0f} s."
        )
    return remarks


# verify


@app.command()
def verify(
    arrays: Annotated[str, typer.Option(help="numpy, cupy, jax, or auto: all that work here")] = "auto",
    backend: Annotated[str | None, typer.Option(help="cuda, numba or reference; default by arrays")] = None,
    dtype: Annotated[str | None, typer.Option(help="one dtype; default: all")] = None,
    match: Annotated[str, typer.Option(help="only cases whose name contains this")] = "",
) -> None:
    """Check this machine's results against the float64 reference; exit code 1 if any is wrong."""
    kinds = (_arrays(arrays),) if arrays != "auto" else _verifiable()
    table = Table("arrays", "backend", "dtype", "cases", "largest error", "where")
    wrong: list[tuple[str, verify_.Outcome]] = []
    ran = 0
    for kind in kinds:
        dtypes = (dtype,) if dtype else tuple(verify_.BARS)[: 3 if kind == "jax" else 4]
        total = len(dtypes) * sum(match in case.name for case in verify_.CASES)
        with _progress() as progress:
            task = progress.add_task(kind, total=total)
            outcomes = []
            for outcome in verify_.run(kind, backend, dtypes, match):
                outcomes.append(outcome)
                progress.update(task, advance=1, description=f"{kind}: {outcome.case}, {outcome.dtype}")
        for name in dtypes:
            own = [o for o in outcomes if o.dtype == name]
            if not own:
                continue
            worst = max(own, key=lambda o: o.error)
            good = sum(o.ok for o in own)
            colour = "green" if good == len(own) else "red"
            table.add_row(
                kind, _verified_backend(kind, backend), name, f"[{colour}]{good}/{len(own)}[/{colour}]",
                f"{worst.error:.1e}", f"{worst.case} {worst.worst}",
            )  # fmt: skip
        ran += len(outcomes)
        wrong += [(kind, o) for o in outcomes if not o.ok]
    console.print(table)
    for kind, o in wrong:
        said = o.note or f"{o.worst} is off by {o.error:.1e} (bar {verify_.BARS[o.dtype]:.0e})"
        console.print(f"[red]wrong[/red] {kind} {o.dtype}, {o.case}: {said}", highlight=False, markup=True)
    if not ran:
        raise _fail(f"no case's name contains {match!r}")
    console.print(f"{ran - len(wrong)} of {ran} right")
    raise typer.Exit(1 if wrong else 0)


def _verifiable() -> tuple[str, ...]:
    kinds = ["numpy"]
    rows = {row[0]: row[1] for row in info_.choices()}
    kinds += [kind.lower() for kind in ("CuPy", "JAX") if rows[kind] != "none"]
    return tuple(kinds)


def _verified_backend(kind: str, backend: str | None) -> str:
    if backend or kind != "jax":
        return _backend(kind, backend)
    return next(row[1] for row in info_.choices() if row[0] == "JAX")


# info


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="print plain data")] = False) -> None:
    """Show what is available, which backend a call gets and why, and what to install for the rest."""
    facts = info_.facts()
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    chosen = Table("arrays", "backend", "why", title="what a call gets", title_justify="left")
    for row in facts["choices"]:
        chosen.add_row(row["arrays"], row["backend"], row["why"])
    console.print(chosen)
    states = Table("backend", "available", "reason", title="backends", title_justify="left")
    for name, state in facts["backends"].items():
        states.add_row(name, "[green]yes[/green]" if state["available"] else "[red]no[/red]", state["reason"])
    console.print(states)
    devices = Table(title="GPUs", title_justify="left")
    if facts["gpus"]:
        for column in facts["gpus"][0]:
            devices.add_column(column.replace("_", " "))
        for gpu in facts["gpus"]:
            devices.add_row(
                *(f"{value:g}" if isinstance(value, float) else str(value) for value in gpu.values())
            )
    else:
        devices.add_row(facts["no_gpu"])
    console.print(devices)
    rest = Table(title="compiler, cache, versions", title_justify="left", show_header=False)
    for name, value in {
        **facts["compiler"],
        "kernel cache": facts["kernel_cache"],
        **facts["versions"],
    }.items():
        rest.add_row(name, value)
    console.print(rest)
