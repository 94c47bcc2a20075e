"""The user's model is never touched, and whatever the user does to it is followed."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers as tf
from families import VOCABULARY, build, reference
from tiny import (
    assert_idle,
    changes,
    draw_prompts,
    expected,
    logits_after,
    samples_of,
    shared,
    snapshot,
    tokens_of,
)
from torch import nn

import flatbed
from flatbed.errors import ModelForwardError, UnsupportedModelError
from flatbed.model.weights import checksum

PROMPTS = draw_prompts((40, 3, 17), seed=2)
NEW = 10
GREEDY = flatbed.SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def references(model: nn.Module, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    training = model.training
    model.eval()
    found = [reference(model, prompt, NEW) for prompt in prompts]
    model.train(training)
    return found


# ---- nothing is written to the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gpt_oss", "deepseek_v3"])
def test_the_model_is_as_it_was_after_every_stage(family: str) -> None:
    model = build(family).train()
    model.generation_config.temperature = 0.3
    model.register_forward_hook(lambda module, args, output: None)
    state = snapshot(model)
    engine = flatbed.Engine(model)
    assert changes(state, model) == [], "after construction"
    engine.generate(PROMPTS, GREEDY)
    assert changes(state, model) == [], "after generate"
    engine.generate(PROMPTS, flatbed.SamplingParams(max_new_tokens=3, temperature=1.0, n=2, logprobs=True))
    for _ in engine.stream(PROMPTS[:1], GREEDY):
        break
    assert changes(state, model) == [], "after a stream that was left"
    engine.release()
    engine.close()
    assert changes(state, model) == [], "after close"
    flatbed.install(model)
    model.generate_batch(PROMPTS, tf.GenerationConfig(max_new_tokens=2))
    flatbed.uninstall(model)
    assert changes(state, model) == [], "after install, a call, and uninstall"


def test_the_global_random_state_is_left_alone() -> None:
    model = shared("llama")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with flatbed.Engine(model) as engine:
        engine.generate(PROMPTS, flatbed.SamplingParams(max_new_tokens=5, temperature=1.0))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_the_model_is_as_it_was_after_its_forward_raised(error: BaseException) -> None:
    model = build("llama").train()
    calls = []

    def fail_at_the_third(module: nn.Module, args: Any) -> None:
        calls.append(module)
        if len(calls) == 3:
            raise error

    model.model.layers[1].mlp.register_forward_pre_hook(fail_at_the_third)
    with flatbed.Engine(model) as engine:
        del calls[:]
        state = snapshot(model)
        with pytest.raises(ModelForwardError if isinstance(error, Exception) else KeyboardInterrupt):
            engine.generate(PROMPTS, GREEDY)
        assert changes(state, model) == []
        assert_idle(engine)
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == references(model)


def test_the_snapshot_sees_what_it_must() -> None:
    """Each thing that an engine could do to a model shows."""

    def change(what: Callable[[Any], object]) -> list[str]:
        model = build("gpt2").train()
        state = snapshot(model)
        what(model)
        return changes(state, model)

    assert change(lambda model: None) == []
    assert change(lambda model: model.transformer.h[0].eval()) != []
    assert change(lambda model: model.set_attn_implementation("eager")) != []
    assert change(lambda model: setattr(model.config, "use_cache", False)) == ["config"]
    assert change(lambda model: setattr(model.generation_config, "top_k", 3)) == ["generation config"]
    assert change(lambda model: model.transformer.ln_f.register_forward_hook(print)) == ["module transformer.ln_f"]
    assert change(lambda model: setattr(model.transformer.wte, "extra", 1)) == ["module transformer.wte"]
    assert change(lambda model: model.transformer.wte.weight.data[0, 0].add_(1)) == ["tensor transformer.wte.weight"]
    assert change(lambda model: model.transformer.ln_f.weight.requires_grad_(False)) == [
        "tensor transformer.ln_f.weight"
    ]
    assert len(change(lambda model: model.half())) > 5


def test_a_model_in_training_mode_gives_what_it_gives_in_eval_mode() -> None:
    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=211,
            n_embd=48,
            n_layer=2,
            n_head=4,
            n_positions=128,
            initializer_range=0.3,
            resid_pdrop=0.5,
            embd_pdrop=0.5,
            attn_pdrop=0.5,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model.train()
    model.transformer.h[1].mlp.eval()
    modes = [module.training for module in model.modules()]
    with flatbed.Engine(model) as engine:
        tokens = tokens_of(engine.generate(PROMPTS, GREEDY))
        assert [module.training for module in model.modules()] == modes
        model.train()
        modes = [module.training for module in model.modules()]
        assert tokens == tokens_of(engine.generate(PROMPTS, GREEDY)) == references(model)
        assert [module.training for module in model.modules()] == modes


def test_gradients_after_generation_are_those_without_it() -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        ids = torch.tensor([PROMPTS[0]])
        model(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for family in ("llama", "gemma2", "mixtral"):
        plain, used = build(family).train(), build(family).train()
        with flatbed.Engine(used) as engine:
            engine.generate(PROMPTS, GREEDY)
            for one, other in zip(gradients(plain), gradients(used), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotary_embeddings_that_change_their_own_buffers(rope: str) -> None:
    """Up to the length where they begin to change, results are those of generate; beyond it a request is refused. The
    user's own embedding may be in its long state meanwhile."""
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
    if rope == "longrope":
        parameters |= {
            "short_factor": [1.0] * 6,
            "long_factor": [3.0] * 6,
            "original_max_position_embeddings": 64,
            "factor": 2.0,
        }
    config = tf.LlamaConfig(
        vocab_size=211,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128 if rope == "longrope" else 64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters=parameters,
    )
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(config).eval()
    wanted = references(model)
    with flatbed.Engine(model) as engine:
        state = snapshot(model)
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == wanted
        assert changes(state, model) == []
        with torch.no_grad():
            model(torch.tensor([draw_prompts((100,), seed=1)[0]]))  # the user's own run over a long text
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == wanted
        with pytest.warns(flatbed.FlatbedWarning, match="positions"):
            [output] = engine.generate(draw_prompts((60,), seed=1), GREEDY)
        assert isinstance(output.error, flatbed.errors.CapacityError)
        assert (output.error.needed, output.error.available) == (70, 64)


# ---- weights that change ---------------------------------------------------------------------------------------------


def scramble(model: nn.Module, seed: int = 9) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))


def test_an_update_in_place_is_seen_by_the_next_step() -> None:
    """Against a loop of our own over Transformers' cache, whose K/V of the old weights stay as they are."""
    model, updated_after = build("llama"), 4
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache, ids, wanted = tf.DynamicCache(), torch.tensor([PROMPTS[0]]), []
    with torch.no_grad():
        for step in range(NEW):
            ids = model(ids, **{name: cache}).logits[:, -1:].argmax(-1)
            wanted.append(int(ids))
            if step + 1 == updated_after:
                scramble(model)
    model, steps = build("llama"), []

    def update() -> None:
        steps.append(1)
        if len(steps) == updated_after:
            scramble(model)

    with flatbed.Engine(model) as engine:
        [output] = engine.generate(PROMPTS[:1], GREEDY, on_step=update)
    assert output.token_ids == wanted
    assert wanted != expected("llama", PROMPTS, NEW)[0]


@pytest.mark.parametrize("by_steps", [False, True])
def test_an_update_in_place_is_seen_by_the_next_call_in_spite_of_the_prefix_cache(by_steps: bool) -> None:
    model = build("llama")
    with flatbed.Engine(model, block_size=8) as engine:

        def run() -> list[flatbed.Output]:
            if not by_steps:
                return engine.generate(PROMPTS, GREEDY)
            outputs = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
            while engine.has_work:
                engine.step()
            return outputs

        assert tokens_of(run()) == expected("llama", PROMPTS, NEW)
        assert [output.cached_tokens for output in run()] == [39, 2, 16]
        for seed in range(3):
            scramble(model, seed)
            outputs = run()
            assert tokens_of(outputs) == references(model)
            assert [output.cached_tokens for output in outputs] == [0, 0, 0]
            assert tokens_of(run()) == references(model)


def write_one_element(model: nn.Module) -> None:
    model.lm_head.weight.data[5, 7] += 40.0


def swap_two_elements(model: nn.Module) -> None:
    weight = model.model.embed_tokens.weight.data[PROMPTS[0][3]]
    largest, smallest = int(weight.argmax()), int(weight.argmin())
    weight[[largest, smallest]] = weight[[smallest, largest]]


def swap_two_rows(model: nn.Module) -> None:
    weight = model.model.embed_tokens.weight.data
    one, other = PROMPTS[0][3], PROMPTS[0][9]
    weight[[one, other]] = weight[[other, one]]


def negate_a_pair(model: nn.Module) -> None:
    """Two elements whose signs change places."""
    weight = model.model.embed_tokens.weight.data[PROMPTS[0][3]]
    weight[weight.argmax()] *= -1
    weight[weight.argmin()] *= -1


def write_through_numpy(model: nn.Module) -> None:
    model.model.layers[0].mlp.down_proj.weight.detach().numpy()[3] *= 30.0


def replace_the_data(model: nn.Module) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0).contiguous()


@pytest.mark.parametrize(
    "write",
    [write_one_element, swap_two_elements, swap_two_rows, negate_a_pair, write_through_numpy, replace_the_data],
)
def test_the_prefix_cache_never_serves_what_data_has_written_over(write: Callable[[nn.Module], None]) -> None:
    """Such writes bypass PyTorch's version counters."""
    model = build("llama")
    versions = [parameter._version for parameter in model.parameters()]
    with flatbed.Engine(model, block_size=8) as engine:
        engine.generate(PROMPTS, GREEDY)
        before = tokens_of(engine.generate(PROMPTS, GREEDY))
        write(model)
        assert [parameter._version for parameter in model.parameters()] == versions
        wanted = references(model)
        assert wanted != before, "the write changes nothing; the test says little"
        outputs = engine.generate(PROMPTS, GREEDY)
        assert tokens_of(outputs) == wanted
        assert [output.cached_tokens for output in outputs] == [0, 0, 0]
        assert [output.cached_tokens for output in engine.generate(PROMPTS, GREEDY)] == [39, 2, 16], (
            "and then it serves"
        )


@pytest.mark.parametrize("distance", [1, 2, 4093, 4096, 8186, 8192, 2 * 4093 * 48])
@pytest.mark.parametrize("values", [(1.0, 2.0), (1.5, -1.5)])
def test_two_elements_that_change_places_are_noticed_at_any_distance(
    distance: int, values: tuple[float, float]
) -> None:
    """Distances at which sums over columns of any likely width would come out the same."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Embedding(1 + (distance + 3) // 24, 48, dtype=dtype)
        flat = layer.weight.data.view(-1)
        flat[2], flat[2 + distance] = values
        before = checksum(layer)
        assert checksum(layer) == before
        flat[2 + distance], flat[2] = values
        assert checksum(layer) != before


@pytest.mark.parametrize("apart", [1, 64, 4093, 4096])
def test_two_rows_that_change_places_are_noticed_at_any_distance(apart: int) -> None:
    layer = nn.Embedding(4200, 48)
    before = checksum(layer)
    layer.weight.data[[7, 7 + apart]] = layer.weight.data[[7 + apart, 7]]
    assert checksum(layer) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int8])
def test_any_single_changed_element_is_noticed(dtype: torch.dtype) -> None:
    for count in (1, 3, 100, 40_000, 100_001):
        module = nn.Module()
        module.register_buffer("values", (torch.arange(count) % 2).to(dtype))
        before = checksum(module)
        for at in {0, count // 2, count - 1}:
            module.values.data[at] = 1 - module.values[at].int()
            assert checksum(module) != before, (count, at)
            module.values.data[at] = 1 - module.values[at].int()
            assert checksum(module) == before


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_parameters_that_are_slices_of_one_vector(offset: int) -> None:
    """As evolution strategies and flattened optimizers make them: they begin at any element."""
    model = build("llama")
    vector = torch.cat([torch.zeros(offset), nn.utils.parameters_to_vector(model.parameters()).detach()])
    nn.utils.vector_to_parameters(vector[offset:], model.parameters())
    with flatbed.Engine(model) as engine:
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected("llama", PROMPTS, NEW)
        vector.add_(0.1 * torch.randn(vector.shape, generator=torch.Generator().manual_seed(1)))
        wanted = references(model)
        assert wanted != expected("llama", PROMPTS, NEW)
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == wanted


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=3.0, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    ],
    ids=["SGD", "AdamW", "AdamW foreach", "AdamW fused"],
)
def test_optimizer_steps_are_followed(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = build("qwen3").train()
    steps = optimizer(model.parameters())
    ids = torch.tensor([PROMPTS[0]])
    with flatbed.Engine(model, block_size=8) as engine:
        seen = [tokens_of(engine.generate(PROMPTS, GREEDY))]
        for _ in range(3):
            model(ids, labels=ids).loss.backward()
            steps.step()
            steps.zero_grad()
            outputs = engine.generate(PROMPTS, GREEDY)
            assert tokens_of(outputs) == references(model)
            assert [output.cached_tokens for output in outputs] == [0, 0, 0]
            seen.append(tokens_of(outputs))
        assert len({str(tokens) for tokens in seen}) == 4, "the steps change nothing; the test says little"
        assert model.training


def other_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in build("llama", seed=5).state_dict().items()}


REPLACEMENTS: dict[str, Callable[[Any], object]] = {
    "load_state_dict": lambda model: model.load_state_dict(other_weights(model)),
    "load_state_dict(assign=True)": lambda model: model.load_state_dict(other_weights(model), assign=True),
    "a new parameter": lambda model: setattr(
        model.lm_head, "weight", nn.Parameter(build("llama", seed=5).lm_head.weight.detach().clone())
    ),
    "a new module": lambda model: setattr(model, "lm_head", build("llama", seed=5).lm_head),
    "a new layer": lambda model: model.model.layers.__setitem__(1, build("llama", seed=5).model.layers[1]),
    "to(float64)": lambda model: model.to(torch.float64),
    "to(float64) and back": lambda model: (model.to(torch.float64), scramble(model), model.to(torch.float32)),
    "set_input_embeddings": lambda model: model.set_input_embeddings(build("llama", 5).get_input_embeddings()),
    "share the embedding": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_replaced_parameters_and_modules_are_followed(name: str) -> None:
    model = build("llama")
    with flatbed.Engine(model, block_size=8) as engine:
        engine.generate(PROMPTS, GREEDY)
        REPLACEMENTS[name](model)
        wanted = references(model)
        assert (wanted != expected("llama", PROMPTS, NEW)) == (name != "to(float64)")
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == wanted
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == wanted
        assert_idle(engine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_is_followed_with_a_cache_of_that_dtype(dtype: torch.dtype) -> None:
    model = build("llama")
    prompts = draw_prompts((150, 8, 90), seed=3)
    params = flatbed.SamplingParams(max_new_tokens=6, logprobs=True)
    with flatbed.Engine(model, capacity="1 MiB", token_budget=100) as engine:
        engine.generate(prompts, params)
        blocks = engine.memory().capacity // engine._pool.layout.block_bytes
        model.to(dtype)
        outputs = engine.generate(prompts, params)
        assert [len(tokens) for tokens in tokens_of(outputs)] == [6, 6, 6]
        assert engine._pool.dtype == dtype
        assert engine.memory().capacity <= 2**20, "the capacity in bytes still holds"
        ratio = torch.float32.itemsize / dtype.itemsize
        assert engine.memory().capacity // engine._pool.layout.block_bytes == pytest.approx(blocks * ratio, abs=2)
        for output in outputs:
            wanted = logits_after(model, output.prompt_token_ids + output.token_ids).log_softmax(-1)
            at = len(output.prompt_token_ids) - 1
            for token, logprob in zip(output.token_ids, output.logprobs, strict=True):
                assert logprob == pytest.approx(wanted[at, token].item(), abs=0.3 if dtype == torch.bfloat16 else 0.05)
                at += 1
        model.to(torch.float32)
        assert_idle(engine)
        assert tokens_of(engine.generate(prompts, params)) == [reference(model, prompt, 6) for prompt in prompts]


def test_a_resized_vocabulary_is_followed() -> None:
    model = build("llama")
    with flatbed.Engine(model) as engine:
        engine.generate(PROMPTS, GREEDY)
        model.resize_token_embeddings(300, mean_resizing=False)
        with torch.no_grad():
            model.get_input_embeddings().weight[211:] = torch.randn(89, 48, generator=torch.Generator().manual_seed(1))
        prompts = [[250, 3, 299]]
        assert tokens_of(engine.generate(prompts, GREEDY)) == references(model, prompts)
        model.resize_token_embeddings(100)
        with pytest.warns(flatbed.FlatbedWarning, match="0 to 99"):
            [output] = engine.generate([[100]], GREEDY)
        assert output.error is not None


def test_a_model_that_was_made_or_updated_under_inference_mode() -> None:
    with torch.inference_mode():
        model = build("llama")
    wanted = references(model)
    with flatbed.Engine(model) as engine:
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == wanted
        with torch.inference_mode():
            model.lm_head.weight.add_(torch.randn(211, 48, generator=torch.Generator().manual_seed(1)))
            model.model.embed_tokens.weight.mul_(1.5)
        changed = references(model)
        assert changed != wanted
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == changed


# ---- training meanwhile ----------------------------------------------------------------------------------------------


def test_a_thread_that_trains_meanwhile_breaks_nothing() -> None:
    def train(model: nn.Module, steps: int, after_each: Callable[[], object] = lambda: None) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ids = torch.tensor([PROMPTS[0]])
        for _ in range(steps):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after_each()

    alone, model = build("llama").train(), build("llama").train()
    train(alone, 30)
    failures: list[BaseException] = []
    at_least_once, done = threading.Event(), threading.Event()

    def in_thread() -> None:
        try:
            train(model, 30, at_least_once.set)
        except BaseException as error:
            failures.append(error)
        finally:
            at_least_once.set()
            done.set()

    state = snapshot(model)
    thread = threading.Thread(target=in_thread)
    with flatbed.Engine(model, block_size=8) as engine:
        thread.start()
        at_least_once.wait(60)
        calls = 0
        while not done.is_set() or calls < 2:
            outputs = engine.generate(PROMPTS, flatbed.SamplingParams(max_new_tokens=30))
            assert [len(tokens) for tokens in tokens_of(outputs)] == [30, 30, 30]
            calls += 1
        thread.join()
        assert failures == []
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == references(model)
    for (name, one), other in zip(alone.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=f"{name} was trained to other values")
    assert [name for name in changes(state, model) if not name.startswith("tensor")] == []


# ---- shapes of models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_class", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_tied_weights_stay_tied_and_change_together(model_class: str) -> None:
    settings: dict[str, Any] = {
        "vocab_size": 211,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    if model_class == "GPT2LMHeadModel":
        settings |= {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
        model = tf.GPT2LMHeadModel(tf.GPT2Config(**settings)).eval()
    else:
        settings |= {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**settings, initializer_range=0.3)).eval()
    embedding = model.get_input_embeddings().weight
    assert embedding is model.get_output_embeddings().weight
    with flatbed.Engine(model) as engine:
        shadow = engine._runner.shadow
        assert shadow.get_input_embeddings().weight is shadow.get_output_embeddings().weight is embedding
        before = tokens_of(engine.generate(PROMPTS, GREEDY))
        assert before == references(model)
        with torch.no_grad():
            embedding.add_(0.3 * torch.randn(embedding.shape))
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == references(model) != before
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_shadow_shares_every_parameter_and_buffer() -> None:
    for family in ("llama", "gemma3", "mixtral", "gpt2"):
        model = build(family)
        with flatbed.Engine(model) as engine:
            ours = {id(tensor) for tensor in [*engine._runner.shadow.parameters(), *engine._runner.shadow.buffers()]}
            theirs = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
            assert ours == theirs, family
            assert not {id(m) for m in engine._runner.shadow.modules()} & {id(m) for m in model.modules()}


@pytest.mark.parametrize("place", ["model.layers.0.mlp", "model.layers.1.self_attn.o_proj", "model.norm", "lm_head"])
def test_users_hooks_remain_and_take_part(place: str) -> None:
    """A forward hook that changes an output (steering, say) changes what is made, as it does in generate: also one that
    comes or goes while there is an engine, and in whatever part."""
    model = build("llama")
    module = model.get_submodule(place)

    def steer(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        size = output.shape[-1]
        return (
            output + 3 * torch.linspace(-1, 1, size)[torch.randperm(size, generator=torch.Generator().manual_seed(0))]
        )

    plain = references(model)
    with flatbed.Engine(model) as engine:
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain
        handle = module.register_forward_hook(steer)
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == references(model) != plain
        handle.remove()
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == references(model) == plain
        handle = module.register_forward_pre_hook(lambda module, args: (-args[0],))
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == references(model)
        with flatbed.Engine(model) as later:
            assert tokens_of(later.generate(PROMPTS, GREEDY)) == references(model)


def test_users_hooks_see_the_steps_of_the_engine_and_nothing_else() -> None:
    """Not the run over one token that looks at the model when an engine is built or follows a change."""
    model, seen = build("llama"), []
    handles = [
        module.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape[:2])))
        for module in (model.lm_head, model.model.embed_tokens)
    ]
    with flatbed.Engine(model, token_budget=30) as engine:
        assert seen == []
        engine.generate(PROMPTS, GREEDY)
        assert len(seen) == 2 * engine.stats().steps
        assert sum(tokens for _, tokens in seen[::2]) == 60 + 3 * (NEW - 1)
        del seen[:]
        handles.pop().remove()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        steps = engine.stats().steps
        engine.generate(PROMPTS, GREEDY)
        assert len(seen) == engine.stats().steps - steps


def test_a_forward_that_the_user_put_into_a_module_is_followed() -> None:
    model = build("llama")
    plain = references(model)
    with flatbed.Engine(model) as engine:
        engine.generate(PROMPTS, GREEDY)
        mlp = model.model.layers[0].mlp
        own = mlp.forward
        mlp.forward = lambda x: -own(x)
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == references(model) != plain
        del mlp.forward
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == references(model) == plain


def test_two_engines_over_one_model_do_not_disturb_each_other() -> None:
    model = build("llama")
    with flatbed.Engine(model, block_size=4) as one, flatbed.Engine(model, token_budget=5) as other:
        first = [one.submit(prompt, GREEDY) for prompt in PROMPTS]
        second = [other.submit(prompt, GREEDY) for prompt in PROMPTS]
        while one.has_work or other.has_work:
            one.step()
            other.step()
        assert tokens_of(first) == tokens_of(second) == references(model)


def test_a_model_wrapped_by_torch_compile_runs_as_what_is_inside() -> None:
    model = build("llama")
    compiled = torch.compile(model)
    state = snapshot(model)
    with flatbed.Engine(compiled) as engine:
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected("llama", PROMPTS, NEW)
        scramble(model)
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == references(model)
    assert [name for name in changes(state, model) if not name.startswith("tensor")] == []


@pytest.mark.parametrize("how", ["model", "layer", "forward"])
def test_what_was_compiled_in_place_runs_as_it_was_written(how: str) -> None:
    model = build("llama")
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    if how == "forward":
        model.forward = torch.compile(model.forward, backend=backend)
    else:
        (model if how == "model" else model.model.layers[1]).compile(backend=backend)
    before = dict(vars(model))
    with flatbed.Engine(model) as engine:
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected("llama", PROMPTS, NEW)
    assert calls == []
    assert vars(model) == before


def test_a_closed_engine_lets_go_of_the_model() -> None:
    model = build("llama")
    engine = flatbed.Engine(model)
    engine.generate(PROMPTS[:1], GREEDY)
    engine.close()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert engine.stats().finished == 1


def test_a_deep_copy_of_an_installed_model_is_a_model_of_its_own() -> None:
    model = flatbed.install(build("llama"))
    model.generate_batch(PROMPTS[:1], tf.GenerationConfig(max_new_tokens=2))
    copied = copy.deepcopy(model)
    assert copied.generate_batch.__func__ is type(copied).generate_batch
    assert copied.generate_batch.__self__ is copied
    scramble(copied)
    assert references(copied) != references(model) == expected("llama", PROMPTS, NEW)
    results = model.generate_batch(PROMPTS, tf.GenerationConfig(max_new_tokens=NEW))
    assert [result.generated_tokens for result in results.values()] == references(model)
    flatbed.install(copied)
    results = copied.generate_batch(PROMPTS, tf.GenerationConfig(max_new_tokens=NEW))
    assert [result.generated_tokens for result in results.values()] == references(copied)
    flatbed.uninstall(copied)
    flatbed.uninstall(model)


def test_saving_and_loading_an_installed_model(tmp_path: Any) -> None:
    model = flatbed.install(build("llama"))
    model.save_pretrained(tmp_path)
    loaded = tf.LlamaForCausalLM.from_pretrained(tmp_path)
    assert references(loaded) == expected("llama", PROMPTS, NEW)
    assert set(model.state_dict()) == set(build("llama").state_dict())
    flatbed.uninstall(model)


def test_samples_are_those_of_a_fresh_engine_after_all_kinds_of_changes() -> None:
    model = build("llama")
    params = flatbed.SamplingParams(max_new_tokens=8, temperature=1.5, n=2, seed=4)
    with flatbed.Engine(model) as engine:
        for change in REPLACEMENTS.values():
            change(model)
            ours = samples_of(engine.generate(PROMPTS, params))
            with flatbed.Engine(model) as fresh:
                assert ours == samples_of(fresh.generate(PROMPTS, params))
        assert_idle(engine)


def test_a_window_that_only_the_models_own_mask_knows_of_limits_the_length() -> None:
    """PhiMoE tells its attention nothing of its sliding window. Up to its length there is nothing to mask."""
    torch.manual_seed(0)
    model = tf.PhimoeForCausalLM(
        tf.PhimoeConfig(
            vocab_size=211,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            sliding_window=24,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    prompts = draw_prompts((14, 3), seed=3)
    with flatbed.Engine(model) as engine:
        assert tokens_of(engine.generate(prompts, GREEDY)) == references(model, prompts)
        with pytest.warns(flatbed.FlatbedWarning, match="24 positions"):
            [output] = engine.generate(draw_prompts((15,)), GREEDY)
        assert isinstance(output.error, flatbed.errors.CapacityError)


# ---- models that cannot be run ---------------------------------------------------------------------------------------

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
BERT = {**SMALL, "num_attention_heads": 2, "intermediate_size": 16}


def offloaded() -> nn.Module:
    return accelerate.cpu_offload(build("llama"), execution_device=torch.device("cpu"))


def dispatched() -> nn.Module:
    return accelerate.dispatch_model(build("llama"), {"": "cpu"}, force_hooks=True, main_device="cpu")


def partly_offloaded() -> nn.Module:
    model = build("llama")
    accelerate.cpu_offload(model.model.layers[1], execution_device=torch.device("cpu"))
    return model


def quantised_dynamically() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would like it to be done elsewhere
        return torch.ao.quantization.quantize_dynamic(build("llama"), {nn.Linear}, dtype=torch.qint8)


def not_loaded() -> nn.Module:
    with torch.device("meta"):
        return build("llama")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "BloomForCausalLM": (
        lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)),
        "attention interface",
    ),
    "FalconForCausalLM": (
        lambda: tf.FalconForCausalLM(tf.FalconConfig(**SMALL, num_attention_heads=2)),
        "attention interface",
    ),
    "MambaForCausalLM": (lambda: tf.MambaForCausalLM(tf.MambaConfig(**SMALL, state_size=4)), "recurrent state"),
    "Mamba2ForCausalLM": (
        lambda: tf.Mamba2ForCausalLM(tf.Mamba2Config(**SMALL, state_size=4, num_heads=4, head_dim=8, n_groups=1)),
        "recurrent state",
    ),
    "T5ForConditionalGeneration": (
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, decoder_start_token_id=0)
        ),
        "encoder-decoder",
    ),
    "BertModel": (lambda: tf.BertModel(tf.BertConfig(**BERT)), "can generate"),
    "BertForMaskedLM": (lambda: tf.BertForMaskedLM(tf.BertConfig(**BERT)), "can generate"),
    "BertLMHeadModel": (lambda: tf.BertLMHeadModel(tf.BertConfig(**BERT)), "does not attend causally"),
    "LlamaModel": (lambda: build("llama").model, "can generate"),
    "LlamaForSequenceClassification": (
        lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**BERT)),
        "can generate",
    ),
    "Lfm2ForCausalLM": (
        lambda: tf.Lfm2ForCausalLM(
            tf.Lfm2Config(**BERT, num_key_value_heads=1, layer_types=["conv", "full_attention"])
        ),
        r"recurrent state \(layers of kind conv\)",
    ),
    "Linear": (lambda: nn.Linear(3, 3), "can generate"),
    "XmodForCausalLM": (
        lambda: tf.XmodForCausalLM(tf.XmodConfig(**BERT, is_decoder=True)),
        "its forward raised ValueError for a single token: Input language unknown",
    ),
    "LlamaForCausalLM (offloaded)": (offloaded, "not loaded|meta|accelerate"),
    "LlamaForCausalLM (partly offloaded)": (partly_offloaded, "several devices|accelerate"),
    "LlamaForCausalLM (dispatched)": (dispatched, "accelerate"),
    "LlamaForCausalLM (quantised dynamically)": (quantised_dynamically, "scale the activations of all tokens"),
    "LlamaForCausalLM (meta)": (not_loaded, "meta device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_run_is_refused_at_construction_by_name_and_reason(name: str) -> None:
    make, reason = REFUSED[name]
    model = make()
    for build_one in (flatbed.Engine, flatbed.install):
        with pytest.raises(UnsupportedModelError, match=reason) as raised:
            build_one(model)
        assert name.split()[0] in str(raised.value)
        assert "generate_batch" not in vars(model)


def test_installing_over_a_refusal_leaves_no_trace() -> None:
    model = tf.BloomForCausalLM(tf.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2))
    state = snapshot(model)
    with pytest.raises(UnsupportedModelError):
        flatbed.install(model)
    assert changes(state, model) == []


def test_weights_that_change_in_the_middle_of_a_call_are_not_served_from_the_prefix_cache() -> None:
    model = build("llama")
    draw = random.Random(9)
    stem = [draw.randrange(VOCABULARY) for _ in range(40)]
    prompts = [[*stem, 1], [*stem, 2]]
    params = flatbed.SamplingParams(max_new_tokens=8, ignore_eos=True)

    def train(output: flatbed.Output) -> None:
        if output.request_id == "first":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.2)

    before = reference(model, prompts[0], 8)
    with flatbed.Engine(model, max_requests=1, block_size=4) as engine:
        first, second = engine.generate(prompts, params, request_ids=["first", "second"], on_output=train)
    assert first.token_ids == before
    assert second.cached_tokens == 0
    assert second.token_ids == reference(model, prompts[1], 8)
