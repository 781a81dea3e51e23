"Everything that shares, on a small real model: prefix hits, samples, beams, priorities, scoring, a window, preemption and swap, against each request alone."
import random
from collections import Counter

import numpy as np
import pytest
import torch

from pagedlm.compute.cpu_attention import paged_attention
from pagedlm.compute.kv_cache import KVCache
from pagedlm.compute.model import Decoder, ModelConfig, random_weights
from pagedlm.compute.runner import ModelRunner
from pagedlm.compute.sampler import Sampler
from pagedlm.core import Request, SamplingParams
from pagedlm.memory.block_manager import BlockManager, check_plan, check_pool
from pagedlm.scheduling.engine import Engine
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace

seen = Counter()
SHAPE = dict(vocab_size=89, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, max_position_embeddings=256)


class CheckedRunner(ModelRunner):
    def execute(self, plan):
        s = self.scheduler
        check_plan(plan, s.memory, {int(s.rows.seq_id[r]): r for r in s._group})
        return super().execute(plan)


@pytest.fixture(scope='module', params=[None, 12])
def model(request):
    config = ModelConfig(**SHAPE, layer_windows=(request.param,) * 2 if request.param else ())
    return Decoder(config, random_weights(config))


def make(model, blocks, size=4, seats=8, budget=64, swap=0, cached=False, preemption='recompute'):
    c = model.config
    kv = KVCache(c.num_layers, blocks, size, c.num_kv_heads, c.head_dim, torch.float32, num_swap_blocks=swap)
    kv.kv.fill_(torch.nan)
    runner = CheckedRunner(model, kv, Sampler(64, c.vocab_size), paged_attention)
    runner.scheduler = Scheduler(BlockManager(blocks, size, swap, cached), seats, budget, 200, preemption=preemption, watermark=0, window=c.sliding_window)
    return Engine(runner.scheduler, runner, Trace('full'))


def told(seqs, outputs):
    "Of one request: what each sequence got, and the log probabilities of its prompt."
    tokens = [(s.output_token_ids, None if s.score is None else round(s.score, 3)) for s in seqs]
    return tokens, {p.start + i: float(x) for o in outputs for p in o.prompt_logprobs if p.seq_id == seqs[0].seq_id for i, x in enumerate(p.logprobs)}


@pytest.mark.parametrize('seed', range(5))
def test_the_same_as_alone(model, seed):
    rng = random.Random(seed)
    size, everyone, outputs, done = rng.choice([1, 4, 16]), [], [], 0
    starts = [[rng.randrange(89) for _ in range(30)] for _ in range(2)]
    engine = make(model, 160 // size + 4, size, 6, rng.choice([16, 50]), rng.choice([0, 60]), True, rng.choice(['auto', 'recompute', 'swap']))
    for i in range(14):
        prompt = rng.choice(starts)[:rng.randrange(30)] + [rng.randrange(89) for _ in range(rng.randrange(1, 8))]
        kind = rng.choice(['greedy', 'samples', 'beams', 'scored'])
        params = dict(greedy=dict(temperature=0), samples=dict(n=3, seed=i), beams=dict(beam_width=3, n=3, temperature=0),
                      scored=dict(prompt_logprobs=0, prompt_logprobs_from=rng.randrange(1, len(prompt) + 1)))[kind]
        request = Request(f'{i}', prompt, SamplingParams(max_tokens=0 if kind == 'scored' else rng.randrange(1, 30), **params), priority=rng.choice([0, 0, 2]))
        everyone.append(engine.add(request))
        for _ in range(rng.randrange(3)): outputs.append(engine.step())
    while engine.has_unfinished:
        outputs.append(engine.step())
        check_pool(engine.scheduler.memory)
    seen.update(e.kind for e in engine.trace.events)
    for seqs in everyone:
        alone, mine = make(model, 500, 4), []
        again = alone.add(seqs[0].request)
        while alone.has_unfinished: mine.append(alone.step())
        if seqs[0].finish_reason == 'memory': continue
        (got, logprobs), (want, plain) = told(seqs, outputs), told(again, mine)
        done += 1
        if seqs[0].request.params.beam_width: assert [t for t, _ in got] == [t for t, _ in want]
        else: assert got == want
        assert logprobs.keys() == plain.keys() and np.allclose(list(logprobs.values()), [plain[k] for k in logprobs], atol=1e-4)
    assert done > 8


def test_zz_it_met_what_it_was_built_for():
    assert min(seen[kind] for kind in ('hit', 'preempt', 'resume', 'release')) > 5, seen
