"Prefix hits, beams, priorities, windows and scoring, without a model: each against a plain run, and all of them at random together."
import itertools
import random
import time

import numpy as np
import pytest
from drive import CheckedExecutor, check_tokens, events, oracle, request

from pagedlm.core import InvalidRequestError, Request, SamplingParams, SchedulerError, Sequence, SequenceArrays
from pagedlm.memory.block_manager import BlockManager, check_pool
from pagedlm.memory.contiguous import ContiguousMemory
from pagedlm.scheduling.beam_search import BeamSearch
from pagedlm.scheduling.engine import Engine, counting_answer, counting_script
from pagedlm.scheduling.scheduler import Policy, Scheduler
from pagedlm.trace import Trace, replay


def make(blocks, size=4, seats=8, budget=64, swap=0, cached=True, window=None, contiguous=False, max_len=400, **options):
    "An engine over a pool of `blocks` blocks, every step of which is checked."
    memory = ContiguousMemory(blocks, size, max_len, 'request') if contiguous else BlockManager(blocks, size, swap, prefix_caching=cached)
    executor = CheckedExecutor(counting_script, blocks, size, memory.num_swap_blocks, window=window)
    executor.scheduler, executor.plans = Scheduler(memory, seats, budget, max_len, window=window, **options), []
    return Engine(executor.scheduler, executor, Trace('full'), clock=None)


def finish(engine, most=2000, each=lambda outputs: None):
    for _ in range(most):
        if not engine.has_unfinished: break
        each(engine.step())
        check_pool(engine.scheduler.memory)
    s, executor = engine.scheduler, engine.executor
    assert not engine.has_unfinished and s.memory.num_free_blocks == s.memory.num_blocks
    assert not (s._group or s._pending or s._leaders or s._searches or s._scored) and len(s.rows._free) == len(s.rows.num_tokens)
    if s._forget: s.commit(plan := s.plan(), executor.execute(plan))                   # the last to leave are told of with the next plan
    assert not (executor.tokens or executor.tables)


def computed(engine): return sum(p.num_tokens for p in engine.executor.plans)


# prefix hits

def test_a_system_prompt_is_stored_once():
    "64 requests at once, one instruction: it is computed once, and its blocks have 64 holders."
    engine = make(400, size=16, seats=64, budget=512)
    instruction, most = list(range(100, 420)), []
    seqs = [engine.add(Request(f'r{i}', instruction + [1000 + i, 2000 + i, 7], SamplingParams(max_tokens=4))) for i in range(64)]
    memory = engine.scheduler.memory
    finish(engine, each=lambda o: most.append(max(memory.allocator.ref_counts)))
    check_tokens(seqs)
    assert max(most) == 64
    assert computed(engine) == 320 + 64 * 3 + 64 * 3                                   # the instruction, the questions, the answers but the last token
    assert [s.num_hit_tokens for [s] in seqs] == [0] + [320] * 63
    assert memory.cache.num_hit_tokens == 63 * 320 and len(events(engine, 'hit')) == 63


def test_nothing_is_found_before_it_is_filled():
    "A prompt of many chunks: whoever shares it waits until it is there, and others do not wait with them."
    engine = make(200, budget=16, seats=8)
    long = list(range(500, 600))
    a, b, c = (engine.add(Request(n, p, SamplingParams(max_tokens=3)))[0] for n, p in (('a', long + [1]), ('b', long + [2]), ('c', [9, 9, 9])))
    begun = {}
    finish(engine, each=lambda o: [begun.setdefault(s.request.request_id, engine.scheduler.iteration) for s in (a, b, c) if s.num_computed_tokens])
    assert begun['c'] == 1 and begun['a'] == 1 and begun['b'] > 100 // 16
    assert b.num_hit_tokens == 100 and computed(engine) == 101 + 1 + 3 + 3 * 2
    check_tokens([[a], [b], [c]])


@pytest.mark.parametrize('how', ['abort', 'fail'])
def test_nobody_waits_for_what_no_one_computes(how):
    engine = make(200, budget=16)
    long = list(range(500, 600))
    engine.add(Request('a', long + [1], SamplingParams(max_tokens=3)))
    [b] = engine.add(Request('b', long + [2], SamplingParams(max_tokens=3)))
    engine.step(), engine.step()
    if how == 'abort': engine.abort('a')
    else:
        engine.scheduler.plan()
        engine.scheduler.fail()
        engine.executor.tokens.clear()
    finish(engine)
    check_tokens([[b]])
    assert b.num_hit_tokens == 32


def test_whole_prompt_is_found__vllm_3239():
    "The last token is computed again; no shared block is written."
    for length in (1, 7, 8, 9):
        engine = make(50)
        prompt = list(range(length))
        for name in 'ab':
            seqs = engine.add(Request(name, prompt, SamplingParams(max_tokens=5)))
            finish(engine)
            check_tokens([seqs])
        assert seqs[0].num_hit_tokens == (length - 1) // 4 * 4


def test_conversation_goes_on():
    "Tokens that were generated are found like those of a prompt."
    engine = make(100)
    [a] = engine.add(Request('a', range(10), SamplingParams(max_tokens=13)))
    finish(engine)
    [b] = engine.add(Request('b', [*a.token_ids.tolist(), 5, 6], SamplingParams(max_tokens=3)))
    finish(engine)
    assert b.num_hit_tokens == 20                                                      # 22 of 23 tokens were computed
    check_tokens([[a], [b]])


def test_salts_and_collisions__vllm_12621():
    for salt, name in itertools.product((None, 'x'), (hash, lambda x: 7)):
        engine = make(100)
        engine.scheduler.memory.cache.hash = name
        seqs = [engine.add(Request(f'{i}', p, SamplingParams(max_tokens=4), cache_salt=s)) for i, (p, s) in enumerate(
            [(range(20), None), (range(20), salt), (range(50, 70), salt), (range(20), salt)])]
        finish(engine)
        check_tokens(seqs)
        hits = [s.num_hit_tokens for [s] in seqs]
        if name is hash: assert hits == ([0, 16, 0, 16] if salt is None else [0, 0, 0, 16])          # the last comes when the first has filled its own
        if salt: assert hits[1] == 0


def test_least_recently_used_goes_first__hf_snapshot():
    engine = make(8, watermark=0)
    for name, prompt in ('a', range(100, 109)), ('b', range(200, 209)), ('a2', range(100, 109)), ('c', range(300, 321)):
        [s] = engine.add(Request(name, prompt, SamplingParams(max_tokens=1)))
        finish(engine)
    found = {p: len(engine.scheduler.memory.cache.find(engine.scheduler.add(Request(f'{p}', range(p, p + 9)))[0], 8)) for p in (100, 200, 300)}
    assert found == {100: 2, 200: 0, 300: 2}                                           # a was used again, so b went


def test_preempted_comes_back_through_the_cache():
    "Recompute costs little when the blocks are still there."
    tokens = {}
    for cached in (False, True):
        engine = make(20, cached=cached, watermark=0, preemption='recompute')
        seqs = [engine.add(request(n, 9, 20)) for n in 'abc']
        finish(engine)
        check_tokens(seqs)
        assert engine.scheduler.num_preemptions
        tokens[cached] = computed(engine)
    assert tokens[True] < tokens[False]


def test_a_hit_is_quick_in_a_large_pool__nano_vllm():
    "99 blocks out of 100,000, admitted as a whole: less than 0.2 ms (measured 20 times, the best counts)."
    memory, arrays, prompt = BlockManager(100_000, 16, prefix_caching=True), SequenceArrays(width=2048), np.arange(99 * 16 + 1)
    def admit(name):
        seq = Sequence(0, Request(name, prompt), arrays=arrays)
        seq.row = arrays.take(len(prompt))
        arrays.tokens[seq.row, :len(prompt)], arrays.num_tokens[seq.row] = prompt, len(prompt)
        start = time.perf_counter()
        grant = memory.admit(seq, len(prompt))
        took = time.perf_counter() - start
        memory.computed(np.array([seq.row]), np.array([len(prompt)]))
        memory.free(seq)
        arrays.give_back(seq.row)
        return took, grant.num_hit_tokens
    memory.allocator.free_many(memory.allocator.allocate_many(50_000)[::-1])               # the queue is in disorder
    assert admit('first')[1] == 0
    took, hits = zip(*(admit(str(i)) for i in range(20)))
    assert set(hits) == {99 * 16} and min(took) < 200e-6, min(took)


# beams

def search_alone(r, stop_len, ends=()):
    "What a search finds with a model's answers and nothing else."
    s = BeamSearch(r.params, r.prompt_len, stop_len, ends)
    beams = [r.prompt_token_ids]
    while not s.done:
        moves = s.advance([counting_answer(b, r.params.num_candidates(1 + len(r.params.stop_token_ids))) for b in beams], lambda i: beams[i])
        beams = [np.append(beams[i], t).astype(np.int32) for i, t in moves]
    return s.finished[:r.params.n]


def beam_request(name, length=9, new=12, width=4, n=2, **kw):
    return Request(name, np.arange(length) + 10 * ord(name[0]), SamplingParams(beam_width=width, n=n, temperature=0, max_tokens=new, **kw))


def check_beams(seqs):
    r = seqs[0].request
    found = search_alone(r, r.prompt_len + r.params.max_tokens)
    assert [(s.token_ids.tolist(), s.finish_reason, s.score) for s in seqs[:r.params.n]] == [(h.token_ids.tolist(), h.finish_reason, h.score) for h in found]


@pytest.mark.parametrize('width', [1, 2, 4, 6])
@pytest.mark.parametrize('size', [1, 4, 16])
def test_beams_find_what_the_search_finds(width, size):
    engine = make(800 // size, size)
    seqs = [engine.add(beam_request(name, width=width, n=min(2, width), length_penalty=p)) for name, p in (('a', 1.0), ('b', 0.0))]
    other = engine.add(request('c', 5, 9, n=2))
    outputs = []
    finish(engine, each=outputs.extend)
    for s in seqs: check_beams(s)
    check_tokens([other])
    told = [o for o in outputs if o.request_id in 'ab']
    assert len(told) == 2 * min(2, width) and all(len(o.token_ids) == 12 for o in told)                # at the end, all at once


def test_beams_move_nothing_but_the_last_block():
    engine = make(100, size=4)
    seqs = engine.add(beam_request('a', length=20, new=16))
    finish(engine)
    check_beams(seqs)
    plans = engine.executor.plans
    assert sum(len(p.beams) > 0 for p in plans) == 15 and any((p.beams[:, 0] != p.beams[:, 1]).any() for p in plans)
    for p in plans:
        chunks = {c.seq_id: c for c in p.chunks}
        assert len(p.copies) <= 3 and all(c.start % 4 for c in chunks.values() for src, dst in p.copies.tolist() if dst in c.blocks)


@pytest.mark.parametrize('preemption', ['recompute', 'swap'])
@pytest.mark.parametrize('contiguous', [False, True])
def test_beams_are_preempted(preemption, contiguous):
    engine = make(24, swap=0 if contiguous else 40, cached=False, contiguous=contiguous, watermark=0, preemption=preemption, max_len=40)
    seqs = [engine.add(beam_request(n, 9, 14, 3, 1)) for n in 'ab'] + [engine.add(request('c', 12, 20))]
    finish(engine)
    check_beams(seqs[0]), check_beams(seqs[1]), check_tokens(seqs[2:])
    assert engine.scheduler.num_preemptions or contiguous                              # contiguous ones are displaced only, below


@pytest.mark.parametrize('steps', range(1, 9))
def test_beams_are_displaced_from_contiguous_memory(steps):
    "Three spans for three beams, whichever of them leads when they come back."
    engine = make(16, size=4, contiguous=True, max_len=36, watermark=0)
    beams = engine.add(Request('a', range(8), SamplingParams(beam_width=3, n=1, temperature=0, max_tokens=12), priority=5))
    for _ in range(steps): engine.step()
    urgent = engine.add(Request('u', range(9), SamplingParams(max_tokens=20)))
    finish(engine)
    check_beams(beams), check_tokens([urgent])
    assert engine.scheduler.num_preemptions == 1


def test_static_batches_wait_for_a_prefix():
    "The batch is filled when those who await a prefix have come, so the cache makes it no slower."
    steps = {}
    for cached in (False, True):
        engine = make(100, cached=cached, budget=200, policy='static')
        seqs = [engine.add(Request(f'{i}', [*range(10), 50 + i], SamplingParams(max_tokens=20))) for i in range(8)]
        finish(engine)
        check_tokens(seqs)
        steps[cached] = engine.scheduler.iteration
    assert steps[True] <= steps[False] + 3


def test_scored_samples_leave_nothing():
    engine = make(50)
    for i in range(5): engine.add(Request(f'{i}', range(9), SamplingParams(n=3, max_tokens=0, prompt_logprobs=0)))
    outputs = []
    finish(engine, each=outputs.extend)
    assert sorted((o.request_id, o.index, o.finish_reason) for o in outputs) == [(f'{i}', j, 'length') for i in range(5) for j in range(3)]


def test_a_beam_is_not_finished_from_outside():
    engine = make(50)
    seqs = engine.add(beam_request('a'))
    engine.step(), engine.step()
    with pytest.raises(SchedulerError, match='abort'): engine.scheduler.finish(seqs[1])
    finish(engine)
    check_beams(seqs)
    with pytest.raises(InvalidRequestError, match='length_penalty'): SamplingParams(beam_width=2, temperature=0, length_penalty=2000.0)


def test_beams_stop_and_end():
    engine = make(200, eos_token_ids=(7,))
    a = engine.add(beam_request('a', new=40, stop_token_ids=tuple(range(2, 400)), early_stopping=True))
    finish(engine)
    assert all(s.finish_reason == 'stop' and s.token_ids[-1] < 400 for s in a[:2]) and all(s.finish_reason for s in a)
    b = engine.add(beam_request('b', new=200))
    for _ in range(5): engine.step()
    engine.abort('b')
    finish(engine)
    assert {s.finish_reason for s in b} == {'abort'}
    small = make(9, watermark=0)
    c = small.add(beam_request('c', new=60))
    finish(small)
    assert [s.finish_reason for s in c[:2]] == ['memory'] * 2 and c[0].score >= c[1].score and len(c[0].output_token_ids) > 4


def test_wrong_beams_are_refused():
    for bad in dict(temperature=1.0), dict(logprobs=1), dict(stop='x'), dict(best_of=5), dict(n=9):
        with pytest.raises(InvalidRequestError, match='beam'): SamplingParams(**dict(beam_width=4, temperature=0) | bad)
    with pytest.raises(InvalidRequestError, match='beam_width=9'): make(50).add(beam_request('a', width=9))


# priorities

def test_urgent_displaces_patient():
    engine = make(100, seats=2, cached=False)
    seqs = [engine.add(Request(n, range(5), SamplingParams(max_tokens=12), priority=3)) for n in 'ab']
    engine.step()
    urgent = engine.add(Request('u', range(7), SamplingParams(max_tokens=3), priority=0))
    finish(engine)
    check_tokens([*seqs, urgent])
    assert events(engine, 'preempt') == [(1, 'b', 'recompute')] and [e[1] for e in events(engine, 'finish')][0] == 'u'


def test_equals_do_not_displace():
    engine = make(100, seats=1)
    for n in 'ab': engine.add(Request(n, range(5), SamplingParams(max_tokens=5), priority=4))
    finish(engine)
    assert not engine.scheduler.num_preemptions and [e[1] for e in events(engine, 'finish')] == ['a', 'b']


@pytest.mark.parametrize('seed', range(12))
def test_nobody_starves(seed):
    """Requests of random priorities, sizes and times on few seats and little memory. Whoever arrives more than patience * priority
    iterations after somebody never gets a token before that one was first admitted, or after it was thrown out."""
    rng = random.Random(seed)
    class Hasty(Policy): patience = 5
    engine = make(rng.choice([12, 20, 40]), seats=rng.choice([1, 2, 4]), budget=rng.choice([8, 32]), policy=Hasty(), watermark=0, cached=seed % 2 == 0)
    s, place, arrived, running = engine.scheduler, {}, {}, {}
    requests = [Request(f'{i}', [rng.randrange(40) for _ in range(rng.randrange(1, 12))], SamplingParams(max_tokens=rng.randrange(1, 12)),
                        priority=rng.choice([0, 0, 0, 1, 5, 20])) for i in range(60)]
    for i, r in enumerate(requests):
        arrived[r.request_id] = s.iteration
        place[r.request_id] = s.iteration + 5 * r.priority, i
        engine.add(r)
        for _ in range(rng.choice([0, 1, 3])):
            if engine.has_unfinished: engine.step()
        now = {g.request.request_id for g in s.running_groups()}
        for name in now - running.get('last', set()):                                  # let in: nobody in front of it stands outside, but who awaits a prefix
            ahead = [g for g in s._waiting if place[g.request.request_id] < place[name] and not s._awaits(g)]
            assert not ahead or s.memory.cache, (name, [g.request.request_id for g in ahead])
        running['last'] = now
    finish(engine, 5000)
    late = {}
    for e in engine.trace.events:
        if e.kind == 'admit': late[e.request_id] = e.iteration
    found = {e.request_id for e in engine.trace.events if e.kind == 'hit'}               # these may have waited for their prefix
    for a, b in itertools.permutations(requests, 2):                                   # the bound, for first admissions
        if arrived[b.request_id] > arrived[a.request_id] + 5 * max(0, a.priority - b.priority) and a.request_id not in found:
            assert late[a.request_id] <= late[b.request_id], (a, b)


# windows

@pytest.mark.parametrize('preemption', ['recompute', 'swap'])
def test_a_window_gives_blocks_back(preemption):
    "A sequence of 200 tokens in a pool of 12 blocks of 4, beside another one."
    engine = make(12, window=10, budget=8, swap=8, cached=False, watermark=0, preemption=preemption)
    seqs = [engine.add(request(n, 30, 170)) for n in 'ab']
    held = []
    finish(engine, each=lambda o: held.append(engine.scheduler.memory.num_blocks - engine.scheduler.memory.num_free_blocks))
    check_tokens(seqs)
    assert max(held) < 12 and len(held) > 170


def test_a_trace_knows_what_a_window_left():
    "Tables replayed from the trace are the memory's, with beams, samples, swap and recompute."
    engine = make(16, window=10, budget=16, swap=30, watermark=0)
    engine.add(request('a', 30, 60, n=3)), engine.add(beam_request('b', new=40)), engine.add(request('c', 20, 60))
    seen, memory = [], engine.scheduler.memory
    execute = engine.executor.execute
    def look(plan):
        rows = {int(engine.scheduler.rows.seq_id[r]): r for r in engine.scheduler._group}
        seen.append((plan.iteration, {s: memory._tables[rows[s]].blocks.copy() for s in plan.seq_ids.tolist()}))
        return execute(plan)
    engine.executor.execute = look
    finish(engine)
    assert {'release', 'preempt'} <= {e.kind for e in engine.trace.events}
    replayed = {plan.iteration: {s: list(t) for s, t in tables.items()} for plan, tables in replay(engine.trace)}
    for iteration, now in seen:
        for s, blocks in now.items(): assert replayed[iteration][s] == blocks, (iteration, s)


def test_a_window_and_hits_and_samples():
    engine = make(40, window=10, budget=16)
    seqs = [engine.add(request('a', 30, 20, n=3))]
    finish(engine)
    seqs.append(engine.add(Request('b', [*seqs[0][0].token_ids[:40].tolist(), 3], SamplingParams(max_tokens=30))))
    finish(engine)
    check_tokens(seqs)


# scoring

def test_scored_requests_give_no_token():
    engine = make(60, budget=8)
    first = engine.add(Request('a', range(30), SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=21)))
    finish(engine)
    second = engine.add(Request('b', [*range(24), 1, 2], SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=21)))
    third = engine.add(Request('c', [*range(24), 1, 2], SamplingParams(max_tokens=0, prompt_logprobs=0)))
    outputs = []
    finish(engine, each=outputs.extend)
    assert [(o.request_id, o.token_ids, o.finish_reason) for o in outputs] == [('b', [], 'length'), ('c', [], 'length')]
    assert (second[0].num_hit_tokens, third[0].num_hit_tokens) == (20, 0)              # the log probabilities behind them are wanted
    assert all(not len(p.due) for p in engine.executor.plans) and first[0].finish_reason == 'length'


# all together

@pytest.mark.parametrize('seed', range(60))
def test_everything_at_random__sglang_35270(seed):
    """Prefix hits, salts, samples, beams, priorities, windows, scoring, preemption, swap, both memories, both policies, aborts and an executor that
    fails, on and off: whoever ends by itself has the same tokens as alone."""
    rng = random.Random(seed)
    size, contiguous = rng.choice([1, 3, 4, 16]), rng.random() < .2
    window = None if contiguous else rng.choice([None, None, 6, 20])
    blocks = rng.choice([60, 100, 200]) // size + 8
    engine = make(blocks, size, rng.choice([4, 5, 8]), rng.choice([8, 9, 17, 64]), rng.choice([0, 3, 12, 20, 40]) * (not contiguous), rng.random() < .7, window,
                  contiguous, preemption=rng.choice(['auto', 'recompute', 'swap']), watermark=rng.choice([0, .05]), max_len=120,
                  policy=rng.choice(['continuous'] * 4 + ['static']))
    execute, fails = engine.executor.execute, rng.choice([0, 0, .03])
    def may_fail(plan):
        if rng.random() < fails: raise OSError('the device is gone')
        return execute(plan)
    engine.executor.execute = may_fail
    def step():
        try: engine.step()
        except OSError: pass
        check_pool(engine.scheduler.memory)
    starts = [[rng.randrange(500) for _ in range(rng.randrange(40))] for _ in range(3)]
    everyone = []
    for i in range(24):
        prompt = rng.choice(starts)[:rng.randrange(40)] + [rng.randrange(500) for _ in range(rng.randrange(1, 12))]
        if everyone and rng.random() < .3: prompt = everyone[rng.randrange(len(everyone))][0].token_ids.tolist()[:60] + [3]
        kind, new, extra = rng.choice(['one', 'one', 'samples', 'best', 'beams', 'scored']), rng.randrange(1, 25), dict(priority=rng.choice([0, 0, 1, 3]), cache_salt=rng.choice([None, None, 'x']))
        params = dict(one=dict(), samples=dict(n=3), best=dict(n=1, best_of=3), beams=dict(beam_width=3, n=2, temperature=0), scored=dict(prompt_logprobs=0, n=rng.choice([1, 1, 3])))[kind]
        try: everyone.append(engine.add(Request(f'{i}', prompt, SamplingParams(max_tokens=0 if kind == 'scored' else new, **params), **extra)))
        except InvalidRequestError: continue
        for _ in range(rng.randrange(3)): step()
        if rng.random() < .05: engine.abort(f'{rng.randrange(i + 1)}')
    for _ in range(4000):
        if engine.has_unfinished: step()
    engine.executor.execute = execute
    finish(engine)
    for seqs in everyone:
        p = seqs[0].request.params
        if seqs[0].finish_reason in ('abort', 'memory', 'error'): continue
        if p.beam_width: check_beams(seqs)
        elif p.max_tokens == 0: assert not seqs[0].output_token_ids
        else:
            for s in seqs: assert s.finish_reason in ('memory', 'error') or s.output_token_ids == oracle(s.request, s.index), s
