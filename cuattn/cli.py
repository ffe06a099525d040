"""The command ``cuattn``: bench, verify, info, plan, precompile. Only words and colours live here.

What is measured, checked or gathered is in ``bench``, ``verify``, ``info`` and ``plan``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import bench as bench_
from . import info as info_
from . import planning
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
    console.print(f"[red]{escape(message)}[/red]")
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
    small, large = value / 2**20, value / 2**30
    return f"{large:.2f} GiB" if large >= 1 else f"{small:.0f} MiB" if small >= 100 else f"{small:.3g} MiB"


def _error(value: float) -> str:
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    if not ours or not theirs:
        return ""
    factor = theirs / ours
    return f"[green]{factor:.3g}×[/green]" if factor >= 1 else f"[red]{factor:.2f}×[/red]"


def _bench_table(setup: bench_.Setup, rows: list[bench_.Row]) -> Table:
    table = Table(
        "tokens", "", "forward", "backward", f"{_unit(setup)[0]}F/s", "peak memory", "error",
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
            _error(ours.error),
        )  # fmt: skip
        if plain:
            table.add_row(
                "", "plain", _seconds(plain.forward), _seconds(plain.backward),
                _rates(setup, row.length, plain), _bytes(plain.memory), _error(plain.error), style="dim",
            )  # fmt: skip
        table.add_section()
    return table


def _unit(setup: bench_.Setup) -> tuple[str, float]:
    """A prefix for rates that suits the machine."""
    return ("T", 1e12) if setup.arrays == "cupy" else ("G", 1e9)


def _rates(setup: bench_.Setup, length: int, sample: bench_.Sample) -> str:
    work = bench_.flops(setup, length) / _unit(setup)[1]
    back = f"/{2.5 * work / sample.backward:.0f}" if sample.backward else ""
    return f"{work / sample.forward:.0f}{back}"


def _bench_remarks(setup: bench_.Setup, rows: list[bench_.Row]) -> list[str]:
    remarks = [
        f"{_unit(setup)[0]}F/s: forward/backward. Error: the largest of out, dq, dk and dv, relative, "
        "against float64."
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
        chosen = verify_.cases(kind, backend, match)
        _compile_ahead(kind, _verified_backend(kind, backend), verify_.calls(kind, chosen, dtypes))
        with _progress() as progress:
            task = progress.add_task(kind, total=len(dtypes) * len(chosen))
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
                f"{worst.error:.1e}", escape(f"{worst.case} {worst.worst}"),
            )  # fmt: skip
        ran += len(outcomes)
        wrong += [(kind, o) for o in outcomes if not o.ok]
    console.print(table)
    for kind, o in wrong:
        said = o.note or f"{o.worst} is off by {o.error:.1e} (bar {verify_.BARS[o.dtype]:.0e})"
        said = escape(f"{o.case}: {said}")
        console.print(f"[red]wrong[/red] {kind} {o.dtype}, {said}", highlight=False, markup=True)
    if not ran:
        raise _fail(f"no case's name contains {match!r}")
    console.print(f"{ran - len(wrong)} of {ran} right")
    raise typer.Exit(1 if wrong else 0)


def _compile_ahead(kind: str, backend: str, calls: verify_.Calls) -> None:
    """Compile what the cases need on all cores, and say so."""
    if backend == "cuda":
        count, steps = verify_.compile_kernels(calls)
        what = "CUDA kernels"
    elif backend == "numba" and kind != "cupy":
        count, steps = verify_.compile_loops(calls)
        what = "CPU loops"
    else:
        return
    if count:
        console.print(f"{kind}: {count} {what}; what the cache lacks is compiled first, once, on all cores")
    with _progress() as progress:
        task = progress.add_task("", total=count)
        for done in range(count):
            progress.update(task, completed=done, description=f"{kind}: {what}, {done} of {count} compiled")
            next(steps)


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
        chosen.add_row(row["arrays"], row["backend"], escape(row["why"]))
    console.print(chosen)
    states = Table("backend", "available", "reason", title="backends", title_justify="left")
    for name, state in facts["backends"].items():
        available = "[green]yes[/green]" if state["available"] else "[red]no[/red]"
        states.add_row(name, available, escape(state["reason"]))
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
        devices.add_row(escape(facts["no_gpu"]))
    console.print(devices)
    rest = Table(title="compiler, cache, versions", title_justify="left", show_header=False)
    for name, value in {
        **facts["compiler"],
        "kernel cache": facts["kernel_cache"],
        **facts["versions"],
    }.items():
        rest.add_row(name, escape(value))
    console.print(rest)


# plan and precompile


@app.command()
def plan(
    batch: Annotated[int, typer.Option(min=0)] = 1,
    seqlen: Annotated[int, typer.Option(min=0, help="queries")] = 4096,
    seqlen_kv: Annotated[int | None, typer.Option(min=0, help="keys; default: as many as queries")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    heads_kv: Annotated[int | None, typer.Option(min=1, help="default: as many as --heads")] = None,
    head_dim: Annotated[int, typer.Option(min=1, max=256)] = 128,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32, float64")] = "float16",
    causal: Annotated[bool, typer.Option(help="causal mask or none")] = False,
    window: Annotated[str | None, typer.Option(help="left,right; -1 is open")] = None,
    softcap: Annotated[float, typer.Option(min=0)] = 0.0,
    precision: Annotated[str | None, typer.Option(help="float32 only: highest, tf32, bf16")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="the gradients' kernels")] = False,
    device: Annotated[
        str | None, typer.Option(help="T4, A100, RTX3090, RTX4090, H200, B200, RTX5090, cpu, or an index")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="the walk in words and numbers")] = False,
    compiled: Annotated[bool, typer.Option(help="compile, to know registers and occupancy")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print plain data")] = False,
) -> None:
    """Show what a call would run and cost, without running it; the GPU need not be here."""
    q = planning.shaped((batch, seqlen, heads, head_dim), dtype)
    keys = planning.shaped(
        (batch, seqlen if seqlen_kv is None else seqlen_kv, heads_kv or heads, head_dim), dtype
    )
    where: Any = int(device) if device and device.isdigit() else device
    if where is None:
        where = 0 if backends()["cuda"].available else "cpu"
    try:
        sides = tuple(int(n) for n in window.split(",")) if window else None
        made = planning.plan(
            q, keys, keys,
            device=None if where == "cpu" else where, backend="numba" if where == "cpu" else "cuda",
            backward=backward, compile_kernels=None if compiled else False, causal=causal, window_size=sides,
            softcap=softcap, precision=precision, deterministic=deterministic,
        )  # fmt: skip
    except (ValueError, TypeError, RuntimeError) as refused:
        raise _fail(str(refused)) from None
    if as_json:
        typer.echo(json.dumps(asdict(made), indent=1))
        return
    console.print(_kernel_table(made))
    for use in made.kernels:
        if use.parts:
            console.print(f"{use.name}: {use.heads} query head(s) a tile, keys in {use.parts} part(s)\n")
    console.print(_cost_table(made))
    for line in _explanation(made) if explain else []:
        console.print(line, highlight=False)


def _kernel_table(made: planning.Plan) -> Table:
    where = made.device.name if made.device else "CPU"
    title = f"{made.backend} on {where}, {'backward' if made.backward else 'forward'}"
    columns = ["kernel", "tile", "pieces of work"]
    if made.device:
        columns = ["kernel", "tile", "stages", "blocks×threads", "shared", "regs", "per SM", "waves"]
    table = Table(
        *columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left"
    )
    for use in made.kernels:
        tile = f"{use.tile[0]}×{use.tile[1]}" if use.tile else "–"
        if not made.device:
            table.add_row(use.name, tile, str(use.blocks))
            continue
        registers = "–" if use.registers is None else str(use.registers)
        if use.spill_bytes:
            registers += f" [red]+{use.spill_bytes} B[/red]"
        table.add_row(
            use.source.removesuffix(".cu"), tile, str(use.stages or "–"), f"{use.blocks}×{use.threads}",
            f"{use.shared_memory / 1024:.0f} KiB", registers, str(use.blocks_per_sm or "–"),
            "–" if use.waves is None else f"{use.waves:.1f}",
        )  # fmt: skip
    return table


def _count(value: float, unit: str) -> str:
    """A number with its decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or prefix == "T":
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    raise AssertionError


def _cost_table(made: planning.Plan) -> Table:
    table = Table("", "this call", "plain attention", box=SIMPLE_HEAD, pad_edge=False)
    table.add_row("arithmetic", _count(made.flops, "FLOP"), _count(made.standard_flops, "FLOP"))
    table.add_row("products", made.products, made.spec.dtype)
    table.add_row("memory moved", _count(made.memory_bytes, "B"), _count(made.standard_bytes, "B"))
    if made.device:
        table.add_row("loaded from L2", _count(made.on_chip_bytes, "B"), "")
    table.add_row("scratch memory", _count(made.workspace_bytes, "B"), _count(made.standard_workspace, "B"))
    balance = f" (the device's balance: {made.balance:.0f})" if made.balance else ""
    plain = made.standard_flops / max(1, made.standard_bytes)
    table.add_row("FLOP per byte", f"{made.intensity:.0f}{balance}", f"{plain:.0f}")
    if made.seconds is not None:
        table.add_row("no faster than", _seconds(made.seconds), _seconds(made.standard_seconds))
    return table


def _bar(used: float, width: int = 30) -> str:
    full = min(width, round(used * width))
    return "[blue]" + "█" * full + "[/blue]" + "░" * (width - full) + f" {used:.0%}"


def _explanation(made: planning.Plan) -> list[str]:
    """The walk of a call in sentences."""
    spec = made.spec
    lines = [
        f"[bold]The call.[/bold] {spec.batch} × {spec.heads_q} heads of {spec.seqlen_q} queries against "
        f"{spec.seqlen_kv} keys, head_dim {spec.head_dim}, {spec.dtype}; {spec.group} query head(s) per key "
        f"head. Positions leave {made.visible:.1%} of the scores. It computes "
        f"{'gradients' if made.backward else 'out and LSE'}."
    ]
    for use in made.kernels:
        lines += _kernel_sentences(made, use)
    times = made.standard_bytes / max(1, made.memory_bytes)
    lines.append(
        f"[bold]Memory.[/bold] Operands and results are {_count(made.memory_bytes, 'B')}; plain "
        f"attention would move {_count(made.standard_bytes, 'B')}, {times:.0f} times as much."
    )
    if made.seconds is not None and made.balance:
        kind = "arithmetic" if made.intensity > made.balance else "memory"
        rates = f"{_count(made.peak_flops or 0, 'FLOP/s')} and {_count(made.bandwidth or 0, 'B/s')}"
        lines.append(
            f"[bold]Roofline.[/bold] {made.intensity:.0f} FLOP per byte against the device's "
            f"{made.balance:.0f}, so {kind} is the limit. At {rates} no call can be faster than "
            f"{_seconds(made.seconds)}."
        )
    return lines


def _kernel_sentences(made: planning.Plan, use: planning.KernelUse) -> list[str]:
    name, device = f"[bold]{use.name}[/bold] ({use.source})", made.device
    if use.tile is None:
        return [f"{name} prepares or finishes: {use.blocks} piece(s)."]
    tile = f"tiles of {use.tile[0]} queries × {use.tile[1]} keys"
    if device is None:
        return [f"{name}: {use.blocks} piece(s), dealt to all cores, in {tile} that stay in the cache."]
    lines = [
        f"{name}: {use.blocks} blocks of {use.threads} threads work on {tile}. A tile of scores lives in "
        f"registers and is overwritten by the next; whole matrices would be "
        f"{_count(made.standard_workspace, 'B')}.",
        *(
            [f"  {use.heads} query head(s) share a tile; its keys are cut into {use.parts} part(s)."]
            if use.parts
            else []
        ),
        f"  shared memory {_bar(use.shared_memory / device.shared_memory_per_block)} of "
        f"{device.shared_memory_per_block / 1024:g} KiB a block",
    ]
    if use.registers is not None and use.blocks_per_sm is not None and use.waves is not None:
        taken = use.registers * use.threads * use.blocks_per_sm / device.registers_per_sm
        lines += [
            f"  registers     {_bar(taken)} of {device.registers_per_sm} an SM, {use.registers} a thread",
            f"  threads       {_bar(use.occupancy or 0)} of {device.threads_per_sm} an SM",
            f"  {use.blocks_per_sm} block(s) fit on an SM, limited by {use.limit}; "
            f"{device.sm_count} SMs take {use.waves:.1f} wave(s).",
        ]
    return lines


@app.command()
def precompile(
    dtypes: Annotated[str, typer.Option(help="comma-separated")] = "float16,bfloat16",
    head_dims: Annotated[str, typer.Option(help="comma-separated")] = "64,128",
    backward: Annotated[bool, typer.Option(help="gradients' kernels too")] = True,
    device: Annotated[
        str | None, typer.Option(help="a model's name or a CUDA index; default: the GPU here")
    ] = None,
) -> None:
    """Compile kernels into the cache ahead of their first use; works without a GPU for a named one."""
    where: Any = int(device) if device and device.isdigit() else device
    try:
        with _progress() as progress:
            progress.add_task("compiling", total=None)
            lines = planning.precompile(
                dtypes=dtypes.split(","), head_dims=[int(n) for n in head_dims.split(",")], backward=backward,
                device=where,
            )  # fmt: skip
    except (ValueError, TypeError, RuntimeError) as refused:
        raise _fail(str(refused)) from None
    for line in lines:
        console.print(line, highlight=False)
    console.print(f"{len(lines)} kernels in {info_.cache()}")
