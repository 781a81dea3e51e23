"The ablation of 60_ablation on a small random model and in simulated time: neither fix stands in for the other, and nobody's tokens change."
import numpy as np
import pytest
import torch

from pagedlm.compute.attention import AttnMeta
from pagedlm.compute.cpu_attention import paged_attention
from pagedlm.compute.kv_cache import KVCache
from pagedlm.compute.model import Decoder, ModelConfig, random_weights
from pagedlm.compute.runner import ModelRunner
from pagedlm.compute.sampler import Sampler
from pagedlm.core import DeadlockError, Request
from pagedlm.memory.block_manager import BlockManager
from pagedlm.memory.contiguous import ContiguousMemory
from pagedlm.scheduling.cost_model import Linear
from pagedlm.scheduling.engine import Engine, ScriptedExecutor
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.scheduling.simulator import System, simulate
from pagedlm.scheduling.workloads import Workload

MAX_LEN, SEATS, BLOCKS, SIZE, VOCAB = 160, 12, 40, 16, 89
FOUR = {(policy, memory): memory for policy in ('static', 'continuous') for memory in ('contiguous', 'paged')}
COST = Linear(15e-3, .6e-3, .6e-3, 2e-6)


def spread(n, seed, most=120):
    "Requests, all at once; short answers are many, long ones few."
    rng = np.random.default_rng(seed)
    answers = np.rint(np.exp(rng.uniform(np.log(4), np.log(most), n))).astype(int)
    return Workload('spread', np.zeros(n), [rng.integers(0, VOCAB, k).tolist() for k in rng.integers(8, 40, n, endpoint=True)], answers)


@pytest.fixture(scope='module')
def model():
    shape = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)
    config = ModelConfig(**shape, max_position_embeddings=256)
    return Decoder(config, random_weights(config))


@pytest.mark.parametrize('seed', range(5))
def test_neither_fix_stands_in_for_the_other(seed):
    run = lambda policy, memory: simulate(System(policy, memory, 'max', 'first_fit', SEATS, 256), spread(48, seed), COST, BLOCKS, max_model_len=MAX_LEN)
    runs = {pair: run(*pair) for pair in FOUR}
    rate = {pair: r['output_tokens_per_s'] for pair, r in runs.items()}
    neither, either, both = rate['static', 'contiguous'], (rate['continuous', 'contiguous'], rate['static', 'paged']), rate['continuous', 'paged']
    assert min(either) > 1.25 * neither and both > 1.25 * max(either), rate
    assert both == max(rate.values()) and all(r['requests'] == 48 for r in runs.values())
    latency = {pair: r['mean_normalized_latency'] for pair, r in runs.items()}
    assert max(latency, key=latency.get) == ('static', 'contiguous') and min(latency, key=latency.get) == ('continuous', 'paged')


def engine(policy, memory, execute):
    m = BlockManager(BLOCKS, SIZE, 0, False) if memory == 'paged' else ContiguousMemory(BLOCKS, SIZE, MAX_LEN)
    return Engine(Scheduler(m, SEATS, 256, MAX_LEN, policy), execute())


def serve(engine, w):
    found = engine.run([Request(str(i), w.prompts[i], w.params(i)) for i in range(len(w))])
    assert engine.scheduler.memory.num_free_blocks == BLOCKS
    return [seq.output_token_ids for [seq] in found.values()], engine.scheduler


def test_the_same_tokens_in_fewer_iterations_from_a_script():
    runs = {pair: serve(engine(*pair, lambda: ScriptedExecutor(num_blocks=BLOCKS, block_size=SIZE)), spread(24, 0)) for pair in FOUR}
    tokens, took = {p: t for p, (t, _) in runs.items()}, {p: s.iteration for p, (_, s) in runs.items()}
    assert all(t == tokens['static', 'contiguous'] for t in tokens.values())
    assert took['static', 'contiguous'] > 1.5 * max(took['continuous', 'contiguous'], took['static', 'paged'])
    assert min(took['continuous', 'contiguous'], took['static', 'paged']) > 1.5 * took['continuous', 'paged']
    assert runs['continuous', 'paged'][1].num_preemptions > 0                                  # the pool was small enough


def test_the_same_tokens_from_a_model(model):
    c = model.config
    def runner():
        kv = KVCache(c.num_layers, BLOCKS, SIZE, c.num_kv_heads, c.head_dim, torch.float32)
        kv.kv.fill_(torch.nan)
        return ModelRunner(model, kv, Sampler(SEATS, VOCAB), paged_attention)
    pairs = [*FOUR, ('orca', 'paged')]
    tokens = [serve(engine(*pair, runner), spread(16, 3, 48))[0] for pair in pairs]
    assert all(t == tokens[0] for t in tokens)


def test_a_deadlock_costs_only_who_is_aborted(model):
    w = Workload('alike', np.zeros(6), spread(6, 0).prompts, np.full(6, 80))
    alone = [serve(engine('continuous', 'paged', ScriptedExecutor), Workload('one', [0.0], [p], [80]))[0][0] for p in w.prompts]
    m, aborted = BlockManager(14, SIZE, 0, False), []
    e = Engine(Scheduler(m, SEATS, 256, MAX_LEN, 'unreserved'), ScriptedExecutor(num_blocks=14, block_size=SIZE))
    seqs = [e.add(Request(str(i), w.prompts[i], w.params(i)))[0] for i in range(6)]
    while e.has_unfinished:
        try: e.step()
        except DeadlockError:
            aborted.append(5 - len(aborted))
            assert e.abort(str(aborted[-1]))
    assert 0 < len(aborted) < 6 and m.num_free_blocks == 14
    assert [s.output_token_ids for s in seqs[:6 - len(aborted)]] == alone[:6 - len(aborted)]


@pytest.mark.parametrize('chunks', [[(0, 40), (0, 17), (32, 61), (0, 1)] + [(n - 1, n) for n in (2, 16, 17, 96, 250)], [(n - 1, n) for n in range(20, 260, 30)]])
def test_three_ways_to_run_one_batch(model, chunks):
    rng, c, (starts, stops) = np.random.default_rng(0), model.config, np.array(chunks).T
    counts = -(-stops // SIZE)
    tables = np.full((len(chunks), counts.max()), np.iinfo(np.int32).max, np.int32)
    tables[np.arange(counts.max()) < counts[:, None]] = rng.permutation(counts.sum())
    tokens = [torch.from_numpy(rng.integers(0, VOCAB, n)) for n in stops]

    def run(parts, attention):
        "Forwards of these chunks, one after the other, behind what came before them: the logits of every token."
        kv, old, out = KVCache(c.num_layers, int(counts.sum()), SIZE, c.num_kv_heads, c.head_dim, torch.float32), np.flatnonzero(starts), []
        kv.kv.fill_(torch.nan)
        for i in old:
            before = AttnMeta.build([0], [starts[i]], tables[[i]], SIZE)
            model(tokens[i][:starts[i]], kv, before, torch.tensor([0]), paged_attention)
        for part in parts:
            ids, meta = torch.cat([tokens[i][starts[i]:] for i in part]), AttnMeta.build(starts[part], stops[part], tables[part], SIZE)
            out.append(model(ids, kv, meta, torch.arange(len(ids)), attention))
        return torch.cat(out), kv.kv

    calls = []
    def one_by_one(q, k, v, meta, *more):
        cu = meta.cu_chunks.tolist()
        each = [AttnMeta.build([a], [b], tables[[i]], SIZE) for i, (a, b) in enumerate(chunks)]
        calls.append(len(each))
        return torch.cat([paged_attention(q[i:j], k, v, one, *more) for one, i, j in zip(each, cu, cu[1:])])

    every = list(range(len(chunks)))
    (fused, cache), (selective, cache2), (alone, cache3) = run([every], paged_attention), run([every], one_by_one), run([[i] for i in every], paged_attention)
    assert len(fused) == (stops - starts).sum() and calls == [len(chunks)] * c.num_layers and fused.isfinite().all()
    for logits, kv in (selective, cache2), (alone, cache3):
        torch.testing.assert_close(logits, fused, atol=1e-4, rtol=0)
        torch.testing.assert_close(kv, cache, atol=1e-5, rtol=0, equal_nan=True)
    assert selective.std() > .1 and (fused[0] - fused[-1]).abs().max() > .1                    # logits that could differ
