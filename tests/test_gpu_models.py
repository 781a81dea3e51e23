"""Every part that a model may have, and everything that shares, on a GPU where there is one: the texts are the CPU's. Without a GPU the same
runs through the padded steps that a graph would record, and through gather_attention."""
import numpy as np
import pytest
import torch

from pagedlm.compute.attention import gather_attention
from pagedlm.compute.cuda_graphs import GraphRunner
from pagedlm.compute.kv_cache import KVCache
from pagedlm.compute.model import Decoder, ModelConfig, random_weights
from pagedlm.compute.runner import ModelRunner
from pagedlm.compute.sampler import Sampler
from pagedlm.core import Request, SamplingParams
from pagedlm.memory.block_manager import BlockManager, check_pool
from pagedlm.scheduling.engine import Engine
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
SHAPE = dict(vocab_size=89, hidden_size=96, intermediate_size=96, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=32, max_position_embeddings=256)
OLDER = dict(norm='layer', rope=None, qkv_bias=True, out_bias=True, mlp_bias=True, gated=False)
KINDS = {'llama': {}, 'window': dict(layer_windows=(12, 12)), 'one window': dict(layer_windows=(None, 12)), 'qk norm': dict(qk_norm=True),
         'biases': dict(qkv_bias=True), 'gpt2': OLDER | dict(activation='gelu_new', num_kv_heads=3), 'opt': OLDER | dict(activation='relu', num_kv_heads=3)}


def serve(config, device, make_runner, blocks, swap=0):
    "Texts of greedy prompts, samples, beams and scored prompts that begin alike, and the kinds of events that were met."
    torch.backends.cuda.matmul.allow_tf32 = False
    weights = {n: w.to(device) for n, w in random_weights(config).items()}
    kv = KVCache(config.num_layers, blocks, 4, config.num_kv_heads, config.head_dim, torch.float32, device, swap)
    kv.kv.fill_(torch.nan)
    attention = gather_attention
    if device == 'cuda' and len({*config.layer_windows}) < 2:        # windows in only some layers are for torch's backend
        from pagedlm.compute.triton_attention import TritonAttention
        attention = TritonAttention(config.num_heads, config.num_kv_heads, config.head_dim, torch.float32, device, config.sliding_window)
    elif device == 'cuda': make_runner = ModelRunner
    runner = make_runner(Decoder(config, weights), kv, Sampler(64, config.vocab_size, device), attention)
    memory, trace, rng = BlockManager(blocks, 4, swap, True), Trace('full'), np.random.default_rng(0)
    engine = Engine(Scheduler(memory, 16, 40, 200, preemption='swap' if swap else 'recompute', watermark=0, window=config.sliding_window), runner, trace)
    start, groups, logprobs = rng.integers(0, 89, 30).tolist(), [], {}
    kinds = [dict(temperature=0), dict(n=3, seed=1), dict(beam_width=4, n=4, temperature=0), dict(prompt_logprobs=0, temperature=0)]
    for i in range(12):
        prompt, params = start[:rng.integers(31)] + rng.integers(0, 89, rng.integers(1, 9)).tolist(), kinds[i % 4]
        groups.append(engine.add(Request(str(i), prompt, SamplingParams(max_tokens=12, ignore_eos=True, **params))))
    while engine.has_unfinished:
        for p in engine.step().prompt_logprobs: logprobs |= {(p.seq_id, p.start + i): float(x) for i, x in enumerate(p.logprobs)}
        check_pool(memory)
    return [[s.output_token_ids for s in g] for g in groups], logprobs, {e.kind for e in trace.events}


@pytest.mark.parametrize('kind', KINDS)
def test_the_texts_of_the_cpu(kind):
    config = ModelConfig(**SHAPE | KINDS[kind])
    plain, logprobs, _ = serve(config, 'cpu', ModelRunner, 300)
    for make_runner, blocks, swap in ((ModelRunner, 300, 0), (GraphRunner, 300, 0), (GraphRunner, 40, 0), (GraphRunner, 40, 100)):
        texts, got, met = serve(config, DEVICE, make_runner, blocks, swap)
        assert texts == plain, (kind, make_runner, blocks, swap)
        assert got.keys() == logprobs.keys() and np.allclose([got[k] for k in logprobs], list(logprobs.values()), atol=1e-4)
        assert {'hit', 'preempt'} <= met if blocks < 100 else 'hit' in met
