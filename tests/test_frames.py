"Films of random runs: their tables against the trace's and the memory's own, what is cached, held and in line against the engine's account."
import json
from collections import Counter
from functools import lru_cache
from random import Random

import numpy as np
import pytest

from pagedlm.core import ConfigError, DeadlockError, PagedLMError, Request, SamplingParams
from pagedlm.figures.explorer import Session
from pagedlm.figures.frames import FilmReader, film, fold, go_on, said
from pagedlm.figures.states import Reel, states
from pagedlm.figures.why import whys
from pagedlm.memory.block_manager import BlockManager
from pagedlm.memory.contiguous import ContiguousMemory
from pagedlm.scheduling.engine import Engine, ScriptedExecutor
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace, replay, tables_at, usage_kinds


class Watching(ScriptedExecutor):
    "Keeps, by iteration, the tables of the memory (by sequence id) when attention reads them."
    def execute(self, plan):
        s = self.scheduler
        self.before[plan.iteration] = tables_of(s, s.memory)
        return super().execute(plan)


def tables_of(scheduler, memory):
    swapped = getattr(memory, '_swapped', {})
    named = lambda rows: {scheduler.rows.seq[r].seq_id: t for r, t in rows.items()}
    held = {r: memory.table(scheduler.rows.seq[r]) for r in memory.holders()}
    return named(held), named({r: list(t.blocks) for r, t in swapped.items()})


def cached_of(memory):
    return {b for b in memory.allocator.free_blocks() if memory.allocator.kept[b]} if getattr(memory, 'cache', None) else set()


def random_params(rng, beams):
    kind = rng.integers(6)
    if kind == 0 and beams: return SamplingParams(n=2, beam_width=3, temperature=0, max_tokens=int(rng.integers(1, 12)))
    return SamplingParams(n=3 if kind in (1, 2) else 1, max_tokens=int(rng.integers(1, 20)), seed=1)


@lru_cache(None)
def random_run(seed, memory='paged', policy='continuous', preemption='swap', window=None, priorities=False):
    "An engine whose run is over, with what its memory was in each iteration: when attention read it, and after the commit."
    rng = np.random.default_rng(seed)
    size, blocks, max_len = int(rng.choice([1, 3, 4])), int(rng.integers(8, 16)), 44
    if memory in ('paged', 'cache'): pool = BlockManager(blocks * 6 // size + 1, size, 8 + 12 // size, memory == 'cache')
    else: pool = ContiguousMemory(blocks * 18 // size, size, max_len, str(rng.choice(['request', 'pow2'])), memory)
    executor = Watching(num_blocks=pool.num_blocks, block_size=size, num_swap_blocks=pool.num_swap_blocks, window=window, seconds_per_token=.001)
    executor.before = {}
    engine = Engine(Scheduler(pool, 8, 24 if policy != 'orca' else 64, max_len, policy, preemption, .01, (), window), executor, Trace('full'), clock=None)
    executor.scheduler, engine.after, seqs = engine.scheduler, [], []
    for step in range(500):
        if len(seqs) < 30 and rng.random() < .4:
            prompt = np.r_[np.arange(int(rng.integers(0, 12))), rng.integers(0, 50, rng.integers(1, 12))]
            request = Request(f'r{len(seqs)}', prompt, random_params(rng, memory in ('paged', 'cache')), engine.now,
                              int(rng.integers(3)) * 10 if priorities else 0)
            try: seqs += engine.add(request)
            except ValueError: pass
        if seqs and rng.random() < .05: engine.abort(seqs[rng.integers(len(seqs))].request.request_id)
        if not engine.has_unfinished:
            if len(seqs) >= 30: break
            continue
        engine.step()
        s = engine.scheduler
        line = [g.request.request_id for g in s._waiting]
        engine.after.append((tables_of(s, pool), cached_of(pool), pool.num_free_blocks, line, pool.usage()))
    assert not engine.has_unfinished and seqs
    return engine


RUNS = [dict(seed=seed, memory=memory, policy=policy, preemption=preemption)
        for seed in range(2) for memory in ('paged', 'cache', 'first_fit', 'buddy') for policy in ('continuous', 'static')
        for preemption in (('recompute', 'swap') if memory in ('paged', 'cache') else ('recompute',))]
RUNS += [dict(seed=seed, memory=memory, window=6) for seed in range(2) for memory in ('paged', 'cache')]
RUNS += [dict(seed=seed, memory=memory, priorities=True, preemption=how) for seed in range(2) for memory in ('paged', 'cache', 'first_fit')
         for how in ('recompute', 'swap')]


def test_states_are_what_the_memory_was():
    "Tables in the pool and in the swap pool, while attention reads them: all sequences, all blocks, in order."
    seen = Counter()
    for run in RUNS:
        engine = random_run(**run)
        for st in states(engine.trace):
            if st.plan.iteration not in engine.executor.before: continue                      # an empty plan is not executed
            tables, swapped = engine.executor.before[st.plan.iteration]
            forked = set(st.plan.forks[:, 1].tolist())                                        # their tables come with the commit
            told = {s: t for s, t in st.tables.items() if s not in forked}
            if engine.scheduler.memory.on_demand:
                assert told == {s: t for s, t in tables.items()}, (run, st.plan.iteration)
            assert st.swap == swapped, (run, st.plan.iteration)
            seen.update(swapped=len(swapped), forked=len(forked), beams=len(st.plan.beams), released=any(-1 in t for t in told.values()),
                        copies=len(st.plan.copies))
    assert min(seen.values()) > 5 and len(seen) == 5, seen


def test_what_is_cached_and_taken_after_each_iteration():
    seen = Counter()
    for run in RUNS:
        engine = random_run(**run)
        for i, (st, (_, cached, num_free, line, usage)) in enumerate(zip(states(engine.trace), engine.after)):
            assert st.cached == cached, (run, i)
            assert len(st.cached) * st.block_size == engine.trace['cached'][i], (run, i)
            assert engine.scheduler.memory.num_blocks - len(st.held(after=True)) == num_free, (run, i)
            assert sorted(a.request_id for a in st.waiting + st.swapped) == sorted(line), (run, i)
            assert [a.request_id for a in sorted(st.waiting + st.swapped, key=lambda a: a.place)] == line, (run, i)
            assert (len(st.waiting), len(st.swapped)) == (engine.trace['num_waiting'][i], engine.trace['num_swapped'][i])
            seen.update(cached=bool(cached), swapped=len(st.swapped), waiting=len(st.waiting), spare=bool(st.spare), rounded=bool(st.rounded))
    assert min(seen.values()) > 20 and len(seen) == 5, seen


def test_spans_that_are_too_short():
    "What a contiguous memory calls external is what was rounded off, and what is free in runs that are too short."
    seen = Counter()
    for run in RUNS:
        engine = random_run(**run)
        if engine.scheduler.memory.on_demand: continue
        reel = Reel(engine.trace)
        for i, external in enumerate(engine.trace['external']):
            st = reel.step()
            here, short = [s for s in st.tables if s not in st.leaving], len(reel.short())
            rounded = sum(len(st.rounded.get(s, ())) + sum(len(t) - len(st.tables[s]) for t in st.spare.get(s, ())) for s in here)
            assert (short + rounded) * st.block_size == external, (run, i)
            seen.update(short=bool(short), rounded=bool(rounded))
    assert min(seen.values()) > 50 and len(seen) == 2, seen


def played(frames):
    "Each frame with what it stands for: rows, tables, swap, cached and gone, after all changes so far."
    rows, tables, swap, cached, gone = [], {}, {}, set(), {}
    for f in frames:
        rows = f['rows'] if 'rows' in f else go_on(rows)
        for now, new in (tables, f.get('tables', {})), (swap, f.get('swap', {})):
            for s, t in new.items():
                if t is None: del now[s]
                else: now[s] = t
        added, dropped = (set(f.get('cached', {}).get(k, ())) for k in ('add', 'drop'))
        assert not added & cached and dropped <= cached
        cached, gone = (cached | added) - dropped, f.get('gone', gone)
        yield f, rows, tables, swap, cached, gone


def test_a_film_played_is_the_trace():
    "Through JSON: block tables, swap pool, cached blocks, rows and the line of each frame are those of the states, the usage the trace's."
    for run in RUNS[::3]:
        trace = random_run(**run).trace
        d = json.loads(json.dumps(film(trace).to_dict()))
        ids, names = [s['id'] for s in d['seqs']], [r['id'] for r in d['requests']]
        assert d['format'] == 'pagedlm film 1' and len(d['frames']) == len(trace)
        named = lambda tables: {ids[int(s)]: t for s, t in tables.items()}
        for i, ((f, rows, tables, swap, cached, _), st) in enumerate(zip(played(d['frames']), states(trace))):
            plan = st.plan
            assert (named(tables), named(swap), cached) == (st.tables, st.swap, st.cached), (run, i)
            assert f['usage'] == [trace[k][i] for k in usage_kinds] and f['t'] == pytest.approx(trace.ends[i], abs=1e-6)
            assert [names[r] for r in f.get('waiting', ())] == [a.request_id for a in st.waiting] and f.get('due', 0) == len(plan.due)
            assert {ids[s] for s, *_ in rows} == {*st.tables} and len({seat for _, seat, *_ in rows}) == len(rows)
            ran = [(ids[s], start, stop) for s, _, kind, start, stop in rows if kind < 2]
            assert ran == list(zip(plan.seq_ids.tolist(), plan.starts.tolist(), plan.stops.tolist())), (run, i)
            assert [[e.kind, e.detail] for e in st.events] == [[k, detail] for k, _, _, detail in f.get('events', ())]
            assert f['said'].startswith(f'Iteration {plan.iteration}: ') and len(f['said']) < 900


def test_a_film_has_the_tables_that_replay_has():
    "Of all sequences that a plan has told of; what came back from the swap pool and was not told yet is there already, though."
    for run in RUNS:
        trace = random_run(**run).trace
        for st, (plan, tables) in zip(states(trace), replay(trace)):
            assert {s: t for s, t in st.tables.items() if s in tables} == {s: t for s, t in tables.items() if s in st.tables}, (run, plan.iteration)
        i = len(trace) // 2
        assert [s for s in states(trace) if s.plan.iteration == i] and tables_at(trace, i) is not None


@pytest.mark.parametrize('run', RUNS[::9], ids=str)
def test_a_part_of_a_film(run):
    "Frames [first, last) show what the whole film shows there; so do the frames that are left when others are folded away."
    trace = random_run(**run).trace
    whole = [(rows, {**t}, {**s}, {*c}) for _, rows, t, s, c, _ in played(film(trace).frames)]
    part = film(trace, 10, 30)
    assert [f['i'] for f in part.frames] == [*range(10, min(30, len(trace)))] and 'rows' in part.frames[0]
    for a, (_, rows, t, s, c, _) in zip(whole[10:30], played(part.frames)): assert a == (rows, t, s, c)
    frames = film(trace).frames
    while len(frames) > 5: frames[:2] = [fold(*frames[:2])]
    for a, (_, rows, t, s, c, _) in zip(whole[-5:], played(frames)): assert a == (rows, t, s, c)


def test_a_film_of_a_run_that_goes_on():
    "Read after every step, the parts together are the film of the whole run; a request that is told again is told more."
    rng = np.random.default_rng(0)
    pool, asked, again = BlockManager(24, 4, 12, True), {}, 0
    engine = Engine(Scheduler(pool, 4, 24, 64, preemption='swap'), ScriptedExecutor(num_blocks=24, block_size=4, num_swap_blocks=12), Trace('full'), clock=None)
    reader, requests, seqs, frames = FilmReader(engine.trace), [], [], []
    knowing = FilmReader(engine.trace, asked)
    for i in range(200):
        if i < 60 and rng.random() < .3:
            r = Request(f'r{i}', rng.integers(0, 9, rng.integers(1, 20)), SamplingParams(n=int(rng.choice([1, 2])), max_tokens=int(rng.integers(1, 20))))
            asked[r.request_id] = r
            engine.add(r)
        if engine.has_unfinished: engine.step()
        part, known = reader.read(), knowing.read()
        assert len(part['frames']) <= 1 and all(r['prompt'] for r in known['requests'])
        again += sum('number' in r for r in part['requests'])
        for r in part['requests']: requests[r.get('number', len(requests)):r.get('number', len(requests)) + 1] = [r]
        seqs += part['seqs']
        frames += part['frames']
    whole, head = film(engine.trace), 0
    assert again > 3 and [{k: v for k, v in r.items() if k != 'number'} for r in requests] == whole.requests
    assert [s['id'] for s in seqs] == [s['id'] for s in whole.seqs]
    for a, b in zip(frames, whole.frames, strict=True):
        head += 'head' in b
        assert {k: v for k, v in a.items() if k not in ('head', 'said')} == {k: v for k, v in b.items() if k not in ('head', 'said')}
    assert head > 20


def test_plans_in_flight_at_the_same_time():
    "With a pipeline, events of several plans mix, and a frame may tell of a commit too early or late; tables are those of the trace."
    pool = BlockManager(30, 4)
    engine = Engine(Scheduler(pool, 3, 24, 64, in_flight=2), ScriptedExecutor(num_blocks=30, block_size=4), Trace('full'), clock=None)
    engine.run([Request(f'r{i}', np.arange(5 + i) + 10 * i, SamplingParams(max_tokens=5 + i)) for i in range(8)])
    d = film(engine.trace)
    assert len(d.frames) == len(engine.trace)
    for st, (plan, tables) in zip(states(engine.trace), replay(engine.trace)):
        for s in plan.seq_ids.tolist(): assert st.tables[s] == tables[s]


def test_what_cannot_be_filmed():
    engine = random_run(**RUNS[0])
    with pytest.raises(ConfigError, match='level'): film(Trace('requests'))
    bare = Trace('full')
    with pytest.raises(ConfigError, match='no memory'): film(bare)
    assert film(engine.trace, 10**6).frames == []


def test_ten_thousand_iterations_are_a_small_file():
    rng = np.random.default_rng(0)
    engine = Engine(Scheduler(BlockManager(400, 16), 16, 512, 2048), ScriptedExecutor(lambda tokens, i: 5, block_size=16), Trace('full'), clock=None)
    for i in range(2000):
        if engine.scheduler.num_waiting < 3 and rng.random() < .12:
            engine.add(Request(f'r{i}', rng.integers(0, 1000, rng.integers(20, 400)), SamplingParams(max_tokens=int(rng.integers(20, 300)))))
        engine.step()
    size = len(json.dumps(film(engine.trace).to_dict(), separators=(',', ':')))
    assert engine.trace['num_running'].mean() > 12 and size / len(engine.trace) < 450, size


def test_a_request_that_is_refused():
    "Nobody's number, and a name in the caption: also when it comes before everybody else."
    engine = Engine(Scheduler(BlockManager(4, 4), 2, 24, 64), ScriptedExecutor(num_blocks=4, block_size=4), Trace('full'), clock=None)
    with pytest.raises(ValueError): engine.add(Request('huge', np.arange(60), SamplingParams(max_tokens=1)))
    engine.run([Request('a', np.arange(5), SamplingParams(max_tokens=2))])
    made = film(engine.trace)
    assert [r['id'] for r in made.requests] == ['a'] and made.frames[0]['events'][0][:3] == ['refuse', -1, -1]
    assert made.frames[0]['said'] == 'Iteration 0: huge is refused; a is admitted: 5 prompt tokens, in 2 blocks.'


def test_samples_that_never_ran_end_as_one():
    "No plan has named them, so they have no numbers yet: the caption names their request, once."
    engine = Engine(Scheduler(BlockManager(8, 4), 3, 24, 64), ScriptedExecutor(num_blocks=8, block_size=4), Trace('full'), clock=None)
    engine.add(Request('a', np.arange(5), SamplingParams(max_tokens=3)))
    engine.add(Request('b', np.arange(5), SamplingParams(n=3, max_tokens=3)))
    engine.step()
    engine.abort('b')
    while engine.has_unfinished: engine.step()
    assert film(engine.trace).frames[1]['said'] == 'Iteration 1: b ends (abort).'


WHYS = {'seats': 'seats', 'closed': 'batch', 'budget': 'budget', 'blocks': 'memory', 'policy': 'policy', 'prefix': 'prefix'}


def random_session(seed):
    "A small one that often runs out of something: all policies, both memories, a prefix cache, priorities, samples."
    rng = Random(seed)
    one = rng.choice
    try:
        s = Session(policy=one(['continuous', 'static', 'unreserved', 'orca', 'vllm']), memory=one(['paged', 'paged', 'contiguous']),
                    num_blocks=one([3, 5, 8, 12, 20]), block_size=one([1, 2, 4]), max_num_seqs=one([1, 2, 4]), max_num_batched_tokens=one([2, 4, 8, 16, 32]),
                    max_model_len=32, prefix_caching=rng.random() < .6, num_swap_blocks=one([0, 0, 6]), preemption=one(['auto', 'recompute']),
                    reserve=one(['max', 'pow2', 'request']))
    except ConfigError: return None
    for i in range(rng.randint(2, 6)):
        prompt = one([rng.randint(1, 8), rng.randint(8, 24)])
        asked = dict(max_tokens=rng.randint(1, 8), n=one([1, 1, 2]), prefix=one([0, prompt]), priority=one([0, 0, 0, 1]))
        try: s.add(prompt, **asked)
        except PagedLMError: pass
        try:
            for _ in range(one([0, 0, 0, 1, 2])): s.step()
        except DeadlockError: pass
    try: s.run_to('idle', most=60)
    except DeadlockError: pass
    return s


def test_a_caption_says_why_as_the_scheduler_would():
    "Whatever a reel says of the head of the line, a run of the same scheduler that is listened to says, too; and it does not say nothing."
    seen, named, silent = Counter(), Counter(), 0
    for seed in range(600):
        s = random_session(seed)
        if s is None or not len(s.trace): continue
        reel = Reel(s.trace, s.requests)
        for heard in whys(s.trace, requests=s.requests.values()):
            st = reel.step()
            n, real = reel.need, st.head and heard.get(st.head.request_id)
            if not real or real.state != 'waiting': continue
            silent += not n or not n.why
            text = said(reel)
            if not n or not n.why:
                assert text.endswith(('wait.', 'waits.')), text
                continue
            at = seed, st.plan.iteration, n, str(real), text
            assert real.reason == WHYS[n.why], at
            if n.why == 'blocks': assert (n.blocks, n.keep, n.free) == (real.needed, real.kept, real.free), at
            if n.why == 'prefix':
                assert text.endswith(f': {n.by} is computing the prefix that both have.'), at
                mine, its = (s.requests[r].prompt_token_ids.tolist() for r in (st.head.request_id, n.by)) if n.by != 'another' else ([1], [1])
                assert mine[0] == its[0], at
                named[(n.by,) == real.others] += 1
            if n.why == 'policy' and n.asks: assert (n.asks, n.left) == (real.needed, real.free), at
            if n.why == 'seats': assert f'needs {n.asks} seat' in str(real) and n.left < n.asks, at
            if n.why == 'budget': assert f'at least {n.asks} token' in str(real) and f'and {n.left} of the' in str(real), at
            seen[n.why, s.settings['policy']] += 1
    reasons = Counter()
    for (why, _), n in seen.items(): reasons[why] += n
    assert named[True] > 10 * named[False]                  # `whys` names the first who promised a block, a reel him who is to fill the next one
    assert reasons.keys() == WHYS.keys() and min(reasons.values()) > 10 and silent < reasons.total() / 5, (seen, silent)


def last_words(s, frame): return film(s.trace).frames[frame]['said']


def test_why_the_first_in_line_waits_in_words():
    "For a prefix that another computes, for a reservation, for two seats of which one is free; and one block is not several."
    s = Session(num_blocks=5, block_size=2, prefix_caching=True, max_num_batched_tokens=16, max_model_len=32)
    for m in 2, 7: s.add(7, m, prefix=7)
    s.run_to('idle')
    assert last_words(s, 0).endswith('r1 waits: r0 is computing the prefix that both have.')
    s = Session(policy='orca', num_blocks=5, block_size=2, max_num_seqs=1, max_model_len=32)
    s.add(6, 2)
    s.add(4, 1)
    s.run_to('idle')
    assert last_words(s, 0).endswith('r1 waits: r1 would reserve 3 blocks, and 4 of 5 are reserved.')
    s = Session(num_blocks=12, block_size=2, max_num_seqs=2, max_model_len=32)
    s.add(6, 2)
    s.add(4, 1, n=2)
    s.run_to('idle')
    assert last_words(s, 0).endswith('r1 waits: r1 needs 2 seats, 1 of 2 is free.')
    s = Session(policy='vllm', num_blocks=3, block_size=2, max_num_batched_tokens=4, prefix_caching=True, preemption='recompute', max_model_len=32)
    for p in 4, 1: s.add(p, 2, prefix=p)
    s.run_to('idle')
    assert 'r1 is thrown out: its 1 block is given back, to be computed again' in last_words(s, 1)
