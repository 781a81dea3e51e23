"What a plan costs: the papers' memory, units by hand, fits to measured steps, and whole runs on a clock without a model."
import json
import math
import timeit
from pathlib import Path

import numpy as np
import pytest

from pagedlm.core import ConfigError, Plan, Request, SamplingParams
from pagedlm.memory.block_manager import BlockManager, check_plan, check_pool
from pagedlm.scheduling.cost_model import (OPT_13B, PAGED_KV_SLOWDOWN, CostModel, Gpu, Linear, Model, Moves, Roofline, SyntheticBeams,
                                           Work, find, fit, kv_blocks, models, nonnegative, read_bench, works)
from pagedlm.scheduling.engine import Engine
from pagedlm.scheduling.scheduler import Scheduler

RESULTS = Path(__file__).resolve().parent.parent/'nbs'/'results'


# a model and a GPU with round numbers: 10 layers of width 100, 1e9 weights, 1 TB/s, 1 PFLOP/s
TINY = Model('tiny', 10, 100, 10**9, 4000, 2048, 1000, 0)
ROUND = Gpu('round', 1e15, 1e12, 16e9, 1e11)
EXACT = dict(e_w=1, e_c=1, e_kv=1, c0=0, c1=0, latency=0)


def decode(n, context): return Work(n, n, n * context)


# ---- work ----

def test_work_of_a_plan():
    plan = Plan(3, seq_ids=np.arange(3), starts=np.array([0, 7, 30], np.int32), stops=np.array([5, 8, 40], np.int32),
                swap_ins=np.array([[0, 1], [1, 2]]), copies=np.array([[4, 5]]))
    assert Work.of(plan, 8) == Work(3, 16, 53, 1, 0, 2, 8) and Work.of(plan, 8).num_prompt_tokens == 13
    assert Work.of(Plan(0), 16) == Work(0, 0, 0)
    assert all(type(x) is int for x in Work.of(plan, 8))


def test_work_counts_beyond_31_bits():
    n = 2**30
    plan = Plan(0, seq_ids=np.arange(4), starts=np.full(4, n - 1, np.int32), stops=np.full(4, n, np.int32))
    assert Work.of(plan, 16) == (4, 4, 2**32, 0, 0, 0, 16)


# ---- models, GPUs, blocks ----

@pytest.mark.parametrize('model, gpu, tp, blocks', [('opt-13b', 'a100-40gb', 1, 983), ('opt-66b', 'a100-40gb', 4, 603),
                                                    ('opt-175b', 'a100-80gb', 8, 3757)])
def test_blocks_of_the_paper(model, gpu, tp, blocks): assert kv_blocks(model, gpu, tp) == blocks


def test_kv_bytes_and_sizes():
    assert [models[f'opt-{n}'].kv_bytes for n in ('13b', '66b', '175b')] == [819_200, 2_359_296, 4_718_592]
    assert [round(models[f'gpt3-{n}b'].num_params / 1e9) for n in (13, 101, 175, 341)] == [13, 101, 175, 341]
    assert models['llama-3-8b'].kv_bytes == 2 * 32 * 8 * 128 * 2 and models['smollm2-135m'].kv_bytes == 2 * 30 * 3 * 64 * 2


def test_blocks_by_size_and_number():
    assert kv_blocks('opt-13b', 'a100-40gb', block_size=32) == 983 // 2
    assert kv_blocks('opt-13b', 'a100-40gb', 2) > 2 * 983
    # Orca's largest set-up: about 50K slots for GPT-3 175B on 16 GPUs
    assert 45_000 < 16 * kv_blocks('gpt3-175b', 'a100-40gb', tp=8, pp=2) < 65_000


def test_a_model_that_does_not_fit_says_what_would():
    says = r'opt-66b on 2 x a100-40gb.*131\.4 GB.*take 4 GPUs \(tp=4, pp=1\)'
    with pytest.raises(ConfigError, match=says): kv_blocks('opt-66b', 'a100-40gb', 2)
    assert kv_blocks('opt-66b', 'a100-40gb', 4) > 0
    with pytest.raises(ConfigError, match='tp=0'): kv_blocks('opt-66b', 'a100-40gb', 0)
    with pytest.raises(ConfigError, match='larger pp'): kv_blocks('opt-175b', Gpu('small', 1e12, 1e12, 1e9, 1e9))


@pytest.mark.parametrize('make', [lambda: find(models, 'opt-14b'), lambda: Roofline('opt-14b', 'h100'),
                                  lambda: kv_blocks('opt-14b', 'h100')])
def test_an_unknown_model_lists_what_there_is(make):
    with pytest.raises(ConfigError, match="'opt-14b' is none of opt-13b, opt-66b.*Model"): make()


def test_an_unknown_gpu_lists_what_there_is():
    with pytest.raises(ConfigError, match="'t4' is none of a100-40gb.*h200.*Gpu"): Roofline('opt-13b', 't4')


# ---- roofline ----

def test_roofline_by_hand():
    r = Roofline(TINY, ROUND, **EXACT)
    assert math.isclose(r.seconds(decode(1, 0)), 2e-3)                       # 2 GB over 1 TB/s
    assert math.isclose(r.seconds(Work(1, 10_000, 0)), 2e-2)                 # 2 * 1e9 * 1e4 operations at 1e15 a second
    assert math.isclose(r.seconds(decode(10, 1000)), 2e-3 + 10_000 * 4000 / 1e12)
    host = Roofline(TINY, ROUND, **EXACT | dict(c0=.5, c1=.25))
    assert math.isclose(host.seconds(decode(4, 0)), 1.5 + 2e-3)
    slow = Roofline(TINY, ROUND, **EXACT | dict(kv_slowdown=PAGED_KV_SLOWDOWN, e_w=.5))
    assert math.isclose(slow.seconds(decode(10, 1000)), 4e-3 + 1.2 * 10_000 * 4000 / 1e12)


def test_parallel_by_hand():
    r = Roofline(TINY, ROUND, tp=4, **EXACT | dict(latency=1e-3))
    sums = 20 * (1e-3 + 2 * 3 / 4 * 200 / 1e11)                              # two a layer, each almost twice 2 * 100 bytes
    assert math.isclose(r.seconds(decode(1, 0)), 2e-3 / 4 + sums) and r.stages == 1
    p = Roofline(TINY, ROUND, pp=5, **EXACT | dict(latency=1e-3, hop_bandwidth=1e6))
    assert math.isclose(p.seconds(decode(1, 0)), 2e-3 + 4 * (1e-3 + 200 / 1e6)) and p.stages == 5


def test_nothing_computed_costs_only_moves():
    for cost in Roofline('opt-13b', 'a100-40gb'), OPT_13B:
        assert cost.seconds(Work(0, 0, 0)) == 0 and 0 < cost.seconds(Work(0, 0, 0, num_swap_outs=1)) < 5e-3


@pytest.mark.parametrize('cost', [OPT_13B, Roofline('opt-13b', 'a100-40gb'), Roofline('opt-175b', 'a100-80gb', 4, 2)])
def test_more_work_never_costs_less(cost):
    base = Work(8, 64, 2000, 1, 1, 1)
    for name in 'num_seqs', 'num_tokens', 'kv_tokens', 'num_copies', 'num_swap_outs', 'num_swap_ins':
        if name == 'num_seqs' and cost is OPT_13B: continue                  # one more chunk is one prompt token less
        assert cost.seconds(base._replace(**{name: getattr(base, name) + 1})) >= cost.seconds(base)
    assert cost.seconds(base._replace(num_seqs=9, num_tokens=65)) > cost.seconds(base)


def test_more_gpus_are_faster_until_they_talk():
    one, two, eight = (Roofline('opt-175b', 'a100-80gb', tp).seconds(decode(32, 500)) for tp in (1, 2, 8))
    assert one > two > eight > one / 8


@pytest.mark.parametrize('block_size, ms', [(1, 137.5), (16, 40.1), (256, 33.4)])
def test_swaps_take_what_the_paper_measured(block_size, ms):
    n = 256 // block_size
    assert abs(OPT_13B.seconds(Work(0, 0, 0, 0, n, n, block_size)) * 1e3 / ms - 1) < .03


def test_moves_by_hand():
    one = Roofline(TINY, ROUND, **EXACT)
    assert math.isclose(one.seconds(Work(0, 0, 0, num_copies=5, block_size=10)), 5 * 10 * 4000 * 2 / 1e12)      # read and written
    assert math.isclose(one.seconds(Work(0, 0, 0, num_swap_outs=1, block_size=10)), 40_000 / 13.1e9 + 20 * 1.93e-6)
    four = Roofline(TINY, ROUND, tp=2, pp=2, **EXACT)                        # each a quarter of the bytes, in half of the layers
    assert math.isclose(four.seconds(Work(0, 0, 0, num_swap_ins=1, block_size=10)), 10_000 / 12.3e9 + 10 * 3.3e-6)


@pytest.mark.parametrize('wrong', [dict(tp=0), dict(pp=0), dict(pp=41), dict(e_w=0), dict(c0=-1), dict(e_kv=math.nan)])
def test_numbers_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))): Roofline('opt-13b', 'a100-40gb', **wrong)


# ---- linear, fits ----

def test_linear_by_hand():
    assert math.isclose(Linear(1, 10, 100, 1000).seconds(Work(2, 5, 7)), 1 + 20 + 300 + 7000)
    assert math.isclose(Linear(0, 0, 0, 0, Moves(1, 2, 3, 4, 5)).seconds(Work(0, 0, 0, 1, 10, 100, 4)), 4 + 10 * 11 + 100 * 21)
    assert math.isclose(OPT_13B.seconds(decode(30, 300)), 27e-3 + 30 * .28e-3 + 9000 * .7e-6)


def synthetic(cost, n=200, seed=0, noise=0.0):
    rng = np.random.default_rng(seed)
    s = rng.integers(1, 64, n)
    t, kv = s + rng.integers(0, 2000, n) * (rng.random(n) < .2), s * rng.integers(100, 500, n)
    seconds = np.array([cost.seconds(Work(*map(int, row))) for row in zip(s, t, kv)]) * rng.normal(1, noise, n)
    return dict(sequences=s.tolist(), tokens=t.tolist(), context=kv.tolist(), seconds=seconds.tolist())


def test_fit_finds_what_was_put_in():
    true = Linear(.015, .7e-3, .6e-3, 2e-6)
    found = fit(synthetic(true))
    for name in 'c0', 'per_seq', 'per_prompt_token', 'per_kv_token':
        assert math.isclose(getattr(found.cost, name), getattr(true, name), rel_tol=1e-6)
    assert abs(found.total_error) < 1e-9 and found.rms < 1e-9
    noisy = fit(synthetic(true, noise=.05))
    assert math.isclose(noisy.cost.per_prompt_token, .6e-3, rel_tol=.05) and 0 < noisy.rms < .1


def test_nonnegative_is_the_best_there_is():
    rng = np.random.default_rng(1)
    for _ in range(20):
        A, b = rng.normal(size=(12, 4)), rng.normal(size=12)
        x = nonnegative(A, b)
        slope = A.T @ (A @ x - b)                                            # at the best, no price wants to move the way it may
        assert (x >= 0).all() and (slope > -1e-9).all() and (np.abs(slope[x > 0]) < 1e-9).all()


@pytest.mark.parametrize('which', [0, 1])
def test_fit_tells_the_half_that_it_has_not_seen(which):
    steps = {k: np.array(v) for k, v in read_bench(RESULTS/'42_bench.json')['per_step'].items()}
    seen, rest = ({k: v[i::2] for k, v in steps.items()} for i in (which, 1 - which))
    assert abs(sum(map(fit(seen).cost.seconds, works(rest))) / rest['seconds'].sum() - 1) < .15


def columns(**changed): return json.dumps(dict(per_step=dict(sequences=[1], tokens=[1], context=[1], seconds=[1]) | changed))


@pytest.mark.parametrize('content, match', [('', 'no JSON'), ('[]', 'per_step'), ('{"per_step": {"tokens": [1]}}', 'per_step'),
                                            (columns(seconds=[1, 2]), 'per_step'), (columns(sequences=['a']), 'numbers'),
                                            (columns(sequences=[], tokens=[], context=[], seconds=[]), 'per_step')])
def test_what_is_no_bench_result(tmp_path, content, match):
    (tmp_path/'x.json').write_text(content)
    with pytest.raises(ConfigError, match=match): read_bench(tmp_path/'x.json')
    with pytest.raises(ConfigError, match='No such file'): read_bench(tmp_path/'y.json')


# ---- the executor ----

class Checked(CostModel):
    "Looks at every plan before it answers."
    plans = copies = 0

    def execute(self, plan):
        s = self.scheduler
        check_pool(s.memory)
        check_plan(plan, s.memory, {int(s.rows.seq_id[r]): r for r in s._group})
        self.plans, self.copies = self.plans + 1, self.copies + len(plan.copies)
        return super().execute(plan)


def run(seed=0, num_blocks=200, cost=OPT_13B, **kind):
    memory = BlockManager(num_blocks, 16, num_swap_blocks=num_blocks)
    executor = Checked(cost, beam_script=SyntheticBeams(seed))
    executor.scheduler = Scheduler(memory, max_num_seqs=16, eos_token_ids=(2,))
    engine = Engine(executor.scheduler, executor, clock=None)
    seqs = engine.run([Request(str(i), range(50 + i), SamplingParams(max_tokens=40, **kind)) for i in range(6)])
    engine.step()                                                            # tells the executor whom to forget
    check_pool(memory)
    assert memory.num_free_blocks == num_blocks and not executor.beams
    return engine, executor, seqs


@pytest.mark.parametrize('num_blocks', [200, 40])
def test_samples_run_to_the_end(num_blocks):
    engine, executor, seqs = run(num_blocks=num_blocks, n=4)
    assert all(len(s.output_token_ids) == 40 and s.finish_reason == 'length' for group in seqs.values() for s in group)
    assert executor.copies > 0 and engine.now > 40 * OPT_13B.c0
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 40)


@pytest.mark.parametrize('num_blocks', [200, 40])
def test_beams_run_to_the_end_and_differ(num_blocks):
    engine, _, seqs = run(num_blocks=num_blocks, beam_width=4, n=4, temperature=0)
    for group in seqs.values():
        found = [tuple(s.output_token_ids) for s in group]
        assert len(set(found)) == 4 and all(len(t) == 40 and 2 not in t for t in found)
        assert [s.score for s in group] == sorted((s.score for s in group), reverse=True)


def test_the_same_seed_gives_the_same_run():
    one, two, other = (run(seed, beam_width=4, n=4, temperature=0) for seed in (3, 3, 4))
    told = [{name: [s.output_token_ids for s in group] for name, group in seqs.items()} for _, _, seqs in (one, two, other)]
    assert told[0] == told[1] != told[2] and one[0].now == two[0].now


def test_the_clock_is_the_sum_of_the_costs():
    class Counting:
        stages, total = 1, 0.0
        def seconds(self, work):
            self.total += (s := OPT_13B.seconds(work))
            return s
    cost = Counting()
    engine, executor, _ = run(cost=cost)
    assert engine.now == pytest.approx(cost.total) and executor.plans >= 40


def test_sequences_without_beams_leave_nothing_behind():
    executor = CostModel(OPT_13B)
    engine = Engine(Scheduler(BlockManager(50, 16)), executor, clock=None)
    engine.add(Request('a', [1, 2, 3], SamplingParams(max_tokens=4)))
    engine.step()
    assert not executor.beams
    many = np.arange(600)
    result = executor.execute(Plan(0, seq_ids=many, starts=0 * many, stops=0 * many + 1, due=many))
    assert result.tokens.dtype == np.int64 and len(result.tokens) == 600 and result.logprobs is None
    with pytest.raises(ValueError): result.tokens[0] = 1


def test_answers_are_ordered_distinct_and_seeded():
    a, b = SyntheticBeams(5), SyntheticBeams(5)
    for k in (4, 8, 12, 4):
        for _ in range(50):
            lp = a(k)
            assert lp == b(k) and len(set(lp.top_ids)) == len(lp.top_logprobs) == k and lp.logprob == lp.top_logprobs[0]
            assert all(x >= y for x, y in zip(lp.top_logprobs, lp.top_logprobs[1:])) and sum(map(math.exp, lp.top_logprobs)) <= 1 + 1e-9
    assert [a(8).logprob for _ in range(9)] != [SyntheticBeams(6)(8).logprob for _ in range(9)]


def test_answers_have_the_measured_spread():
    script, measured = SyntheticBeams(0), json.loads((RESULTS/'22_cost_model_beams.json').read_text())['best']
    best = sorted(math.exp(script(8).logprob) for _ in range(4000))
    for q in (4, 8, 12): assert abs(best[q * 4000 // 16] - measured[q]) < .06


def test_certain_answers_are_as_many_as_asked():
    script = SyntheticBeams(0, certain=.6)
    assert abs(sum(script(8).logprob > math.log(.998) for _ in range(4000)) / 4000 - .6 - .4 / 16) < .04      # and one of 16 by itself
    with pytest.raises(ConfigError, match='certain=1.5'): SyntheticBeams(certain=1.5)


def test_wrong_numbers_are_refused():
    for wrong in dict(block_size=0), dict(token=-1):
        with pytest.raises(ConfigError, match=next(iter(wrong))): CostModel(OPT_13B, **wrong)


def test_a_step_costs_microseconds():
    plan = Plan(0, seq_ids=np.arange(30), starts=np.full(30, 300, np.int32), stops=np.full(30, 301, np.int32), due=np.arange(30))
    executor, script = CostModel(OPT_13B), SyntheticBeams()
    script(8)
    def took(f): return min(timeit.repeat(f, number=1000, repeat=9)) / 1000
    assert took(lambda: executor.execute(plan)) < 40e-6 and took(lambda: script(8)) < 10e-6      # 5 and .3 us on a quiet core
