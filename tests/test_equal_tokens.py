"""The engine's tokens are transformers', whatever else is in the batch, however large the blocks, whoever is preempted.

The rule is "Equal tokens" of the design: greedy, float32; wherever the reference's two best logits differ by more than 1e-3 the
tokens are the same, and at a closer tie either is right. The reference is fed with our tokens, so that a tie ends nothing.
"""
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT

from pagedlm.compute.attention import gather_attention
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

NEW, TIE = 32, 1e-3
LICENCE = [700, 413, 256, 130, 33, 17, 5, 3, 2, 1]          # tokens of a text that never changes
RANDOM = [80, 64, 31, 16, 4, 1]                             # any ids of the vocabulary
QUESTIONS = ['What is the capital of France?', 'Write a haiku about rain.', 'Count to ten in Spanish.', 'Who are you?',
             'Explain recursion to a child, in two sentences.', 'Give me three names for a cat, and say why.',
             'Is 91 a prime number?', 'Translate to French: the engine serves many requests at once.']


class CheckedRunner(ModelRunner):
    "Compares each plan with the memory that it was made from, before it runs."
    def execute(self, plan):
        s = self.scheduler
        check_plan(plan, s.memory, {int(s.rows.seq_id[r]): r for r in s._group})
        assert plan.num_tokens <= s.max_num_batched_tokens
        return super().execute(plan)


class CapturingSampler(Sampler):
    "Keeps the logits of every call."
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []
    def sample(self, logits, rows, num_tokens):
        self.seen.append(logits.clone())
        return super().sample(logits, rows, num_tokens)


def serve(decoder, requests, num_blocks, block_size=16, swap=0, seats=24, budget=2048, preemption='recompute',
          attention=paged_attention, make_sampler=Sampler):
    "Run to completion with every check there is: sequences by request id, the full trace, the sampler."
    c = decoder.config
    kv = KVCache(c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_dim, torch.float32, num_swap_blocks=swap)
    kv.kv.fill_(torch.nan)                                  # whoever reads a slot that nobody wrote will know
    kv.swap.fill_(torch.nan)
    memory, trace = BlockManager(num_blocks, block_size, swap), Trace('full')
    runner = CheckedRunner(decoder, kv, make_sampler(seats, c.vocab_size), attention)
    runner.scheduler = Scheduler(memory, seats, budget, 1024, preemption=preemption)
    engine = Engine(runner.scheduler, runner, trace)
    seqs = {r.request_id: engine.add(r) for r in requests}
    while engine.has_unfinished:
        engine.step()
        check_pool(memory)
    assert memory.usage().free == memory.usage().total == num_blocks * block_size
    return SimpleNamespace(seqs=seqs, trace=trace, plans=trace.plans, sampler=runner.sampler, done=happened(trace))


def happened(trace):
    "What a trace says of the things that a configuration is made for."
    plans, preempts = trace.plans, Counter(e.detail for e in trace.events if e.kind == 'preempt')
    pieces = lambda p: p.num_chunks - len({*p.due_chunks.tolist()})
    back = Counter(c.seq_id for p in plans for c in p.chunks if c.start == 0)
    return SimpleNamespace(
        recompute=preempts['recompute'], swap=preempts['swap'], recomputed=sum(n > 1 for n in back.values()),
        swap_outs=sum(len(p.swap_outs) for p in plans), swap_ins=sum(len(p.swap_ins) for p in plans),
        forks=sum(len(p.forks) for p in plans), copies=sum(len(p.copies) for p in plans),
        pieces=sum(map(pieces, plans)), mixed=sum(bool(pieces(p)) and len(p.due) > 0 for p in plans),
        largest=max(p.num_chunks for p in plans), forwards=sum(p.num_chunks > 0 for p in plans))


@pytest.fixture(scope='module')
def theirs(model_path):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope='module')
def ours(model_path):
    from pagedlm.compute.weights import load
    return Decoder(*load(model_path))


@pytest.fixture(scope='module')
def prompts(model_path):
    "24 prompts of 1 to 700 tokens, most short, in an order that mixes them."
    from pagedlm.serving.detokenizer import Tokenizer
    tokenizer, rng = Tokenizer.from_folder(model_path), np.random.default_rng(0)
    licence = tokenizer.encode((ROOT/'LICENSE').read_text(encoding='utf-8'))
    out = [licence[100 * i:100 * i + n] for i, n in enumerate(LICENCE)]
    out += [rng.integers(0, 49_152, n).tolist() for n in RANDOM]
    out += [tokenizer.encode(tokenizer.chat([dict(role='user', content=q)]), add_special=False) for q in QUESTIONS]
    lengths = sorted(map(len, out))
    assert len(out) == 24 and (lengths[0], lengths[-1]) == (1, 700) and lengths[18] < 100
    return [out[i] for i in rng.permutation(24)]


class Judge:
    "Knows what transformers would have said; asks it once for each different text."
    def __init__(self, model): self.model, self.ties = model, {}

    @torch.inference_mode()
    def __call__(self, prompt, tokens):
        "Raises AssertionError where a token is not what transformers says; returns the positions of ties."
        key = tuple(prompt), tuple(tokens)
        if key not in self.ties:
            assert len(tokens) == NEW
            ids = torch.tensor([[*prompt, *tokens[:-1]]])
            logits = self.model(ids, logits_to_keep=NEW).logits[0]                       # [NEW, vocab_size]
            best, second = logits.topk(2).values.T
            short = best - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            wrong = (short > TIE).nonzero()[:, 0].tolist()
            assert not wrong, f'prompt of {len(prompt)}: new tokens {wrong} fall short of the best logit by {short[wrong].tolist()}'
            self.ties[key] = (best - second <= TIE).nonzero()[:, 0].tolist()
        return self.ties[key]

    def all(self, prompts, run, n=1):
        ties = 0
        for i, prompt in enumerate(prompts):
            seqs = run.seqs[str(i)]
            assert len(seqs) == n and all(s.finish_reason == 'length' for s in seqs)
            ties += sum(len(self(prompt, s.output_token_ids)) for s in seqs)
        print(f'{len(prompts)} prompts x {n} x {NEW} tokens equal transformers\', with {ties} ties, in {run.done.forwards} forwards')


@pytest.fixture(scope='module')
def judge(theirs): return Judge(theirs)


def greedy(prompts, n=1):
    return [Request(str(i), p, SamplingParams(temperature=0, n=n, max_tokens=NEW, ignore_eos=True)) for i, p in enumerate(prompts)]


@pytest.fixture(scope='module')
def alone(ours, prompts): return serve(ours, greedy(prompts), 50, seats=1)


def test_alone(alone, prompts, judge):
    judge.all(prompts, alone)
    assert alone.done.largest == 1 and alone.done.forwards == 24 * NEW


def test_generate(alone, prompts, theirs):
    "Word for word with the reference's own loop, up to the first tie."
    some, compared = [i for i in np.argsort([len(p) for p in prompts]).tolist()][1::8], 0
    for i in some:
        ids = torch.tensor([prompts[i]])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                              pad_token_id=0, return_dict_in_generate=True, output_logits=True)
        want, got = out.sequences[0, ids.shape[1]:].tolist(), alone.seqs[str(i)][0].output_token_ids
        assert len(want) == len(got) == NEW
        same = next((k for k in range(NEW) if want[k] != got[k]), NEW)
        if same < NEW:
            logits = out.logits[same][0]
            assert logits.max() - logits[got[same]] <= TIE, f'prompt of {len(prompts[i])}: token {same} differs and is no tie'
        compared += same
    assert len(some) == 3 and compared >= 2 * NEW
    print(f'{compared} of {3 * NEW} tokens compared with generate')


def longest_table(run): return max(c.first_block + len(c.blocks) for p in run.plans for c in p.chunks if c.blocks)


def test_batched(ours, prompts, judge):
    run = serve(ours, greedy(prompts), 250)
    judge.all(prompts, run)
    assert run.done.largest == 24 and run.done.forwards < 40 and longest_table(run) == -(-(700 + NEW - 1) // 16)
    assert not (run.done.recompute or run.done.swap or run.done.copies)


def test_blocks_of_1_and_chunked_prompts(ours, prompts, judge):
    run = serve(ours, greedy(prompts), 4000, 1, budget=80)
    judge.all(prompts, run)
    long = next(s for group in run.seqs.values() for s in group if s.prompt_len == 700).seq_id
    assert sum(c.seq_id == long for p in run.plans for c in p.chunks if c.start < 700) > 10
    assert run.done.pieces > 50 and run.done.mixed > 20                                  # prompts and decoding in one batch
    assert longest_table(run) == 700 + NEW - 1


def test_blocks_of_5_and_preemption_by_recompute(ours, prompts, judge):
    run = serve(ours, greedy(prompts), 500, 5, budget=512)
    judge.all(prompts, run)
    assert run.done.recompute >= 3 and run.done.recomputed >= 3 and not run.done.swap
    assert longest_table(run) == -(-(700 + NEW - 1) // 5)


def test_blocks_of_64_and_preemption_by_swap(ours, prompts, judge):
    run = serve(ours, greedy(prompts), 48, 64, swap=60, budget=512, preemption='swap')
    judge.all(prompts, run)
    assert run.done.swap >= 3 and run.done.swap_outs == run.done.swap_ins >= 3 and not (run.done.recompute or run.done.recomputed)
    assert longest_table(run) == -(-(700 + NEW - 1) // 64)


def test_four_samples(ours, prompts, judge):
    run = serve(ours, greedy(prompts, n=4), 800, seats=96)
    judge.all(prompts, run, n=4)
    partly_filled = sum(len(p) % 16 > 0 for p in prompts)
    assert run.done.forks == 3 * 24 and run.done.copies == 3 * partly_filled > 40        # the last holder writes in place
    assert run.done.largest == 96


@pytest.mark.parametrize('preemption', ['recompute', 'swap'])
def test_four_samples_preempted(ours, prompts, judge, preemption):
    some = [p for p in prompts if 15 < len(p) < 150][:6]
    run = serve(ours, greedy(some, n=4), 40, seats=32, budget=256, swap=200, preemption=preemption)
    judge.all(some, run, n=4)
    assert run.done.copies > 10 and getattr(run.done, preemption) >= 2
    if preemption == 'recompute': assert run.done.forks > 3 * 6 and not run.done.swap    # forked again after the prompt
    else: assert run.done.forks == 3 * 6 and run.done.swap_outs == run.done.swap_ins > 4 and not run.done.recompute


LLAMA3 = dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64,
              rope_theta=1e4)
SHAPES = {'grouped heads': {}, 'plain heads': dict(num_key_value_heads=4), 'one kv head': dict(num_key_value_heads=1),
          'tied': dict(tie_word_embeddings=True), 'biases': dict(attention_bias=True, mlp_bias=True),
          'rope linear': dict(rope_parameters=dict(rope_type='linear', rope_theta=5e3, factor=3.0)),
          'rope llama3': dict(rope_parameters=LLAMA3), 'head_dim 80': dict(head_dim=80)}


@pytest.mark.parametrize('attention', [gather_attention, paged_attention], ids=['gather', 'numba'])
@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)
def test_logits_of_random_models(shape, attention):
    """Every logit that the engine samples from, in a mixed batch with cut prompts, forks and preemptions both ways, is
    transformers' to 1e-4."""
    from transformers import LlamaConfig, LlamaForCausalLM
    base = dict(vocab_size=131, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32, max_position_embeddings=512)
    model = LlamaForCausalLM(LlamaConfig(**base | shape)).eval()
    config = ModelConfig.from_hf(model.config.to_dict())
    weights = random_weights(config, seed=1)
    missing, extra = model.load_state_dict(weights, strict=False)
    assert not extra and set(missing) <= {'lm_head.weight'}                              # absent when tied
    rng = np.random.default_rng(2)
    requests = [Request(str(i), rng.integers(0, 131, length), SamplingParams(seed=i, n=3 if i in (2, 5) else 1, max_tokens=24))
                for i, length in enumerate([1, 90, 7, 33, 12, 40])]
    decoder = Decoder(config, weights)
    for preemption in 'recompute', 'swap':
        run = serve(decoder, requests, 44, 5, 100, seats=16, budget=24, preemption=preemption, attention=attention,
                    make_sampler=CapturingSampler)
        assert getattr(run.done, preemption) and run.done.pieces > 5 and run.done.copies and run.done.forks >= 4
        worst, count = compare(model, run)
        assert worst < 1e-4 and count == 24 * 10


@torch.inference_mode()
def compare(model, run):
    "The largest difference between a logit that was sampled from and transformers', and how many rows were compared."
    full = {s.seq_id: s for group in run.seqs.values() for s in group}
    reference = {i: model(torch.from_numpy(s.token_ids[None].astype(np.int64))).logits[0] for i, s in full.items()}
    assert all(r.abs().max() > 1 for r in reference.values())
    worst = count = 0
    for plan, logits in zip([p for p in run.plans if len(p.due)], run.sampler.seen, strict=True):
        at = plan.stops[plan.due_chunks] - 1
        for row, i, position in zip(logits, plan.due.tolist(), at.tolist(), strict=True):
            worst = max(worst, (row - reference[i][position]).abs().max().item())
            count += 1
    return worst, count
