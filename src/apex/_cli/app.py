"""The commands of `apex` and their options. The code of a command is imported when it runs."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from .._version import __version__
from .errors import Commands, as_bad_parameter

app = typer.Typer(
    name="apex",
    cls=Commands,
    help="Mixed precision, fused optimizers, norms and kernels for PyTorch, without a compiler.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Help has frames in a terminal and is plain text in a pipe.
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)

Json = Annotated[bool, Option("--json", help="Print one JSON document and nothing else.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"apex {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _apex(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        from .welcome import print_welcome

        print_welcome(context)


@app.command(name="check", help="The same as doctor.", hidden=True)
@app.command(rich_help_panel="Look around")
def doctor(as_json: Json = False) -> None:
    """Show what runs here and why, and check its numbers.

    Versions, devices, the implementation of each op family, and other packages called apex.
    The exit status is 1 when something is broken.
    """
    from .doctor.facts import collect
    from .doctor.report import print_json, print_report

    report = collect()
    (print_json if as_json else print_report)(report)
    raise typer.Exit(1 if report.broken else 0)


_Model = Enum("_Model", {"gpt": "gpt", "conv": "conv", "all": "all"}, type=str)


@app.command(rich_help_panel="Try")
def demo(
    model: Annotated[_Model, Option(help="What to train: a small transformer, a small conv net, or both.")] = (
        _Model.all
    ),
    levels: Annotated[str, Option(help="apex.boost and the opt levels to compare.")] = ("boost,O0,O1,O2,O3,O4,O5"),
    steps: Annotated[
        int | None, Option(help="Training steps of each run; 40 on a CPU and 200 on a GPU by default.", min=1)
    ] = None,
    device: Annotated[
        str | None, Option(help="Where to train: cpu, cuda, cuda:1, ... By default a GPU if there is one.")
    ] = None,
    as_json: Json = False,
    plot: Annotated[Path, Option(help="The picture of losses and loss scales: .png, .svg or .pdf.")] = Path(
        "apex-demo.png"
    ),
) -> None:
    """Compare apex.boost and amp's opt levels on small models.

    Final loss and its distance to float32, time per step, peak memory and skipped steps.
    The data is made on the spot. The run takes less than a minute on two slow CPU cores.
    """
    options = locals()
    from .demo.command import run_demo

    raise typer.Exit(run_demo(**{**options, "model": model.value}))


@app.command(rich_help_panel="Measure")
def bench(
    families: Annotated[
        list[str] | None, Argument(metavar="FAMILY", help="Op families to measure; all by default.")
    ] = None,
    output: Annotated[
        Path | None, Option(help="A JSON file or a folder to write to; nothing is written by default.")
    ] = None,
    plot: Annotated[bool, Option("--plot/--no-plot", help="Draw a chart beside the output as well.")] = True,
    quick: Annotated[bool, Option("--quick", help="Fewer cases and shorter measurements.")] = False,
    device: Annotated[str | None, Option(help="Where to measure: cpu, cuda, cuda:1, ...")] = None,
    filter: Annotated[str | None, Option(metavar="TEXT", help="Only cases whose name contains this.")] = None,
    list_only: Annotated[bool, Option("--list", help="List the cases and measure nothing.")] = False,
    all_cores: Annotated[
        bool, Option("--all-cores", help="Do not keep the process on one core while a GPU is timed.")
    ] = False,
    sweep: Annotated[
        str | None,
        Option(metavar="FAMILY,...", help="Random cases of these families, or of all, to find slow shapes."),
    ] = None,
    cases: Annotated[int, Option(help="Cases of each family of a sweep.", min=1)] = 200,
    seed: Annotated[int, Option(help="What the cases of a sweep are drawn from.")] = 0,
) -> None:
    """Measure the ops on this machine, beside PyTorch's own."""
    options = locals()
    from .bench.command import run_bench

    raise typer.Exit(run_bench(**{**options, "families": families or []}))


@app.command(rich_help_panel="Prepare")
def build(
    ops: Annotated[
        list[str] | None,
        Argument(metavar="OP[:SHAPE[:DTYPE]] | SCRIPT.py", help="By default what APEX_BUILD_... variables select."),
    ] = None,
    gpus: Annotated[
        list[str] | None, Option("--gpu", help="sm_80, sm_90, sm_100, gfx90a, gfx942; may be repeated.")
    ] = None,
    dtype: Annotated[str, Option(help="Of ops that do not name their own.")] = "bfloat16",
    cache: Annotated[Path | None, Option(help="The folder to write to; Triton's own cache by default.")] = None,
    installed_at: Annotated[Path | None, Option(help="Where a job's machines will see it, if elsewhere.")] = None,
    jobs: Annotated[int | None, Option(help="Processes that compile; one per core by default.", min=1)] = None,
    as_json: Json = False,
    list_only: Annotated[bool, Option("--list", help="List the ops and compile nothing.")] = False,
) -> None:
    """Compile kernels before a job starts.

    Its first step then compiles nothing. Needs no GPU. A script runs with the default device "meta": it makes the
    model, runs a step and computes nothing. Jobs that have TRITON_CACHE_DIR set to the folder, and the same versions of
    Triton and Python, find the kernels.
    """
    options = locals()
    from .build.command import run_build

    raise typer.Exit(run_build(**options))


@app.command(
    rich_help_panel="Prepare", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def tune(
    arguments: Annotated[
        list[str] | None, Argument(metavar="[ARGUMENTS]...", help="Of the script that --record names.")
    ] = None,
    ops: Annotated[str, Option(metavar="TEXT,...", help="Only ops whose name contains one of these.")] = "",
    shapes: Annotated[
        Path | None, Option(help="A file of shapes, OP:SHAPE:DTYPE on each line, as `apex build` takes them.")
    ] = None,
    record: Annotated[
        Path | None, Option(metavar="SCRIPT", help="A script to run first; its launches are tuned.")
    ] = None,
    budget: Annotated[str, Option(help="When to stop: 90s, 5m, 1h.")] = "5m",
    output: Annotated[Path | None, Option(help="The table to write to; by default $APEX_TUNED.")] = None,
) -> None:
    """Find quicker kernel launches before a job starts.

    Times configurations near those that the launch rules choose, for the shapes of a script or a file. Keeps one that
    is at least 3% quicker, in every turn, and right. Jobs use the table that APEX_TUNED names.
    """
    options = locals()
    from .tune.command import run_tune

    with as_bad_parameter(ValueError, OSError):
        raise typer.Exit(run_tune(**options))


@app.command(rich_help_panel="Compare")
def compare(
    first: Annotated[Path, Argument(metavar="A", help="The dump to hold the other against.")],
    second: Annotated[list[str], Argument(metavar="B", help="The other; or those of processes that shared a batch.")],
    tolerance: Annotated[float | None, Option(help="Allowed relative error; by default what dtypes explain.")] = None,
    show_all: Annotated[bool, Option("--all", help="Print every tensor.")] = False,
    as_json: Json = False,
    plot: Annotated[Path, Option(help="The picture of the errors: .png, .svg or .pdf.")] = Path("apex-compare.png"),
) -> None:
    """Find the first module where two dumps of a step differ.

    apex.dump.HookerAndDumper writes dumps: of O0 and O2, of two versions of PyTorch, of one process and four.
    The records that amp.trace_overflow(model).save(path) writes are compared in the same way.
    The exit status is 1 when they differ.
    """
    options = locals()
    from .compare import run_compare

    raise typer.Exit(run_compare(**options))


@app.command(rich_help_panel="Prepare")
def memory(
    model: Annotated[
        str | None, Argument(metavar="MODULE:FACTORY | CONFIG", help="Or FILE.py:FACTORY; CONFIG is a config.json.")
    ] = None,
    opt_levels: Annotated[str | None, Option("--opt-level", help="O0 to O5, with commas; all by default.")] = None,
    optimizer: Annotated[
        str, Option(help="Of apex.optimizers, or MODULE:CLASS; with options: FusedSGD,momentum=0.9.")
    ] = "FusedAdam",
    batch: Annotated[int, Option(help="Rows of a batch of one process.", min=1)] = 1,
    shapes: Annotated[
        list[str] | None,
        Option("--input-shape", help="Of an input, without the batch: 3x224x224, 1024:int64; may be repeated."),
    ] = None,
    zero: Annotated[bool, Option("--zero", help="Divide the optimizer's state among processes.")] = False,
    world: Annotated[int, Option(help="Processes that train together.", min=1)] = 1,
    tensor_parallel: Annotated[int, Option("--tp", help="Processes that share a layer.", min=1)] = 1,
    pipeline_parallel: Annotated[int, Option("--pp", help="Stages of a pipeline.", min=1)] = 1,
    checkpointing: Annotated[
        bool, Option("--checkpointing", help="Blocks are computed again in the backward pass.")
    ] = False,
    device_limit: Annotated[
        str | None, Option(help="Find the largest batch that fits, with a unit: 80GiB; this GPU's by default.")
    ] = None,
    measured: Annotated[bool, Option("--measure", help="Run the step on this GPU as well.")] = False,
    states: Annotated[
        bool, Option("--states", help="Print the bytes per parameter of every optimizer; needs no model.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Estimate the GPU memory that a training step needs.

    Parameters, gradients, masters, optimizer state, activations and the peak, for each opt level.
    Nothing is computed and no GPU is needed.
    """
    options = locals()
    from .memory import run_memory

    run_memory(**options)


@app.command("jit-module", rich_help_panel="Prepare")
def jit_module(
    name: Annotated[str, Argument(help="The name under which the extension is imported.")],
    cuda: Annotated[bool, Option(prompt="Has it CUDA or HIP sources?", help="Whether it has such sources.")] = True,
    source: Annotated[
        str, Option(prompt="Sources, separated by commas", help="The source files, separated by commas.")
    ] = "",
    folder: Annotated[Path, Option(help="Where to write the files; sources are relative to it.")] = Path("."),
) -> None:
    """Write a builder and a loader for an extension of yours.

    C++, CUDA or HIP sources become a module that is compiled at its first use. Asks for options that are missing.
    """
    from .jit_module import write_module

    with as_bad_parameter(ValueError, OSError):
        paths = write_module(name, [path.strip() for path in source.split(",")], gpu=cuda, folder=folder)
    typer.echo("\n".join(f"wrote {path}" for path in paths))


_Source = Enum("_Source", {"colossalai": "colossalai"}, type=str)
_Target = Enum("_Target", {"torch": "torch", "apex": "apex", "booster": "booster"}, type=str)


@app.command(rich_help_panel="Port")
def migrate(
    paths: Annotated[list[Path], Argument(metavar="PATH...", help="Scripts, and folders of them.")],
    to: Annotated[_Target, Option(help="What the scripts are to use: torch.amp, apex.amp or the Booster.")] = (
        _Target.torch
    ),
    source: Annotated[
        _Source | None, Option("--from", help="Replace this package by apex, in imports and in the names they bind.")
    ] = None,
    write: Annotated[bool, Option("--write", help="Change the files; without it a diff is printed.")] = False,
    check: Annotated[bool, Option("--check", help="Write nothing; exit with 1 if files would change.")] = False,
    device: Annotated[str, Option(help="Where scripts train: the device type of torch.autocast.")] = "cuda",
    as_json: Json = False,
) -> None:
    """Rewrite scripts between apex.amp, torch.amp and the Booster.

    `--from colossalai` replaces Colossal-AI by apex. Prints a diff. Code without an exact counterpart is not changed,
    but listed with file, line and advice; the exit status is then 2.
    """
    options = locals()
    from .migrate.command import run_migrate

    with as_bad_parameter(OSError):
        way = {"to": to.value} if options.pop("source") is None else {"to": "from colossalai"}
        raise typer.Exit(run_migrate(**{**options, **way}))


@app.command(
    rich_help_panel="Train", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    command: Annotated[list[str], Argument(metavar="SCRIPT [ARGUMENTS]...", help="What each process runs.")],
    nproc_per_node: Annotated[
        int | None,
        Option(
            "--nproc-per-node",
            "--nproc_per_node",
            help="Processes on each machine; one for each GPU of this one by default.",
            min=1,
        ),
    ] = None,
    nnodes: Annotated[
        str, Option(help="Machines in all, on each of which this command is started; 1:4 for one to four of them.")
    ] = "1",
    max_restarts: Annotated[
        int,
        Option(
            "--max-restarts",
            "--max_restarts",
            help="How often all processes are started again after one has failed or the number of machines changed.",
            min=0,
        ),
    ] = 0,
    node_rank: Annotated[int, Option(help="The number of this machine, from 0 on.", min=0)] = 0,
    master_addr: Annotated[
        str | None, Option("--master-addr", "--master_addr", help="The address of machine 0.")
    ] = None,
    master_port: Annotated[
        int | None, Option("--master-port", "--master_port", help="A free port of machine 0.", min=1, max=65535)
    ] = None,
    module: Annotated[bool, Option("--module", "-m", help="SCRIPT is a module, as for python -m.")] = False,
    host: Annotated[
        str | None, Option("--host", "-H", help="Machines, with commas between them; ssh starts them all.")
    ] = None,
    hostfile: Annotated[Path | None, Option(help="A file with a machine on each line.")] = None,
    include: Annotated[str | None, Option(help="The machines of the file to use, with commas.")] = None,
    exclude: Annotated[str | None, Option(help="The machines of the file to leave out, with commas.")] = None,
    num_nodes: Annotated[
        int, Option("--num-nodes", "--num_nodes", help="How many of the machines to use; -1 for all.")
    ] = -1,
    extra_launch_args: Annotated[
        str | None,
        Option("--extra-launch-args", "--extra_launch_args", help="More options of torchrun: name=value,..."),
    ] = None,
    ssh_port: Annotated[
        int | None, Option("--ssh-port", help="Where ssh listens on the machines.", min=1, max=65535)
    ] = None,
    colossalai: Annotated[
        bool, Option("--colossalai", help="Imports of the package colossalai get apex, in every process.")
    ] = False,
) -> None:
    """Run a script in several processes that train together.

    torchrun starts them; RANK, LOCAL_RANK and WORLD_SIZE are in their environment.
    torch.distributed.init_process_group() finds the others. If a process fails, its own error is shown last, and the
    others end; with --max-restarts all start again, and go on from a checkpoint if the script loads one.
    """
    from apex.parallel._hosts import chosen_hosts, extra_arguments, is_this_machine, machine_counts, run_on
    from apex.parallel._torchrun import local_devices, torchrun

    with as_bad_parameter(ValueError, option="--nnodes"):
        fewest, most = machine_counts(nnodes)
    if most > 1 and master_addr is None:
        raise typer.BadParameter(
            "with --nnodes every machine needs the address of machine 0", param_hint="--master-addr"
        )
    with as_bad_parameter(ValueError, OSError):
        hosts = chosen_hosts(host, hostfile, include, exclude, num_nodes)
        if hosts and (nnodes != "1" or node_rank):
            raise ValueError("--nnodes and --node-rank follow from the machines that --host and --hostfile name")
        if not hosts and ssh_port is not None:
            raise ValueError("--ssh-port is for machines that --host or --hostfile name")
        if node_rank >= most:
            raise ValueError(f"--node-rank={node_rank} is not one of {most} machines, which are numbered from 0")
        extra = extra_arguments(extra_launch_args)
    rest = [*(["--module"] if module else []), *command]
    if colossalai:
        rest = ["--module", "apex.compat.colossalai", *rest]
    if hosts and not (len(hosts) == 1 and is_this_machine(hosts[0])):
        options = [f"--nproc-per-node={nproc_per_node or local_devices()}", f"--master-port={master_port or 29500}"]
        options += [f"--extra-launch-args={extra_launch_args}"] if extra_launch_args else []
        options += [f"--max-restarts={max_restarts}"] if max_restarts else []
        raise typer.Exit(run_on(hosts, [*options, f"--master-addr={master_addr or hosts[0]}"], rest, ssh_port))
    if command[0].endswith(".py") and not module and not Path(command[0]).is_file():
        with as_bad_parameter(FileNotFoundError):
            raise FileNotFoundError(f"there is no script {command[0]!r}")
    if not colossalai and (module or command[0].endswith(".py")):
        rest = ["--module", "apex.parallel._recorded", *rest]
    arguments = [f"--nproc-per-node={nproc_per_node or local_devices()}"]
    arguments += [f"--max-restarts={max_restarts}"] if max_restarts else []
    if master_addr is None and master_port is None:
        arguments.append("--standalone")
    elif fewest < most:  # machines come and go: they have no fixed numbers, and meet at machine 0
        meeting = f"{master_addr or 'localhost'}:{master_port or 29500}"
        arguments += [f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", "--rdzv-id=apex"]
    else:
        arguments += [f"--nnodes={most}", f"--node-rank={node_rank}"]
        arguments += [f"--master-addr={master_addr or 'localhost'}", f"--master-port={master_port or 29500}"]
    raise typer.Exit(torchrun([*arguments, *extra, *rest]))
