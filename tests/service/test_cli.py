"""The command line as a person uses it: real processes, a real (tiny, random) model."""

from __future__ import annotations

import inspect
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from service.cli import _expected, main
from service.cli_serve import serve
from service.config import ServerConfig, ServiceConfig, SettingError, parse_bytes, parse_seconds
from service.models import ModelNotFoundError, display_name, resolve
from service.settings import UsageError, of_serve
from service.text.pieces import byte_of_character
from tests.engine.tiny_checkpoints import write_checkpoint

SELFDRAFT = (sys.executable, "-m", "service.cli")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose tokenizer knows printable ASCII and white space."""
    folder = Path(write_checkpoint(tmp_path_factory.mktemp("model"), "hf"))
    known = {32, 10, 9, *range(0x21, 0x7F)}
    letters = sorted(letter for letter, byte in byte_of_character().items() if byte in known)
    vocab = {letter: n for n, letter in enumerate(["<end>", *letters])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<end>"])
    raw.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    settings = {"eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def run(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SELFDRAFT, *arguments], capture_output=True, text=True, timeout=60, input=stdin
    )


class Served:
    """A `selfdraft serve` process."""

    def __init__(self, *arguments: str) -> None:
        options = ["--port", "0", "--metrics-port", "0", "--log-format", "json", *arguments]
        self.process = subprocess.Popen(
            [*SELFDRAFT, "serve", *options], stderr=subprocess.PIPE, text=True
        )
        self.lines: list[dict[str, Any]] = []
        serving = self.wait_for("serving")
        self.grpc, self.metrics = serving["address"], serving["metrics"]

    def wait_for(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.lines.append(json.loads(line))
                if self.lines[-1]["event"] == event:
                    return self.lines[-1]
        raise AssertionError(f"no {event!r} in {self.lines}")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    server = Served("--model", str(model), "--mtp-gate", "off", "--max-rows", "4", "--depth", "2")
    yield server
    server.process.kill()
    server.process.wait()


def test_the_memory_plan_is_logged_at_load(served: Served) -> None:
    plan = {line["part"]: line for line in served.lines if line["event"] == "memory"}
    assert list(plan) == [
        *("weights", "kv pool", "rows", "boundaries", "transient", "reserve", "free"),
    ]
    assert plan["rows"]["note"] == "4 rows"
    assert plan["weights"]["size"].endswith("iB")


def test_options_reach_the_server(served: Served, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "thing"}')
    wrong = run(
        *("generate", "x", "--target", served.grpc, "--json-schema", str(schema), "--n", "2"),
        *("--session-id", "s", "--logprobs", "21", "--frequency-penalty", "3"),
        *("--presence-penalty", "-3", "--repetition-penalty", "0", "--speculation", "off"),
        *("--depth", "2"),
    )
    assert wrong.returncode == 1
    for said in (
        "sampling_params.json_schema: Invalid type: thing",
        "sampling_params.n: must be absent or 1 with session_id",
        "sampling_params.logprobs: must be in 0 … 20, is 21",
        "sampling_params.frequency_penalty: must be in [-2, 2], is 3",
        "sampling_params.presence_penalty: must be in [-2, 2], is -3",
        "sampling_params.repetition_penalty: must be in (0, 10], is 0",
        "speculation.max_depth: must be absent or 0 when mode is off",
    ):
        assert said in wrong.stderr


def test_options_of_reuse_and_pace_reach_engine_and_scheduler(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service import launch

    seen: list[ServiceConfig] = []

    def serve(config: ServiceConfig, *_: object) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(launch, "serve", serve)
    options = [
        [],
        ["--deterministic", "--prefix-memory", "2MiB", "--no-prefix-cache", "--session-ttl", "9"],
        ["--prefix-memory", "0"],
        ["--no-prefix-cache"],
        ["--max-token-gap", "250ms", "--prefill-share", "0.4"],
    ]
    scheduling = ["--max-sessions", "1000", "--max-queued-tokens", "9000", "--ageing", "5"]
    options.append([*scheduling, "--page-watermark", "0.2", "--slow-reader-timeout", "7"])
    for arguments in options:
        monkeypatch.setattr(sys, "argv", ["selfdraft", "serve", "--model", str(model), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    last = seen.pop().scheduler
    queue = (last.max_sessions, last.max_queued_tokens, last.ageing_s)
    assert queue == (1000, 9000, 5.0)
    assert (last.page_watermark, last.slow_reader_timeout_s) == (0.2, 7.0)
    found = [
        (
            config.engine.deterministic,
            config.engine.prefix_memory,
            config.scheduler.prefix_cache,
            config.scheduler.session_ttl_s,
            config.scheduler.max_token_gap_s,
            config.scheduler.prefill_share,
        )
        for config in seen
    ]
    assert found == [
        (False, None, True, 600, None, 0.25),
        (True, 2 << 20, False, 9, None, 0.25),
        (False, 0, True, 600, None, 0.25),
        (False, 0, False, 600, None, 0.25),
        (False, None, True, 600, 0.25, 0.4),
    ]


def test_serve_generate_measure_drain(served: Served) -> None:
    greedy = ("--temperature", "0", "--max-tokens", "30")
    first = run("generate", "def add", "--target", served.grpc, *greedy)
    assert first.returncode == 0, first.stderr
    assert "30 tokens in" in first.stderr
    assert "finish: length" in first.stderr
    assert "acceptance 0." in first.stderr  # it drafts, and a random head guesses badly
    plain = run("generate", "-", "--target", served.grpc, *greedy, "--depth=0", stdin="def add")
    assert plain.stdout == first.stdout
    assert "no drafts" in plain.stderr
    wrong = ("--top-p", "2", "--temperature", "-1", "--system", "Be brief.")
    bad = run("generate", "x", "--target", served.grpc, *wrong)
    assert bad.returncode == 1
    first_fault, second_fault = bad.stderr.splitlines()  # a line for each field at fault
    assert "sampling_params.temperature: must be finite and >= 0" in first_fault
    assert "sampling_params.top_p: must be in (0, 1]" in second_fault
    with urllib.request.urlopen(f"http://{served.metrics}/metrics", timeout=5) as answer:
        page = answer.read().decode()
    assert "selfdraft_generation_tokens_total 60.0" in page
    assert 'family="qwen3_5"' in page

    # A running stream is finished before the process ends.
    command = [*SELFDRAFT, "generate", "x", "--target", served.grpc, "--max-tokens", "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        served.process.send_signal(signal.SIGTERM)
        served.wait_for("draining")
        _, said = running.communicate(timeout=60)
    assert running.returncode == 0, said
    served.wait_for("stopped")
    assert served.process.wait(timeout=10) == 0


def test_generate_in_this_process(model: Path) -> None:
    done = run(
        *("generate", "def add", "--model", str(model), "--max-tokens", "12"),
        *("--seed", "3", "--depth", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1
    assert "12 tokens in" in done.stderr
    assert "seed 3" in done.stderr


def test_generate_several_texts(model: Path) -> None:
    done = run(
        *("generate", "def add", "--model", str(model), "--max-tokens", "5", "--n", "2"),
        *("--seed", "9", "--speculation", "rejection", "--repetition-penalty", "1.0"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--- 0\n")
    assert "\n--- 1\n" in done.stdout
    assert done.stderr.count("5 tokens in") == 2
    assert "seed 9 (rejection)" in done.stderr


def test_inspect_tells_whether_a_model_can_run(model: Path, tmp_path: Path) -> None:
    good = run("inspect", str(model))
    assert "per token, " in good.stdout
    assert good.returncode == 0
    assert "qwen3_5" in good.stdout
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    bad = run("inspect", str(tmp_path))
    assert bad.returncode == 1
    assert "NO" in bad.stdout


def test_a_demo_runs_to_its_end_without_a_terminal(model: Path) -> None:
    done = run("demo", "--model", str(model), "--sessions", "2", "--no-compare")
    assert done.returncode == 0, done.stderr
    for said in ("session 'fibonacci'", "tokens per verify pass", "KV cache, peak", "curl -s"):
        assert said in done.stdout
    assert "Traceback" not in done.stderr


def test_a_demo_shows_progress_on_a_terminal(model: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*SELFDRAFT, "demo", "--model", str(model), "--sessions", "1", "--no-compare"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs) as process:
        os.close(theirs)
        seen = b""
        while select.select([ours], [], [], 30)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
        assert process.wait(timeout=30) == 0
    os.close(ours)
    assert b"fibonacci" in seen
    assert b"\x1b[" in seen


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("serve", "--model", "/no/such/folder"), 1, "is no directory"),
        (("serve", "--depth", "9"), 2, "--depth: must be auto or 0 … 8, not '9'"),
        (("serve", "--dtype", "int3"), 2, "--dtype: must be one of auto, float32"),
        (("serve", "--kv-memory", "lots"), 2, "is not a size such as 512MiB"),
        (("serve", "--prefix-memory", "much"), 2, "is not a size such as 512MiB"),
        (("serve", "--session-ttl", "0"), 2, "session_ttl_s must be > 0 seconds"),
        (("serve", "--max-sessions", "0"), 2, "max_sessions must be >= 1"),
        (("serve", "--max-queued-tokens", "0"), 2, "max_queued_tokens must be >= 1"),
        (("serve", "--ageing", "0"), 2, "ageing_s must be > 0 seconds"),
        (("serve", "--page-watermark", "1"), 2, "page_watermark must be in [0, 1)"),
        (("serve", "--slow-reader-timeout", "0"), 2, "slow_reader_timeout_s must be > 0"),
        (("serve", "--max-token-gap", "soon"), 2, "is not a time such as 0.25 or 250ms"),
        (("serve", "--max-token-gap", "0"), 2, "must be > 0 seconds"),
        (("serve", "--deterministic", "--max-token-gap", "1"), 2, "not with deterministic"),
        (("serve", "--prefill-share", "1.5"), 2, "prefill_share must be in [0, 1]"),
        (("serve", "--port", "70000"), 2, "port: must be in 0 … 65535"),
        (("serve", "--max-rows", "0"), 2, "max_rows"),
        (("serve", "--max-rows", "300"), 2, "max_rows"),
        (("serve", "--log-format", "xml"), 2, "--log-format: must be one of json, pretty"),
        (("generate", "x", "--target", "127.0.0.1:1"), 1, "UNAVAILABLE"),
        (("generate", "x", "--target", "t", "--model", "m"), 2, "the server at --target decides"),
        (("generate", "x", "--json-schema", "/no/such/file"), 2, "--json-schema: cannot read"),
        (
            ("generate", "x", "--regex", "a", "--grammar", "/no/such/file"),
            2,
            "--regex and --grammar: a text has one form",
        ),
        (
            ("generate", "x", "--speculation", "maybe"),
            2,
            "--speculation: must be one of auto, coupled, rejection, off, not 'maybe'",
        ),
        (("inspect", "/no/such/folder"), 1, "is no directory"),
        (("demo", "--model", "/no/such/folder"), 1, "is no directory"),
    ],
)
def test_errors_are_one_line_and_a_code(
    arguments: tuple[str, ...],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["selfdraft", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    out, err = capsys.readouterr()
    assert (exited.value.code, out) == (code, ""), err
    last = err.strip().splitlines()[-1]
    assert last.startswith("selfdraft: ")
    assert said in last
    assert "Traceback" not in err


def test_a_taken_port_is_one_line_too(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        started = time.monotonic()
        done = run("serve", "--model", str(model), "--port", port, "--no-metrics")
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert time.monotonic() - started < 10


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("selfdraft ")


def test_defects_keep_their_traceback() -> None:
    assert _expected(UsageError("x")) == 2
    assert _expected(SettingError("x", "y")) == 2
    assert _expected(ModelNotFoundError("x")) == 1
    assert _expected(ValueError("a bug")) is None
    assert _expected(KeyError("a bug")) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("2 GiB", 2**31), ("1.5KB", 1500), ("77", 77), ("3b", 3)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("0.25", 0.25), ("250ms", 0.25), ("2 s", 2.0), (".5", 0.5), ("1e", None)]
)
def test_times(text: str, seconds: float | None) -> None:
    if seconds is not None:
        assert parse_seconds(text) == seconds
        return
    for wrong in (text, "", "-1", "0", "0ms", "2 min", "inf", "nan"):
        with pytest.raises(SettingError):
            parse_seconds(wrong)


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "0", "1XB", "1e3"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(SettingError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("metrics_port", 65536),
        ("host", ""),
        ("max_concurrent_rpcs", 0),
        ("max_message_bytes", 10),
        ("keepalive_s", 0.0),
        ("keepalive_timeout_s", float("nan")),
        ("max_connection_age_s", -1.0),
        ("drain_s", float("inf")),
        ("write_timeout_s", 0.0),
    ],
)
def test_server_settings_out_of_range_name_themselves(field: str, value: object) -> None:
    with pytest.raises(SettingError, match=field):
        ServerConfig(**{field: value})  # type: ignore[arg-type]


def test_models_are_folders_or_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, Any]] = []

    def download(hub_id: str, **options: Any) -> str:
        asked.append((hub_id, options))
        if hub_id.endswith("missing"):
            raise OSError("no network\nat all")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    assert asked == []  # a local directory needs no network
    assert resolve("org/name", revision="v1") == tmp_path
    ((hub_id, options),) = asked
    assert (hub_id, options["revision"]) == ("org/name", "v1")
    assert set(options["allow_patterns"]) == {"*.safetensors", "*.json", "*.jinja", "*.txt"}
    with pytest.raises(ModelNotFoundError, match=r"no network$"):
        resolve("org/missing")
    monkeypatch.chdir(tmp_path)
    for path in ("./org/name", "/org/name", "a/b/c", "../no-such-folder"):
        with pytest.raises(ModelNotFoundError, match="is no directory"):
            resolve(path)
    assert display_name("org/name") == "org/name"
    assert display_name(str(tmp_path)) is None


def test_every_option_of_serve_is_read(model: Path) -> None:
    read: set[str] = set()

    class Given:
        def __init__(self, **values: object) -> None:
            self._values = values

        def __getattr__(self, name: str) -> object:
            read.add(name)
            return self._values[name]

    options = inspect.signature(serve).parameters
    defaults = {name: option.default for name, option in options.items()}
    of_serve(Given(**defaults | {"model": str(model), "check": True}))
    assert read == set(options)
