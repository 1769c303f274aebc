"""The examples in proto/examples run, against a real server."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.checkout import ROOT
from tests.service.harness import Running, running, saying, service_config

pytestmark = pytest.mark.anyio

EXAMPLES = ROOT / "proto" / "examples"
SAYS = "one two three "


async def run(
    *command: str | Path, stdin: str = "", path: Sequence[Path] = ()
) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of an example, run where a user would."""
    found = [str(part) for part in (*path, Path(sys.executable).parent)]
    environment = {**os.environ, "PATH": os.pathsep.join([*found, os.environ["PATH"]])}
    with anyio.fail_after(60):
        done = await anyio.run_process(
            [str(word) for word in command],
            input=stdin.encode(),
            cwd=ROOT,
            env=environment,
            check=False,
        )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_every_example_is_run() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert there == {"service.py", "call.py", "shell.sh", "notebook.ipynb"}


async def test_service_answers_all_though_the_queue_is_short() -> None:
    config = service_config(max_queue=2)
    async with running(config=config, token=saying(SAYS), max_rows=2, step_s=0.001) as up:
        questions = "".join(f"question {n}\n" for n in range(12))
        script = EXAMPLES / "service.py"
        code, out, err = await run(sys.executable, script, up.target, stdin=questions)
        assert code == 0, err
        answers = [json.loads(line) for line in out.splitlines()]
        assert {answer["number"] for answer in answers} == set(range(12))
        assert all(answer["text"].startswith("one two") for answer in answers)
        assert max(answer["attempts"] for answer in answers) > 1
        await up.until_idle()


async def test_service_tells_what_failed_and_goes_on() -> None:
    async with running(token=saying(SAYS), context_length=64) as up:
        script = EXAMPLES / "service.py"
        questions = "short\n" + "too long " * 200 + "\n"
        code, out, _ = await run(sys.executable, script, up.target, stdin=questions)
        assert code == 1
        answers = {(found := json.loads(line))["number"]: found for line in out.splitlines()}
        assert answers[1]["error"] == "INVALID_ARGUMENT"
        assert "error" in answers[0] or answers[0]["text"]


async def test_service_without_a_server() -> None:
    script = EXAMPLES / "service.py"
    arguments = ("127.0.0.1:1", "--timeout", "0.3")
    code, out, _ = await run(sys.executable, script, *arguments, stdin="x\n")
    assert (code, json.loads(out)) == (1, {"number": 0, "error": "UNAVAILABLE"})


async def test_shell(tmp_path: Path) -> None:
    command = tmp_path / "selfdraft"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m service.cli "$@"\n')
    command.chmod(0o755)
    async with running(token=saying(SAYS)) as up:
        code, out, err = await run("sh", EXAMPLES / "shell.sh", up.target, path=[tmp_path])
        assert code == 0, err
        assert out.startswith("one two three one two")
        assert "ONE TWO" in out
        assert "selfdraft.v1.Inference/Generate (stream)\n" in out
        assert "grpc.health.v1.Health/Check\n" in out
        assert '"contextLength"' in out
        assert '"tokenIds"' in out
        assert "tokens/s" in err


async def test_call_streams_and_reports_errors() -> None:
    async with running(token=saying(SAYS)) as up:
        call = (sys.executable, EXAMPLES / "call.py", up.target)
        request = json.dumps({"text": "x", "samplingParams": {"maxTokens": 9}})
        code, out, err = await run(*call, "selfdraft.v1.Inference/Generate", request)
        assert code == 0, err
        assert '"finishReason": "length"' in out
        code, _, err = await run(*call, "selfdraft.v1.Inference/Tokenize", '{"text": ""}')
        assert (code, err.split(":")[0]) == (1, "INVALID_ARGUMENT")


async def run_notebook(up: Running) -> list[Any]:
    """What the last expressions of its cells give."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    names: dict[str, Any] = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("127.0.0.1:50051", up.target)
            shown.append(await run_cell(source, names))
    return shown


async def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell as a notebook does, `await` outside functions included."""
    module = ast.parse(source)
    last = module.body[-1]
    if isinstance(last, ast.Expr):
        target = ast.Name("_", ast.Store(), lineno=last.lineno, col_offset=0)
        module.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
        ast.fix_missing_locations(module)
    code = compile(module, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running_cell = eval(code, names)  # our own notebook
    if running_cell is not None:
        await running_cell
    return names.get("_")


async def test_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    async with running(token=saying(SAYS), boundaries=8) as up:
        with anyio.fail_after(30):
            info, done, seeds, cached, _ = await run_notebook(up)
        assert info[1] == up.server.door.look().scheduler.info.context_length
        assert done[0] == "length"
        assert done[1] == 48
        assert seeds == (True, 3)
        assert cached[1] > 0
        assert capsys.readouterr().out.strip()
        await up.until_idle()
