"""The `selfdraft` command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from service import options, settings
from service.admin_cli import admin_app, token_app
from service.cli_serve import serve
from service.settings import UsageError

app = typer.Typer(
    name="selfdraft",
    help="Serves a language model that drafts for itself, over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(admin_app, name="admin")
app.add_typer(token_app, name="token")
app.command()(serve)


def _version(wanted: bool) -> None:
    if wanted:
        from service.version import VERSION

        typer.echo(f"selfdraft {VERSION}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serves a language model that drafts for itself, over gRPC."""


@app.command("gateway")
def run_gateway(
    worker: Annotated[
        list[str] | None, typer.Option(help="host:port of a server; may be repeated.")
    ] = None,
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port.")] = 30000,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port of the gateway.")] = 29000,
    policy: Annotated[str, typer.Option(help="How smg chooses a worker.")] = "cache_aware",
    wait: Annotated[
        float, typer.Option(help="Seconds in which all workers must be serving.")
    ] = 300.0,
    further: Annotated[
        list[str] | None, typer.Argument(help="After --: further options of `smg launch`.")
    ] = None,
) -> None:
    """Put the Shepherd Model Gateway in front of servers: OpenAI and Anthropic APIs over HTTP."""
    from service.gateway.launch import GatewayConfig, launch

    launch(
        GatewayConfig(
            workers=tuple(worker or ()),
            host=host,
            port=port,
            metrics_port=metrics_port,
            policy=policy,
            wait_s=wait,
            options=tuple(further or ()),
        )
    )


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    target: Annotated[
        str | None, typer.Option(help="host:port of a server; in this process when absent.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's turn.")] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1].")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1).")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="In (0, 10].")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="In [-2, 2].")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="In [-2, 2].")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Texts to generate, 1 … 16.")] = None,
    logprobs: options.Logprobs = None,
    json_schema: options.JsonSchema = None,
    regex: Annotated[str | None, typer.Option(help="Expression that must match the text.")] = None,
    grammar: options.Grammar = None,
    session_id: options.SessionId = None,
    speculation: options.Speculation = "auto",
    depth: options.DepthOption = "auto",
    priority: options.PriorityOption = "default",
    timeout: Annotated[float | None, typer.Option(help="Deadline in seconds.")] = None,
    tls: options.UseTls = False,
    tls_ca: options.TlsCa = None,
    tls_cert: options.ClientCert = None,
    tls_key: options.ClientKey = None,
    token_file: options.TokenFile = None,
    insecure_token: options.InsecureToken = False,
    model: options.Model = None,
    revision: options.Revision = None,
    kv_memory: options.KvMemory = None,
    context: options.Context = None,
    dtype: options.Dtype = "auto",
    blas: options.Blas = "auto",
    weights: options.Weights = "auto",
    mtp_gate: options.Gate = "auto",
) -> None:
    """Generate one text, streamed to standard output; a summary goes to standard error."""
    from selfdraft.messages import Priority, SpeculationMode

    from service.oneshot import Ask, generate_at, generate_here

    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "n": n,
        "logprobs": logprobs,
        **settings.form(json_schema=json_schema, regex=regex, grammar=grammar),
    }
    ask = Ask(
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        chat=chat or system is not None,
        system=system,
        sampling={name: value for name, value in sampling.items() if value is not None},
        session_id=session_id,
        speculation=settings.choice("--speculation", speculation, SpeculationMode),
        max_depth=None if depth == "auto" else settings.fixed_depth(depth),
        timeout=timeout,
        priority=settings.choice("--priority", priority, Priority),
    )
    here = {"model": model, "revision": revision, "kv-memory": kv_memory, "context": context}
    if target is not None:
        if given := [f"--{name}" for name, value in here.items() if value is not None]:
            raise UsageError(f"{', '.join(given)}: the server at --target decides that")
        reach = options.client_options(
            *(tls, tls_ca, tls_cert, tls_key), token_file=token_file, insecure_token=insecure_token
        )
        generate_at(target, ask, reach)
        return
    config = settings.make_config(
        model=model,
        revision=revision,
        max_rows=min(max(n or 1, 1), 16),  # beyond that the request is refused
        kv_memory=kv_memory,
        context=context,
        depth=depth,
        dtype=dtype,
        blas=blas,
        weights=weights,
        mtp_gate=mtp_gate,
    )
    generate_here(config, ask)


@app.command()
def reference(what: Annotated[str, typer.Argument(help="metrics or logs.")]) -> None:
    """Print a page of reference: every metric, or every event and field of the log."""
    from service.reference import PAGES

    if what not in PAGES:
        raise UsageError(f"WHAT: must be one of {', '.join(PAGES)}, not {what!r}")
    typer.echo(PAGES[what](), nl=False)


@app.command()
def inspect(
    model: Annotated[str | None, typer.Argument(help="Directory or hub id.")] = None,
    revision: options.Revision = None,
) -> None:
    """Show what a checkpoint holds and whether it can run; exit code 1 when it cannot."""
    from engine.inspect import inspect_model
    from service import console, models

    found = inspect_model(models.resolve(model, revision=revision))
    console.show_inspection(found)
    raise typer.Exit(0 if found.runnable else 1)


@app.command()
def tune(
    model: options.Model = None,
    revision: options.Revision = None,
    rows: Annotated[str, typer.Option(help="Batch sizes to measure, e.g. 1,2,4.")] = "1,2,4,8,16",
    depths: Annotated[str, typer.Option(help="Depths to measure, e.g. 0..8.")] = "0..8",
    seconds: Annotated[float, typer.Option(help="Time to measure for, about.")] = 60.0,
    context_tokens: Annotated[int, typer.Option(help="Prompt tokens of the rows measured.")] = 256,
    output: Annotated[
        Path | None, typer.Option(help="File to write; the user's cache for serve when absent.")
    ] = None,
    kv_memory: options.KvMemory = None,
    dtype: options.Dtype = "auto",
    blas: options.Blas = "auto",
    weights: options.Weights = "auto",
    mtp_gate: options.Gate = "auto",
) -> None:
    """Measure what decode cycles cost here, for serve to choose its depth by."""
    from engine.config import MAX_ROWS
    from engine.plan import MAX_DEPTH
    from service.tune import check_seconds, parse_numbers, run_tune

    sizes = parse_numbers("--rows", rows, 1, MAX_ROWS)
    steps = parse_numbers("--depths", depths, 0, MAX_DEPTH)
    check_seconds(seconds)
    config = settings.make_config(
        model=model,
        revision=revision,
        max_rows=max(sizes),
        kv_memory=kv_memory,
        context=None,
        depth=str(max(steps)),
        dtype=dtype,
        blas=blas,
        weights=weights,
        mtp_gate=mtp_gate,
    )
    run_tune(
        config.engine,
        rows=sizes,
        depths=steps,
        seconds=seconds,
        context=context_tokens,
        output=output,
    )


@app.command("simulate")
def simulate_command(
    scenario: Annotated[
        list[Path] | None,
        typer.Option(help="TOML file, as in deploy/simulate; repeat it to merge several."),
    ] = None,
    machines: Annotated[int | None, typer.Option(help="Machines of the fleet.")] = None,
    routing: Annotated[
        str | None,
        typer.Option(help="round-robin, least-loaded, session-hash or prefix-aware."),
    ] = None,
    users: Annotated[int | None, typer.Option(help="Chat users, a closed loop.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, an open loop.")] = None,
    process: Annotated[str | None, typer.Option(help="poisson, bursts or diurnal.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSONL of arrival_s, prompt_tokens, output_tokens and more."),
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds in which requests come.")] = None,
    warmup: Annotated[float | None, typer.Option(help="Seconds of them not reported.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a run.")] = None,
    cost_table: Annotated[
        Path | None, typer.Option(help="What cycles cost, as selfdraft tune wrote it.")
    ] = None,
    prefill_rate: Annotated[
        float | None, typer.Option(help="Prompt tokens per second of one machine.")
    ] = None,
    find: Annotated[
        bool, typer.Option("--find-machines", help="The fewest machines that are enough.")
    ] = False,
    most: Annotated[int, typer.Option(help="Most machines that --find-machines tries.")] = 256,
    plot: Annotated[Path | None, typer.Option(help="PNG file to draw (extra: plot).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Simulate a load on machines of given costs, with the real scheduler on a virtual clock."""
    from service.simulate import plan_of, run_simulate

    if prefill_rate is not None and not 0 < prefill_rate < float("inf"):
        raise UsageError(f"--prefill-rate: must be finite and > 0, not {prefill_rate}")
    options: dict[str, object] = {
        "fleet.machines": machines,
        "fleet.routing": routing,
        "load.users": users,
        "load.rate": rate,
        "load.process": process,
        "load.trace": None if trace is None else str(trace),
        "run.duration_s": duration,
        "run.warmup_s": warmup,
        "run.seed": seed,
        "machine.costs.cost_table": None if cost_table is None else str(cost_table),
        "machine.costs.token_s": None if prefill_rate is None else 1 / prefill_rate,
    }
    plan = plan_of(scenario or [], options)
    run_simulate(plan, as_json=as_json, image=plot, find=find, most=most)


@app.command()
def demo(
    model: options.Model = None,
    sessions: Annotated[int, typer.Option(min=1, max=64, help="Concurrent sessions.")] = 8,
    compare: Annotated[bool, typer.Option(help="Run once more without drafts.")] = True,
) -> None:
    """Serve the bundled model to several sessions at once and show what its drafts bring."""
    from service.demo import run_demo

    raise typer.Exit(run_demo(model=model, sessions=sessions, compare=compare))


ExitCode = Literal[1, 2]


def _expected(error: Exception) -> ExitCode | None:
    """Exit code of an error a person can do something about; None for a defect of ours."""
    from selfdraft import SelfdraftError

    from engine.errors import ConfigError, EngineError
    from service.config import SettingError
    from service.costs import CostTableError
    from service.gateway.launch import GatewayError
    from service.models import ModelNotFoundError
    from service.reload import FileError
    from service.server import BindError
    from service.text.tokenizer import TokenizerError

    if isinstance(error, UsageError | ConfigError | SettingError | CostTableError | FileError):
        return 2
    known = (
        *(EngineError, SelfdraftError, ModelNotFoundError, BindError, TokenizerError),
        GatewayError,
    )
    return 1 if isinstance(error, known) else None


def main() -> None:
    """Entry point: one line for an expected error, a traceback only for a defect."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = _expected(error)
        if code is None:
            raise
        from service import console

        console.fail(error)
        sys.exit(code)


if __name__ == "__main__":
    main()
