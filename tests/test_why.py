"""A trace's run again is the same run; what `why` claims is tried: with what was lacking it comes otherwise, and with one less it does not.
Who held a block is what the memory says."""
import random
from collections import Counter
from functools import cache

import numpy as np
import pytest
from test_policies import MEMORIES, any_request, build

from pagedlm.core import ConfigError, DeadlockError, InvalidRequestError, Request, SamplingParams
from pagedlm.figures.batch import history
from pagedlm.figures.rerun import Again, Outside
from pagedlm.figures.why import Lives, _Listener, one_more_block, rerun, stays, what_if, who_held, why, why_at, whys
from pagedlm.memory.block_manager import BlockManager
from pagedlm.memory.contiguous import ContiguousMemory
from pagedlm.scheduling.engine import Engine, ScriptedExecutor
from pagedlm.scheduling.policies import Policy, policies
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace, replay


@cache
def random_run(seed, policy, in_flight, kind, preemption):
    """An engine after a run of requests of all kinds; some are aborted, also in flight, or stopped; the executor may fail. Returns it,
    what was asked, the number of deadlocks, and of each iteration the blocks that could be found and that nobody held."""
    rng = random.Random(f'{seed} {policy} {in_flight} {kind} {preemption}')
    size, chunked, paged = rng.choice([1, 3, 4]), policy in ('continuous', 'static'), kind == 'paged'
    blocks = rng.choice([24, 40, 80]) // size + 8
    engine = build(blocks, size, rng.choice([3, 4, 6]), rng.choice([8, 17, 64]) if chunked else 64, policy, in_flight, kind,
                   rng.choice([0, 4, 12, 40]) * paged, paged and rng.random() < .5, rng.choice([None, None, 9]) if paged else None,
                   preemption=preemption, watermark=rng.choice([0, .05, .2]))
    s, executor, found, asked, deadlocks = engine.scheduler, engine.executor, {}, [], 0
    execute, fails, one = executor.execute, rng.choice([0, 0, .02]), in_flight == 1        # with more, which plan failed is not told

    def answer(plan):
        if one and rng.random() < fails: raise OSError('the device is gone')
        if one and rng.random() < .03 and s._requests: engine.abort(rng.choice(list(s._requests)))
        result = execute(plan)
        if one and len(plan.due) and rng.random() < fails:
            i = rng.randrange(len(plan.due))
            result.tokens[i] = -1
            executor.tokens[int(plan.due[i])].pop()
        return result
    executor.execute, make = answer, s.plan

    def plan():
        made = make()
        if paged: found[made.iteration] = {b for b in range(blocks) if s.memory.allocator.kept[b] and not s.memory.allocator.ref_counts[b]}
        return made
    s.plan = plan

    def step():
        if rng.random() < .05 and s._requests: engine.abort(rng.choice(list(s._requests)))
        if rng.random() < .04 and not s._flights and (lone := [g for g in s.running_groups() if not g.search and not g.unforked]):
            s.finish(rng.choice(lone).live[0], 'cut')
        try: engine.step()
        except OSError: pass
        except DeadlockError:
            engine.abort(list(s._requests)[-1])
            return 1
        return 0
    starts = [[rng.randrange(50) for _ in range(16)] for _ in range(2)]
    for i in range(12):
        asked.append(any_request(rng, i, starts))
        try: engine.add(asked[-1])
        except InvalidRequestError: continue
        for _ in range(rng.randrange(4)): deadlocks += step()
    for _ in range(600):
        if not engine.has_unfinished: break
        deadlocks += step()
    assert not engine.has_unfinished
    return engine, asked, deadlocks, found


def plain(trace):
    "Plans and events as one compares them; parameters are the same objects' fields, written out."
    return [p.to_dict() for p in trace.plans], [(e.iteration, e.kind, e.request_id, e.seq_id, e.detail) for e in trace.events]


RUNS = [(seed, policy, 1, *memory) for policy in sorted(policies) for memory in MEMORIES for seed in range(2)]
RUNS += [(0, policy, k, *memory) for policy in sorted(policies) for k in (2, 3) for memory in MEMORIES[::2]]


@pytest.mark.parametrize('policy', sorted(policies))
def test_again_it_is_the_same(policy):
    compared = 0
    for run in [r for r in RUNS if r[1] == policy]:
        engine, asked, deadlocks, _ = random_run(*run)
        if deadlocks: continue                      # a plan that was never made leaves no trace, but may have asked for memory
        again, trace = rerun(engine.trace, asked), engine.trace
        assert plain(again) == plain(trace), run
        assert again.meta['invented'] == 0 and again.meta['memory'] == trace.meta['memory']
        compared += 1
    assert compared > (4 if policy == 'unreserved' else 12)


def test_waiting_running_and_held_are_what_the_figure_shows():
    for run in [r for r in RUNS if r[2] == 1][::3]:
        engine, asked, _, _ = random_run(*run)
        shown = {}
        for c in history(engine.trace).cells:
            seen = shown.setdefault((c.iteration, c.request_id), set())
            seen.add({'prefill': 'computes', 'decode': 'computes'}.get(c.kind, c.kind))
        aborted = {(e.iteration, e.request_id) for e in engine.trace.events if e.kind == 'abort'}
        nothing = {r.request_id for r in asked if r.params.max_tokens == 0}                     # some of their samples end at once
        for told in whys(engine.trace, asked):
            for r, w in ((r, w) for r, w in told.items() if r not in nothing):
                seen = shown.get((w.iteration, r), set())
                if w.state == 'running': assert 'computes' in seen, w
                elif w.state in ('waiting', 'out') and w.reason != 'late':
                    assert seen <= {'waiting', 'held'} and (seen or (w.iteration, r) in aborted), (run, str(w))
                elif w.state == 'held': assert 'computes' not in seen and seen, (run, str(w))


# what if it had had what it lacked

class Tried:
    "The run again until an iteration, with blocks and seats kept aside; then it may be given some of them."
    def __init__(self, run, iteration, spare=0):
        engine, asked, _, _ = random_run(*run)
        trace, self.lives = Trace('full', **engine.trace.meta), Lives(engine.trace, asked)
        trace.__dict__.update({k: v for k, v in engine.trace.__dict__.items() if k != 'meta'})
        pool, self.iteration = trace.meta['memory'], iteration
        trace.meta['memory'] = pool | {'num_blocks': pool['num_blocks'] + spare}
        again = self.again = Again(trace, asked)
        s = self.s = again.engine.scheduler
        s.memory.num_blocks, s.watermark_blocks = pool['num_blocks'], engine.scheduler.watermark_blocks
        self.paged = s.memory.on_demand
        self.kept = (s.memory.allocator.allocate_many(spare) if self.paged else s.memory.allocator.take(spare)) if spare else []
        self.spare, self.ear = spare, _Listener(again)
        while s.iteration < iteration: again.step()

    def give(self, blocks):
        if self.paged: self.s.memory.allocator.free_many(self.kept[:blocks])
        else: self.s.memory.allocator.give_back(0, blocks)
        return self

    def then(self, request_id):
        "What it does in the iteration, after all."
        self.ear.moments.clear()
        self.again.step()
        [m] = [m for m in self.ear.moments if m.iteration == self.iteration]
        return why_at(m, request_id, self.lives)


def lets_in(w): return w.state not in ('waiting', 'out')


def check_memory(run, w, who, paged):
    lack = w.needed + w.kept - w.free
    if paged or lack > 0:
        assert lack > 0, w
        less = Tried(run, w.iteration, lack).give(lack - 1) if lack > 1 or paged else Tried(run, w.iteration)
        assert not lets_in(less.then(who)), f'{w}, and with {lack - 1} more it comes in'
    spare = lack if paged else 400                  # in one piece, and others come in before it
    assert lets_in(Tried(run, w.iteration, spare).give(spare).then(who)), f'{w}, and with {spare} more it does not come in'


def check_seats(run, w, who):
    got, samples = [], next(r.params.num_seqs for r in random_run(*run)[1] if r.request_id == who)
    for more in range(samples + 1):
        t = Tried(run, w.iteration)
        t.s.max_num_seqs, t.s.num_seats = t.s.max_num_seqs + more, t.s.num_seats + more
        got.append(t.then(who).reason == 'seats')
    assert got[0] and not got[-1] and got == sorted(got, reverse=True), w


def check_budget(run, w, who):
    t = Tried(run, w.iteration)
    t.s.max_num_batched_tokens += 1000
    assert t.then(who).reason != 'budget', w


def check_reservation(run, w, who):
    lack = w.needed - w.free
    for less in (lack, lack - 1):
        t = Tried(run, w.iteration)
        t.s.policy.n_rsrv -= less * t.s.memory.block_size
        assert (t.then(who).reason == 'policy') == (less < lack), w


def check_others_gone(run, w, who):
    "A batch that is under way, a prefix that is being computed, somebody who is swapped out: without these it is no reason."
    t = Tried(run, w.iteration)
    for r in w.others: t.again.before.setdefault(w.iteration, []).append(Outside('abort', r))
    got = t.then(who)
    assert (got.reason, got.others) != (w.reason, w.others), w


def check_thrown_out(run, w, who):
    "With blocks and seats enough nobody is thrown out; with one block less than the one in need asked for, somebody still is."
    t = Tried(run, w.iteration, 400).give(400)
    t.s.max_num_seqs, t.s.num_seats = t.s.max_num_seqs + 10, t.s.num_seats + 10
    assert t.then(who).state != 'out', w
    if w.reason == 'room':
        lack = w.needed - w.free
        got = Tried(run, w.iteration, 400).give(lack - 1)
        got.then(who)
        assert any(e.kind == 'preempt' and e.iteration == w.iteration for e in got.again.engine.trace.events), w


def check_stalled(run, w, who):
    assert Tried(run, w.iteration, 400).give(400).then(who).state == 'running', w


@pytest.mark.parametrize('policy', sorted(policies))
def test_every_reason_is_tried(policy):
    tried, waits, unknown = Counter(), 0, 0
    for run in [r for r in RUNS if r[1] == policy and r[2] == 1]:
        engine, asked, deadlocks, _ = random_run(*run)
        if deadlocks: continue
        paged, here, buddy = run[3] == 'paged', Counter(), run[3] == 'buddy'
        for told in whys(engine.trace, asked):
            done = set()
            for r, w in told.items():
                waits += w.state in ('waiting', 'out', 'held')
                unknown += w.reason == 'unknown'
                who, key = w.head or r, (w.state, w.reason)
                if (key, who) in done or here[key] >= 2: continue
                done.add((key, who))
                if w.state == 'waiting' and w.reason == 'memory' and not buddy: check_memory(run, w, who, paged)
                elif w.state == 'waiting' and w.reason == 'seats': check_seats(run, w, who)
                elif w.reason == 'budget' and w.state == 'waiting': check_budget(run, w, who)
                elif w.reason == 'policy' and policy == 'orca': check_reservation(run, w, who)
                elif w.reason in ('batch', 'prefix', 'policy'): check_others_gone(run, w, r)
                elif w.state == 'out' and paged: check_thrown_out(run, w, r)
                elif key == ('held', 'memory'): check_stalled(run, w, r)
                else: continue
                here[key] += 1
        tried += here
    print(policy, dict(tried), f'{unknown} of {waits} could not be told')
    assert waits > 200 and unknown < .02 * waits
    wanted = dict(continuous=[('waiting', 'memory'), ('waiting', 'seats'), ('out', 'room'), ('out', 'displaced')],
                  static=[('waiting', 'batch'), ('waiting', 'prefix')], orca=[('waiting', 'policy'), ('waiting', 'seats')],
                  vllm=[('waiting', 'memory'), ('out', 'room')], unreserved=[('waiting', 'memory')])
    assert set(wanted[policy]) <= tried.keys()


# blocks

def test_holders_are_what_the_memory_says():
    free = shared = findable = 0
    for run in [r for r in RUNS if r[2] == 1 and r[4] != 'swap']:
        engine, asked, deadlocks, found = random_run(*run)
        trace, num_blocks = engine.trace, engine.scheduler.memory.num_blocks
        if deadlocks: continue
        for block in range(0, num_blocks, 11):
            life = stays(trace, block, asked)
            assert [s.start for s in life[1:]] == [s.stop for s in life[:-1]] or len(trace.plans) != trace.iteration
            by = {i: s for s in life for i in range(s.start, s.stop)}
            for plan, tables in replay(trace):
                s, holders = by[plan.iteration], {i for i, table in tables.items() if block in table}
                assert len(s.holders) == len(holders) and all(len(s.filled) == s.stop - s.start for s in life)
                assert s.filled[plan.iteration - s.start] <= trace.meta['memory']['block_size']
                if not holders: assert s.findable == (block in found.get(plan.iteration, ())), (run, block, plan.iteration)
                free, shared, findable = free + (not holders), shared + (len(holders) > 1), findable + s.findable
    assert min(free, shared, findable) > 20, (free, shared, findable)


# sentences

def small(blocks=6, requests=(('a', 8, 6), ('b', 7, 4), ('c', 9, 3)), seats=4, budget=32, watermark=0, **options):
    memory = BlockManager(blocks, 4)
    scheduler = Scheduler(memory, seats, budget, 64, watermark=watermark, **options)
    engine = Engine(scheduler, ScriptedExecutor(num_blocks=blocks, block_size=4), Trace('full'), clock=None)
    engine.run([Request(x, np.arange(n) + 100 * i, SamplingParams(max_tokens=m)) for i, (x, n, m) in enumerate(requests)])
    return engine.trace


def test_sentences():
    trace = small()
    assert str(why(trace, 'c', 0)) == ('c waited in iteration 0: first in line, it needs 3 blocks for 9 tokens, and 2 were free; '
                                       'c ran from iteration 4 on, after b ended in 3.')
    assert str(why(trace, 'a', 0)) == 'In iteration 0, a computed tokens [0, 8) of 8 of its prompt, and got the next.'
    assert str(why(trace, 'b', 1)) == 'In iteration 1, b decoded: token 7 in, the 2nd of its answer out.'
    assert str(why(trace, 'b', 5)) == 'b was over in iteration 5: it ended in iteration 3 (length).'
    assert str(who_held(trace, 0, 2)) == 'Block 0 was held in iteration 2 by a (entry 0) in [0, 6), 4 of 4 slots filled.'
    assert str(who_held(trace, 2)).startswith('Block 2: b (entry 0) in [0, 4), 4 of 4 slots filled')
    change = one_more_block(trace)
    assert change.starts == {'c': (4, 0)} and change.iterations == (8, 6)
    assert str(change) == 'With 1 more block (7): 6 iterations instead of 8; c starts in 0 instead of in 4; c ends in 5 instead of in 7.'
    roomy = one_more_block(small(40))
    assert str(roomy) == 'With 1 more block (41): nothing changes: every request starts and ends in the same iteration.' and not roomy.ends
    assert what_if(trace, max_num_seqs=1).iterations == (8, 13)
    assert plain(what_if(small(7), num_blocks=6).trace) == plain(trace)


def test_from_a_file(tmp_path):
    trace = small()
    trace.to_json(tmp_path/'trace.json')
    stored = Trace.from_json(tmp_path/'trace.json')
    assert [list(map(str, told.values())) for told in whys(stored)] == [list(map(str, told.values())) for told in whys(trace)]
    assert plain(rerun(stored)) == plain(trace)


def test_a_run_of_others_settings_is_theirs():
    "A rerun with the settings of another run of the same requests is that run."
    for options in dict(policy='static'), dict(max_num_seqs=2), dict(max_num_batched_tokens=5), dict(watermark=.3):
        names = {'max_num_seqs': 'seats', 'max_num_batched_tokens': 'budget'}
        other = small(**{names.get(k, k): v for k, v in options.items()})
        assert plain(rerun(small(), **options)) == plain(other), options
    contiguous = rerun(small(40), memory='contiguous', reserve='request')
    assert contiguous.meta['memory']['kind'] == 'ContiguousMemory' and plain(rerun(contiguous)) == plain(contiguous)


def test_what_the_trace_does_not_tell():
    engine = Engine(Scheduler(BlockManager(6, 4), 2, 32, 64, watermark=0), ScriptedExecutor(), Trace('full'), clock=None)
    asked = [Request(x, np.arange(n) + 100 * i, SamplingParams(max_tokens=20)) for i, (x, n) in enumerate([('a', 8), ('b', 7), ('c', 9)])]
    engine.run(asked, max_steps=4)
    trace = engine.trace
    assert why(trace, 'c', 2).reason == 'unknown' and 'never started' in str(why(trace, 'c', 2))
    told = why(trace, 'c', 2, requests=asked)
    assert told.reason == 'seats' and told.others == ('a', 'b') and told.until is None
    with pytest.raises(ConfigError, match="'c' never started.*requests="): rerun(trace)
    assert plain(rerun(trace, requests=asked)) == plain(trace)
    longer = what_if(trace, requests=asked, max_num_seqs=1)             # breaks off where the trace does
    assert longer.iterations == (4, 4) and 'b starts never' in str(longer)


def test_what_cannot_be_answered():
    trace = small()
    with pytest.raises(KeyError, match="request 'z' is not in this trace"): why(trace, 'z', 0)
    with pytest.raises(KeyError, match='iteration 99 was not recorded'): why(trace, 'a', 99)
    with pytest.raises(KeyError, match='block 6 is none of this pool: it has 0 to 5'): who_held(trace, 6)
    with pytest.raises(KeyError, match='iteration 99 was not recorded'): who_held(trace, 1, 99)
    with pytest.raises(ConfigError, match='level "full"|level="full"'): why(Trace('requests'), 'a', 0)
    with pytest.raises(ConfigError, match='does not say with what settings'): rerun(Trace('full'))
    with pytest.raises(ConfigError, match='blocks=3 is no setting of paged memory'): rerun(trace, blocks=3)
    with pytest.raises(ConfigError, match="it is 'paged' or 'contiguous'"): rerun(trace, memory='virtual')
    with pytest.raises(ConfigError, match="policy 'nobody' is not known"): rerun(trace, policy='nobody')
    with pytest.raises(KeyError, match="it has a, b and c"): why(trace, 'z', 0)
    for ask in lambda: why(trace, 'a', -1), lambda: who_held(trace, 1, 8):
        with pytest.raises(KeyError, match='was not recorded in this trace: it has 0 to 7'): ask()
    for ask in (lambda: why(trace, 'a', '1'), lambda: why(trace, 'a', 1.5), lambda: who_held(trace, '1'), lambda: who_held(trace, 1, .5),
                lambda: one_more_block(trace, .5)):
        with pytest.raises(ConfigError, match='is not a whole number'): ask()
    for blocks in 0, -1, -6:
        with pytest.raises(ConfigError, match=f'blocks={blocks}: at least 1;'): one_more_block(trace, blocks)
    with pytest.raises(ConfigError, match='no change is named'): what_if(trace)
    for level, match in dict(full='does not say with what settings', requests='level="full"', off='level="full"').items():
        for ask in lambda: who_held(Trace(level), 0), lambda: one_more_block(Trace(level)):
            with pytest.raises(ConfigError, match=match): ask()
    idle = Engine(Scheduler(BlockManager(4, 4), 2, 32, 64), ScriptedExecutor(), Trace('full'), clock=None)
    for iteration in None, 0:
        with pytest.raises(ConfigError, match='no iteration yet'): who_held(idle.trace, 0, iteration)
    trace.events.append(trace.events[0])
    with pytest.raises(ConfigError, match="'a' was used twice"): why(trace, 'a', 0)


def test_nobody_there():
    engine = Engine(Scheduler(BlockManager(4, 4), 2, 32, 64), ScriptedExecutor(), Trace('full'), clock=None)
    for _ in range(2): engine.step()
    assert plain(rerun(engine.trace)) == plain(engine.trace) and len(rerun(engine.trace)) == 2
    assert list(whys(engine.trace)) == [{}, {}] and who_held(engine.trace, 0).stays == [(0, 2, (), (0, 0), False)]


def test_a_reservation_holds_back():
    trace = small(8, (('a', 8, 8), ('b', 8, 12), ('c', 4, 2)), budget=64, policy='orca')
    held = '; policy {!r} would reserve 5 blocks for it, and 4 of 8 are reserved; '.format('orca')
    assert str(why(trace, 'b', 0)) == f'b waited in iteration 0: first in line{held}b ran from iteration 8 on, after a ended in 7.'
    assert "it stands behind b, and policy 'orca' would reserve 5 blocks for b, and 4 of 8 are" in str(why(trace, 'c', 0))

    class Alone(Policy):
        name = 'alone'
        def may_start(self, scheduler, group): return not scheduler.num_running
    policies['alone'] = Alone
    try: assert "first in line; policy 'alone' does not let it start; " in str(why(small(40, policy='alone'), 'b', 0))
    finally: del policies['alone']


def test_places_of_those_who_ended_in_the_plan():
    memory = BlockManager(8, 1)
    engine = Engine(Scheduler(memory, 1, 32, 32, 'vllm', watermark=0), ScriptedExecutor(num_blocks=8), Trace('full'), clock=None)
    engine.add(Request('a', range(6), SamplingParams(max_tokens=4)))
    engine.step()
    engine.run([Request('b', [7], SamplingParams(max_tokens=2))])
    told = why(engine.trace, 'b', 3)
    assert str(told) == ('b waited in iteration 3: first in line, it needs 1 seat, and 1 of 1 in this plan is taken: 1 sequence of a ended '
                         'for want of memory while it was made, and keeps its place; b ran from iteration 4 on.')
    assert told.reason == 'seats' and told.others == ('a',) and why(engine.trace, 'b', 2).others == ('a',)


def test_only_the_first_are_looked_at():
    memory = BlockManager(20, 4, prefix_caching=True)
    engine = Engine(Scheduler(memory, 1, 8, 64), ScriptedExecutor(num_blocks=20, block_size=4), Trace('full'), clock=None)
    engine.run([Request(x, [*range(18), i], SamplingParams(max_tokens=3)) for i, x in enumerate('ab')] + [Request('c', [99] * 4)], 3)
    told = why(engine.trace, 'c', 1, [Request('b', [*range(18), 1]), Request('c', [99] * 4)])
    assert told.reason == 'line' and told.head is None and 'only the first in line is looked at, and it waits for a prefix' in str(told)


# requests that never started

def cut_short(requests, memory, seats, aborted, steps=2):
    "A run in which somebody is aborted before he started."
    engine = Engine(Scheduler(memory, seats, 8, 64, watermark=0), ScriptedExecutor(), Trace('full'), clock=None)
    for r in requests: engine.add(r)
    for _ in range(steps): engine.step()
    engine.abort(aborted)
    engine.run()
    assert all(s.request_id != aborted for p in engine.trace.plans for s in p.new)
    return engine.trace


def test_stand_ins_stand_where_they_stood():
    "A stand-in has the priority of whom it stands for, and is not refused where he was not."
    ask = lambda x, m=6, **more: Request(x, [ord(x)] * 4, SamplingParams(max_tokens=m), **more)
    urgent = cut_short([ask('a'), ask('c', priority=1000), ask('b', 2)], BlockManager(20, 4), 1, 'c', 7)
    roomy = cut_short([ask('a'), ask('c'), ask('b')], ContiguousMemory(8, 4, 64, 'request'), 1, 'c')
    for trace in urgent, roomy:
        told = [w for all_ in whys(trace) for w in all_.values()]
        assert all(w.state != 'unknown' for w in told) and {w.state for w in told if w.request_id == 'b'} >= {'waiting', 'running'}


def test_who_has_to_be_given_is_named():
    begin = list(range(16))                             # b waits for a's prefix, and c comes in before it
    asked = [Request(x, prompt, SamplingParams(max_tokens=6)) for x, prompt in (('a', begin + [1]), ('b', begin + [2]), ('c', [99] * 4))]
    trace = cut_short(asked, BlockManager(20, 4, prefix_caching=True), 4, 'b', 1)
    hint = 'The trace has no prompt of b, which never started: give it, as requests=[...].'
    assert hint in str(why(trace, 'c', 1)) and why(trace, 'c', 1, [asked[1]]).state == 'running'
    with pytest.raises(ConfigError) as e: who_held(trace, 0)
    assert hint in str(e.value) and who_held(trace, 0, requests=[asked[1]]).stays[0].holders


def test_deadlocks_do_not_leak():
    "Where the run again comes to a standstill, which this one did not, that is said."
    class Shortest(Policy):
        def place(self, scheduler, request): return request.prompt_len
    scheduler = Scheduler(BlockManager(20, 4, prefix_caching=True), 1, 32, 64, Shortest())
    engine = Engine(scheduler, ScriptedExecutor(), Trace('full'), clock=None)
    for x, n in ('long', 9), ('short', 3): engine.add(Request(x, range(n), SamplingParams(max_tokens=4)))
    engine.step()
    engine.abort('long')
    engine.run()
    with pytest.raises(ConfigError, match='in iteration 0 cannot be told.*no prompt of long, .* give it'): who_held(engine.trace, 0)
    assert why(engine.trace, 'short', 0).state == 'unknown'


def test_seconds_are_the_same():
    "Of the same plans; of others it is their mean."
    memory = BlockManager(6, 4)
    engine = Engine(Scheduler(memory, 4, 32, 64, watermark=0), ScriptedExecutor(seconds_per_token=.003), Trace('full'), clock=None)
    engine.run([Request(x, np.arange(n), SamplingParams(max_tokens=m)) for x, n, m in (('a', 8, 6), ('b', 7, 4), ('c', 9, 3))])
    trace, again = engine.trace, rerun(engine.trace)
    assert len(set(trace['seconds'].round(6))) > 2
    np.testing.assert_allclose(again['seconds'], trace['seconds'])
    np.testing.assert_allclose([e.time for e in again.events], [e.time for e in trace.events])
    other = rerun(trace, num_blocks=7)
    np.testing.assert_allclose(other['seconds'][0], trace['seconds'].mean())


def test_another_policy_of_the_same_name_is_noticed():
    class Picky(Policy):
        def may_start(self, scheduler, group): return not scheduler.num_running
    trace = small(40, policy=Picky())
    told = [why(trace, 'b', i).reason for i in range(4)]
    assert set(told) == {'unknown'}, told


def test_refused():
    engine = Engine(Scheduler(BlockManager(4, 4), 2, 32, 64), ScriptedExecutor(), Trace('full'), clock=None)
    with pytest.raises(InvalidRequestError): engine.add(Request('big', range(30)))
    engine.run([Request('a', [1, 2, 3], SamplingParams(max_tokens=2))])
    assert why(engine.trace, 'big', 1).state == 'refused' and plain(rerun(engine.trace)) == plain(engine.trace)
    bigger = one_more_block(engine.trace, 8, requests=[Request('big', range(30), SamplingParams(max_tokens=2))])
    assert bigger.starts == {'big': (None, 0)}
