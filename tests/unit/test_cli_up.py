"""Options of `slipstream up`: what is refused, and what reaches which process."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from gateway.settings import GatewaySettings
from services.draft.settings import DraftSettings
from services.target.settings import TargetSettings
from slipstream.cli import up, up_settings
from slipstream.cli.launcher import CellCommands
from slipstream.cli.up_devices import place
from slipstream.cli.up_settings import UpSettings, check, free_port
from slipstream.errors import ConfigError
from slipstream.hardware import cores
from slipstream.settings import parse


def settings(*argv: str) -> UpSettings:
    return check(parse(UpSettings, ["--port=0", "--grpc-port=0", *argv]))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--target=/nowhere"], "--target: '/nowhere' is no folder"),
        (["--draft=medusa"], "--draft: 'medusa' is no folder"),
        (["--draft=a/b/c"], "--draft: 'a/b/c' is no folder"),
        (["--port=x"], "--port: .*got 'x'"),
        (["--port=70000"], "--port: .*got '70000'"),
        (["--width=0"], "--width: .*got '0'"),
        (["--budget=300"], "--budget: .*got '300'"),
        (["--tree=bushy"], "--tree: .*got 'bushy'"),
        (["--device=tpu"], "--device: .*got 'tpu'"),
        (["--dtype=int8"], "--dtype: .*got 'int8'"),
        (["--memory-share=1"], "--memory-share: .*got '1'"),
        (["--memory-share=.5", "--device=cpu"], "--memory-share: 0.5 needs a GPU"),
        (["--draft-memory-share=.5", "--draft-device=cpu"], "--draft-memory-share: 0.5 needs"),
        (["--pipeline-depth=2"], "--pipeline-depth: .*got '2'"),
        (["--handoff=cuda_ipc", "--device=cpu"], "--handoff: cuda_ipc needs .* cpu"),
        (["--handoff=cuda_ipc", "--draft-device=cpu"], "--handoff: cuda_ipc needs .* cpu"),
        (["--handoff=cuda_ipc", "--draft=none"], "--handoff: cuda_ipc .* --draft is none"),
        (["--handoff=nccl"], "--handoff: .*got 'nccl'"),
        (["--mps=on"], "--mps: .*got 'on'"),
        (["--draft=none", "--width=2"], "--draft: none draws no tree"),
        (["--speculative-config={"], "--speculative-config: .* is not JSON"),
        (["--speculative-config=[1]"], "--speculative-config: .* must be a JSON object, got .1"),
        (['--speculative-config={"deep": 1}'], "--speculative-config: .* no key 'deep'"),
        (['--speculative-config={"width": "4"}'], "--speculative-config: .*width .*'4'"),
        (["--tree=chain", "--width=3"], "--width: 3: a --tree chain has width 1"),
        (["--target="], "--target: '' "),
        (["--tool-parser=xml"], "--tool-parser: .*got 'xml'"),
        (["--reasoning-parser=loud"], "--reasoning-parser: .*got 'loud'"),
        (["--generation-config=on"], "--generation-config: .*got 'on'"),
        (["--chat-template-kwargs=[1]"], r"--chat-template-kwargs: '\[1\]' is not a JSON object"),
        (["--chat-template-kwargs={"], "--chat-template-kwargs: '{' is not a JSON object"),
        (["--max-output-tokens=-1"], "--max-output-tokens: .*got '-1'"),
        (["--speculative-config={}", "--width=2"], "--width: say it in --speculative-config"),
        (["--host=no.such.host.invalid", "--port=1"], "--host: 'no.such.host.invalid'"),
    ],
)
def test_bad_options_are_named(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(*argv)


def test_folders_are_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--target: .* holds no config\.json"):
        settings(f"--target={tmp_path}")
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ConfigError, match="--target: .* is a file, not a model folder"):
        settings(f"--target={file}")


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_taken_port_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert up.main(["--port=0", "--grpc-port=0", f"{flag}={port}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {flag}: cannot listen on 127.0.0.1:{port}: ")
    assert said.count("\n") == 1


def test_two_servers_cannot_share_a_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match=f"--grpc-port: {port} is the --port already"):
        settings(f"--port={port}", f"--grpc-port={port}")


def test_a_free_port_is_none_that_the_kernel_hands_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "range"
    monkeypatch.setattr(up_settings, "HANDED_OUT", said)
    said.write_text("32768\t60999\n")
    assert all(free_port() in up_settings.LOW_PORTS for _ in range(20))
    port = free_port()
    monkeypatch.setattr(up_settings.random, "sample", lambda _, count: [port] * count)
    assert free_port() == port
    assert free_port(port) != port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        assert free_port() != port
    for text in ("1024\t65535\n", "", "none"):
        said.write_text(text)
        assert free_port() not in (0, port)
    said.unlink()
    assert free_port() not in (0, port)


def test_the_draft_follows_the_target(model: Path) -> None:
    assert settings().draft == "jetspec"
    assert settings("--draft=dflash").draft == "dflash"
    assert settings(f"--target={model}").draft == "none"
    assert settings(f"--target={model}", "--draft=owner/head").draft == "owner/head"


def test_the_names_of_the_model(model: Path) -> None:
    named = settings("--served-model-name=mine,yours", "--served-model-name", "theirs")
    cell = commands(named, model)
    assert flags(cell.target)["--served-name"] == "mine"
    assert flags(cell.gateway)["--served-model-name"] == "mine,yours,theirs"
    with pytest.raises(ConfigError, match="--served-model-name: .*different names"):
        settings("--served-model-name=a,a")


def test_threads_default_to_every_core() -> None:
    assert settings().threads == cores() >= 1
    assert settings("--threads=3").threads == 3


def test_every_option_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_UP_MAX_MODEL_LEN", "512")
    monkeypatch.setenv("SLIPSTREAM_UP_DRAFT", "dflash")
    assert (settings().max_model_len, settings().draft) == (512, "dflash")
    assert settings("--draft=jetspec").draft == "jetspec"


def commands(given: UpSettings, model: Path, draft: str = "jetspec") -> CellCommands:
    return up.commands(given, up.PROGRAMS, str(model), draft, place(given, ()))


def flags(argv: tuple[str, ...] | list[str]) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in argv[4:])


def test_who_gets_what(model: Path) -> None:
    given = settings(
        "--width=4", "--tree=top2gap", "--dtype=float32", "--pipeline-depth=0", "--slots=3",
        "--device=cpu", "--target-device=cuda:1", "--max-model-len=99", "--threads=2",
    )  # fmt: skip
    cell = commands(given, model)
    assert cell.draft is not None
    target, draft, gateway = flags(cell.target), flags(cell.draft), flags(cell.gateway)
    shared = {"--model": str(model), "--draft": "jetspec", "--host": "127.0.0.1"}
    shared |= {"--dtype": "float32", "--slots": "3", "--threads": "2", "--log-level": "info"}
    assert target == shared | {
        "--port": target["--port"],
        "--device": "cuda:1",
        "--max-model-len": "99",
        "--handoff": "auto",
        "--served-name": "smollm2-135m-instruct",
        "--drain-s": "5.0",
    }
    assert draft == shared | {
        "--port": draft["--port"],
        "--device": "cpu",
        "--tree": "top2gap",
        "--width": "4",
    }
    assert gateway == {
        "--target": f"127.0.0.1:{target['--port']}",
        "--draft": f"127.0.0.1:{draft['--port']}",
        "--tokenizer": str(model),
        "--host": "127.0.0.1",
        "--port": "0",
        "--grpc-port": "0",
        "--served-model-name": "smollm2-135m-instruct",
        "--pipeline-depth": "0",
        "--pin-nodes": "",
        "--drain-s": "5.0",
        "--log-level": "info",
    }


def test_a_draft_that_maps_nothing_is_told(model: Path) -> None:
    for handoff, told in (("auto", None), ("grpc", "grpc")):
        cell = commands(settings(f"--handoff={handoff}"), model)
        assert cell.draft is not None and flags(cell.draft).get("--handoff") == told
        assert flags(cell.target)["--handoff"] == handoff


def test_the_processes_know_their_flags(model: Path) -> None:
    tree = ["--tree=top2gap", "--width=4", "--budget=32"]
    other = ["--speculative-config={}", "--pipeline-depth=0", "--ping-pong=off", "--slots=2"]
    for chosen in ([], tree, [*other, "--max-model-len=64", "--dtype=auto", "--device=cpu"]):
        cell = commands(settings(*chosen), model)
        assert cell.draft is not None
        parse(TargetSettings, cell.target[4:])
        parse(DraftSettings, cell.draft[4:])
        gateway = parse(GatewaySettings, cell.gateway[4:])
        assert gateway.scheduler().pin_nodes == bool(chosen)


def test_what_is_said_of_chats_and_answers_reaches_the_gateway(model: Path) -> None:
    given = settings(
        "--tool-parser=hermes", "--reasoning-parser=think", "--generation-config=off",
        '--chat-template-kwargs={"enable_thinking": false}', "--max-output-tokens=64",
    )  # fmt: skip
    cell = commands(given, model)
    gateway = parse(GatewaySettings, cell.gateway[4:])
    assert (gateway.tool_parser, gateway.reasoning_parser) == ("hermes", "think")
    assert gateway.chat_template_kwargs == {"enable_thinking": False}
    assert (gateway.generation_config, gateway.max_output_tokens) == ("off", 64)
    assert "--tool-parser" not in flags(commands(settings(), model).gateway)
    for name in ("tool_parser", "reasoning_parser", "generation_config"):
        (known, _) = get_args(UpSettings.model_fields[name].annotation)
        assert known == GatewaySettings.model_fields[name].annotation


def test_without_a_draft_there_are_two_processes(model: Path) -> None:
    given = settings(f"--target={model}")
    cell = commands(given, model, "none")
    assert [name for name, _ in cell.items()] == ["target", "gateway"]
    assert flags(cell.target)["--draft"] == "none" == flags(cell.gateway)["--draft"]
    assert flags(cell.gateway)["--served-model-name"] == model.name
    assert "--pin-nodes" not in flags(cell.gateway)


def fake_programs(prepare: str) -> up.Programs:
    python = (sys.executable, "-S", "-c")
    ready = (*python, 'import time; print(\'READY {"grpc": "g", "http": "h"}\', flush=True)')
    return up.Programs(ready, ready, ready, prepare=(*python, prepare))


def test_a_model_that_cannot_be_prepared_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    programs = fake_programs("raise SystemExit('error: no such model')")
    assert up.main(["--target=owner/name", "--port=0", "--grpc-port=0"], programs) == 1
    said = capsys.readouterr().err.splitlines()
    assert "up      | no draft: name one that was made for owner/name with --draft" in said
    assert said[-1] == "error: owner/name cannot be prepared: no such model"


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys; from slipstream.cli import main, up, bench, chat, demo; "
        "main.main(['version']); "
        "bad = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("slipstream ")
