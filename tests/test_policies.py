"""Every policy with one to three plans in flight, over every memory, at random; Orca's algorithm, vLLM's rules, deadlocks, the pipeline's
clock, and whole systems in the simulator."""
import random
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from drive import CheckedExecutor, events, request
from drive import make as make_plain

from pagedlm.core import DeadlockError, InvalidRequestError, Request, RequestTooLargeError, SamplingParams, SchedulerError, Status
from pagedlm.memory.block_manager import BlockManager, check_pool
from pagedlm.memory.contiguous import ContiguousMemory
from pagedlm.scheduling.cost_model import Linear
from pagedlm.scheduling.engine import Engine, counting_script, hold_interrupts
from pagedlm.scheduling.policies import OrcaPolicy, Policy, VLLMPolicy, policies
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.scheduling.simulator import System, simulate, systems
from pagedlm.scheduling.workloads import Workload, random_workload
from pagedlm.trace import Trace

EOS = 7


def script(tokens, index):
    "A short vocabulary, so that end tokens come and samples of one request end at different times."
    return counting_script(tokens, index) % 23


def oracle(request, index, max_model_len):
    "What one sample gets when nobody else is there: tokens and finish reason."
    p, tokens = request.params, request.prompt_token_ids.tolist()
    stop_len = min(max_model_len, len(tokens) + p.max_tokens)
    while len(tokens) < stop_len:
        tokens.append(script(np.array(tokens, np.int32), index))
        if tokens[-1] == EOS and not p.ignore_eos and len(tokens) - request.prompt_len > p.min_tokens: return tokens, 'stop'
    return tokens, 'length'


class InFlight(CheckedExecutor):
    "Also: no plan has more than max_num_seqs sequences, and no sequence is in two plans in flight."
    def execute(self, plan):
        s = self.scheduler
        assert plan.num_chunks <= s.max_num_seqs, f'{plan.num_chunks} sequences in one plan, and max_num_seqs={s.max_num_seqs}'
        assert len(s._flights) <= s.in_flight
        flying = [r for f in s._flights for r in f.rows.tolist()]
        assert len(flying) == len(set(flying)), 'a sequence is in two plans in flight'
        return super().execute(plan)


class AnyVictim(Policy):
    "Throws out whoever the dice say, or nobody; the more often nobody, the longer others wait for memory."
    name = 'any'
    def __init__(self, seed, chunked=True): self.dice, self.chunked = random.Random(seed), chunked
    def victim(self, running): return self.dice.choice([*running, None])
    def may_start(self, scheduler, group): return not scheduler.num_running or self.dice.random() < .8


def build(blocks, size=4, seats=4, budget=64, policy='continuous', in_flight=1, kind='paged', swap=0, cached=False, window=None,
          max_len=64, **options):
    "An engine over checked memory, with end tokens and simulated time. kind: 'paged', or the allocator of contiguous memory."
    memory = BlockManager(blocks, size, swap, cached) if kind == 'paged' else ContiguousMemory(blocks, size, max_len, 'request', kind)
    executor = InFlight(script, blocks, size, memory.num_swap_blocks, window=window)
    executor.scheduler = Scheduler(memory, seats, budget, max_len, policy, eos_token_ids=(EOS,), window=window,
                                   in_flight=in_flight, **options)
    executor.plans = []
    return Engine(executor.scheduler, executor, Trace('full'), clock=None)


def check(engine):
    "The pool and the account of seats, whatever is in flight; Orca's slots."
    s = engine.scheduler
    check_pool(s.memory)
    assert sum(len(g.live) for g in s.running_groups()) + len(s._held) == s._seats <= s.num_seats
    assert s.num_swapped == sum(g.status == Status.SWAPPED for g in s._waiting)
    assert [g.key for g in s._waiting] == sorted(g.key for g in s._waiting)
    if isinstance(s.policy, OrcaPolicy):
        n_slots = s.policy.n_slots or s.memory.num_blocks * s.memory.block_size
        assert s.num_preemptions == 0 and s.policy.n_rsrv == sum(s.policy._reserved.values()) <= n_slots
        assert s.policy._reserved.keys() == {g.request.request_id for g in s.running_groups()}


def run(engine, most=1000, each=lambda outputs: None):
    "Step until all have ended, in so many steps at most."
    for _ in range(most):
        if not engine.has_unfinished: return
        each(engine.step())
        check_pool(engine.scheduler.memory)
    raise AssertionError(f'not done after {most} steps')


def finish(engine, most=3000, step=None):
    "Step until all have ended; a deadlock is ended by aborting the request that came last. The number of deadlocks is returned."
    s, deadlocks = engine.scheduler, 0
    for _ in range(most):
        if not engine.has_unfinished: break
        try: (step or engine.step)()
        except DeadlockError:
            deadlocks += 1
            nobody_can_go_on(s)
            engine.abort(list(s._requests)[-1])
        check(engine)
    left = f'{s.num_running} run, {s.num_waiting} wait, {s.num_swapped} are swapped out'
    assert not engine.has_unfinished, f'not done after {most} steps: {left}'
    engine.executor.broken = False
    for _ in range(s.in_flight): engine.step()                     # what is in flight, and who is to be forgotten
    assert s.memory.num_free_blocks == s.memory.num_blocks
    assert not (s._group or s._pending or s._leaders or s._searches or s._scored or s._held or s._pinned or s._seats)
    assert len(s.rows._free) == len(s.rows.num_tokens) and not s.rows.busy[s._running].any()
    assert not (engine.executor.tokens or engine.executor.tables)
    if isinstance(s.policy, OrcaPolicy): assert s.policy.n_rsrv == 0 and not s.policy._reserved
    return deadlocks


def nobody_can_go_on(s):
    "What DeadlockError says: everyone who runs needs blocks that are not there, or nobody runs at all."
    assert not isinstance(s.policy, VLLMPolicy) and s.policy.name not in ('continuous', 'static'), 'who preempts has no deadlock'
    a, free = s.rows, s.memory.num_free_blocks
    for r in s._running.tolist():
        assert not a.busy[r]
        if a.num_computed_tokens[r] < a.num_tokens[r]: assert a.num_computed_tokens[r] >= s.memory.writable[r], 'this one could go on'
    if len(s._running): assert free == 0 or any(len(g.holding) > 1 for g in s.running_groups())
    assert len(s._running) or s._waiting


def check_ended(seqs, max_model_len):
    "By itself: the oracle's tokens and reason. Otherwise: a beginning of them."
    for s in seqs:
        p = s.request.params
        if p.beam_width or p.max_tokens == 0: continue
        tokens, reason = oracle(s.request, s.index, max_model_len)
        have = s.token_ids.tolist()
        if s.finish_reason in ('stop', 'length'): assert (have, s.finish_reason) == (tokens, reason), s
        else: assert s.finish_reason in ('memory', 'abort', 'error', 'cut') and have == tokens[:len(have)], s


def any_request(rng, i, starts):
    prompt = rng.choice(starts)[:rng.randrange(16)] + [rng.randrange(50) for _ in range(rng.randrange(1, 10))]
    kind, new = rng.choice(['one', 'one', 'one', 'samples', 'best', 'beams', 'scored', 'none']), rng.randrange(1, 30)
    params = dict(one=dict(ignore_eos=rng.random() < .5), samples=dict(n=rng.choice([2, 3])), best=dict(n=1, best_of=3),
                  beams=dict(beam_width=3, n=2, temperature=0), scored=dict(prompt_logprobs=0, n=rng.choice([1, 2])), none=dict())[kind]
    if kind in ('scored', 'none'): new = 0
    return Request(f'{i}', prompt, SamplingParams(max_tokens=new, **params), priority=rng.choice([0, 0, 0, 1, 3]))


def at_random(seed, policy, in_flight, kind, preemption):
    "Requests of all kinds come while others run; some are aborted, at any moment; the executor may fail, and a token may be no number."
    rng = random.Random(f'{seed} {policy} {in_flight} {kind} {preemption}')
    size, chunked = rng.choice([1, 3, 4]), policy in ('continuous', 'static', 'any')
    blocks = rng.choice([24, 40, 80]) // size + 8
    paged = kind == 'paged'
    rule = AnyVictim(seed, rng.random() < .5) if policy == 'any' else policy
    budget = rng.choice([8, 17, 64]) if chunked and policy != 'any' else 64
    engine = build(blocks, size, rng.choice([3, 4, 6]), budget, rule, in_flight, kind,
                   rng.choice([0, 4, 12, 40]) * paged, paged and rng.random() < .5, rng.choice([None, None, 9]) if paged else None,
                   preemption=preemption, watermark=rng.choice([0, .05]))
    s, executor, everyone = engine.scheduler, engine.executor, []
    execute, fails = executor.execute, rng.choice([0, 0, .02])

    def sometimes(plan):
        if not executor.broken: return execute(plan)
        if rng.random() < fails: raise OSError('the device is gone')
        result = execute(plan)
        if len(plan.due) and rng.random() < 2 * fails:             # no number among the logits
            i = rng.randrange(len(plan.due))
            result.tokens[i] = -1
            executor.tokens[int(plan.due[i])].pop()
        return result
    executor.execute, executor.broken = sometimes, True

    def step():
        if rng.random() < .05 and s._requests: engine.abort(rng.choice(list(s._requests)))      # with in_flight - 1 plans on their way
        if rng.random() < .04 and not s._flights and (lone := [g for g in s.running_groups() if not g.search and not g.unforked]):
            s.finish(rng.choice(lone).live[0], 'cut')
        try:
            if rng.random() < .05 and s._requests and len(engine._flying) < in_flight:
                engine._launch()
                engine.abort(rng.choice(list(s._requests)))                                     # with one more plan on its way
            engine.step()
        except OSError: assert not s.num_running and not s._flights
    starts = [[rng.randrange(50) for _ in range(16)] for _ in range(2)]
    for i in range(12):
        try: everyone.append(engine.add(any_request(rng, i, starts)))
        except InvalidRequestError: continue
        for _ in range(rng.randrange(4)):
            try: step()
            except DeadlockError:
                nobody_can_go_on(s)
                engine.abort(list(s._requests)[-1])
            check(engine)
    deadlocks = finish(engine, step=step)
    for seqs in everyone: check_ended(seqs, s.max_model_len)
    return deadlocks


MEMORIES = [('paged', 'auto'), ('paged', 'recompute'), ('paged', 'swap'), ('first_fit', 'recompute'), ('buddy', 'recompute')]


@pytest.mark.parametrize('kind,preemption', MEMORIES)
@pytest.mark.parametrize('in_flight', [1, 2, 3])
@pytest.mark.parametrize('policy', [*sorted(policies), 'any'])
def test_everything_at_random(policy, in_flight, kind, preemption):
    "Whoever ends by itself has the same tokens as alone; nothing leaks; a deadlock is one, and only a policy that preempts nobody has any."
    deadlocks = sum(at_random(seed, policy, in_flight, kind, preemption) for seed in range(8))
    assert policy in ('unreserved', 'any') and kind == 'paged' or not deadlocks


def test_the_dice_meet_a_deadlock():
    "The test above is no test of deadlocks if none comes."
    assert sum(at_random(seed, 'unreserved', k, 'paged', 'auto') for seed in range(12) for k in (1, 2)) > 5



def test_a_request_aborted_in_flight_is_not_forked():
    "Its leader's prompt is done in the plan in flight; the next plan must not fork its samples, though its rows are still pinned."
    engine = build(40, in_flight=2, budget=4)
    engine.add(request('g', 8, 6, n=3))
    engine._launch()                                              # the first half of the prompt
    engine.add(request('o', 3, 6))
    for _ in range(20):
        if any(len(f.forks) for f in engine.scheduler._flights): break
        engine.step() if len(engine._flying) == 2 else engine._launch()
    engine.abort('g')
    finish(engine)
    assert sum(len(p.forks) for p in engine.executor.plans) == 2


@pytest.mark.parametrize('in_flight', [2, 3])
def test_a_batch_that_has_ended_is_given_back(in_flight):
    "hold_finished: there is always another plan in flight, though an empty one."
    engine = build(40, seats=2, policy='static', in_flight=in_flight)
    seqs = [engine.add(request(f'{i}', 5, 6)) for i in range(9)]
    finish(engine, 100)
    for s in seqs: check_ended(s, 64)


@pytest.mark.parametrize('in_flight', [2, 3])
def test_who_outgrows_the_pool_alone_ends_in_flight_too(in_flight):
    engine = make_plain(4, in_flight=in_flight)
    [a] = engine.add(request('a', 5, 50))
    run(engine, 100)
    assert a.finish_reason == 'memory' and a.num_tokens == 17 and engine.scheduler.memory.num_free_blocks == 4


def test_who_is_thrown_out_had_no_seat_in_this_plan():
    "Whoever is displaced for the head of the line may be one whose turn is another plan; then nobody more fits into this one."
    engine = build(12, seats=2, in_flight=2, budget=8, watermark=0)
    asked = (0, 14, 9, 5, 2), (1, 9, 1, 5, 1), (3, 14, 9, 0, 1), (8, 9, 9, 5, 1), (9, 1, 1, 0, 1)
    for i, (at, length, new, priority, n) in enumerate(asked):
        while engine.scheduler.iteration < at: engine.step()
        engine.add(Request(f'{i}', range(i, i + length), SamplingParams(max_tokens=new, n=n, ignore_eos=True), priority=priority))
    finish(engine)
    assert engine.scheduler.num_preemptions


def test_who_needs_memory_does_not_stop_others_in_line():
    "One sequence per plan: the first waits for a block, and the second, who has one, goes on and ends."
    engine = make_plain(5, seats=1, in_flight=2, policy='unreserved', watermark=0, budget=256)
    [a], [b] = engine.add(request('a', 8, 5)), engine.add(request('b', 9, 3))
    run(engine, 40)
    assert (a.finish_reason, b.finish_reason) == ('length', 'length') and a.num_tokens == 13


def test_samples_that_need_a_block_each_do_not_wait_for_two_at_once():
    "Two samples need a block each; those who come later, one after the other, would take every block that is given back."
    engine = make_plain(12, seats=2, in_flight=2, policy='unreserved', watermark=0, budget=256)
    a = engine.add(request('a', 8, 20, n=2))
    for i in range(70):
        if engine.scheduler.num_waiting < 2: engine.add(request(f'x{i}', 1, 3))
        engine.step()
    assert [x.finish_reason for x in a] == ['length'] * 2


# Orca's Algorithm 1

@pytest.mark.parametrize('in_flight', [1, 2, 3])
@pytest.mark.parametrize('kind', ['paged', 'first_fit', 'buddy'])
def test_orcas_algorithm(kind, in_flight):
    "n_rsrv <= n_slots, in order of arrival, max_bs at most, nobody thrown out; and the slots are all there again."
    rng, max_bs = np.random.default_rng(in_flight), 3
    policy = OrcaPolicy(120)
    engine = build(64, seats=max_bs, policy=policy, in_flight=in_flight, kind=kind)
    s, most, started = engine.scheduler, 0, []
    start = policy.started
    policy.started = lambda group: (started.append(group.request.request_id), start(group))
    lengths = zip(rng.integers(1, 20, 25).tolist(), rng.integers(1, 25, 25).tolist(), rng.choice([1, 1, 3], 25).tolist())
    requests = [request(f'{i}', length, new, n=n, ignore_eos=True) for i, (length, new, n) in enumerate(lengths)]
    seqs = [engine.add(r) for r in requests if r.params.n * (r.prompt_len + r.params.max_tokens + 3) < 120]
    def each(outputs):
        nonlocal most
        most = max(most, policy.n_rsrv)
        reserved = sum(g.request.params.n * -(-(g.request.prompt_len + g.request.params.max_tokens) // 4) * 4 for g in s.running_groups())
        assert policy.n_rsrv == reserved <= policy.n_slots == 120
    run(engine, each=each)
    finish(engine)
    for x in seqs: check_ended(x, 64)
    assert started == [x[0].request.request_id for x in seqs] and len(started) > 20 and 60 < most
    assert not events(engine, 'preempt') and all(p.num_chunks <= max_bs for p in engine.executor.plans)
    wholes = [p for p in engine.executor.plans for c in p.chunks if c.start == 0 and c.stop > 1]
    assert len(wholes) >= len(seqs) - sum(r.prompt_len == 1 for r in requests)
    for p in engine.executor.plans:
        new = {x.seq_id: len(x.prompt_token_ids) for x in p.new if x.index == 0}
        assert {c.seq_id: c.stop - c.start for c in p.chunks if c.seq_id in new} == new          # a prompt is one chunk, at once


def test_orca_lets_in_whom_it_has_slots_for():
    "Two of three fit by their reservations, though all three prompts would fit; the third comes when one has left."
    engine = build(8, policy=OrcaPolicy(), seats=4)
    for name in 'abc': engine.add(request(name, 4, 12, ignore_eos=True))
    engine.step()
    s = engine.scheduler
    assert (s.policy.n_rsrv, s.num_running, s.num_waiting) == (32, 2, 1) and s.memory.num_free_blocks == 6
    engine.abort('a')
    assert s.policy.n_rsrv == 16
    engine.step()
    assert s.policy.n_rsrv == 32 and s.num_running == 2
    finish(engine)


def test_orca_refuses_whom_it_can_never_reserve_for():
    "A reservation beyond all slots would stand at the head of the line for ever: nobody behind it would be served."
    engine = build(8, policy='orca', max_len=64)
    with pytest.raises(RequestTooLargeError): engine.add(request('a', 4, 50))
    [b] = engine.add(request('b', 4, 5))
    finish(engine)
    check_ended([b], 64)


def test_orcas_slots_are_those_of_its_memory():
    "A policy that served one scheduler serves another: None means all slots of each."
    policy = OrcaPolicy()
    for blocks in (8, 40, 12):
        engine = build(blocks, policy=policy)
        for i in range(6): engine.add(request(f'{i}', 4, 20, ignore_eos=True))
        engine.step()
        assert engine.scheduler.num_running == min(4, blocks // 6)
        finish(engine)


# the deadlock

def four(engine): return [engine.add(request(name, 7, 14)) for name in 'abcd']


@pytest.mark.parametrize('in_flight', [1, 2, 3])
def test_a_deadlock_has_a_name(in_flight):
    "All hold what the others need. It is said again until somebody gives up, and nothing else has changed."
    engine = make_plain(10, policy='unreserved', in_flight=in_flight, budget=256, seats=4)
    seqs = four(engine)
    with pytest.raises(DeadlockError, match="all 4 running.*0 of 10 blocks.*'unreserved'"):
        for _ in range(200): engine.step()
    s = engine.scheduler
    assert s.num_running == 4 and s.memory.num_free_blocks == 0 and {x.status for [x] in seqs} == {Status.RUNNING}
    state = [x.num_tokens for [x] in seqs], s.iteration
    for _ in range(3):
        with pytest.raises(DeadlockError): engine.step()
        check_pool(s.memory)
    assert ([x.num_tokens for [x] in seqs], s.iteration) == state
    given_up = []
    for name in 'dcb':
        engine.abort(name)
        given_up.append(name)
        try:
            run(engine)
            break
        except DeadlockError: check_pool(s.memory)
    assert given_up == ['d', 'c'] and [x.finish_reason for [x] in seqs] == ['length'] * 2 + ['abort'] * 2
    assert s.memory.num_free_blocks == 10


@pytest.mark.parametrize('in_flight', [1, 2])
@pytest.mark.parametrize('policy', ['continuous', 'vllm', 'orca', 'static'])
def test_reservation_and_preemption_cure_it(policy, in_flight):
    engine = make_plain(10, policy=policy, in_flight=in_flight, budget=256, seats=4)
    seqs = four(engine)
    run(engine)
    assert [x.finish_reason for [x] in seqs] == ['length'] * 4
    assert (engine.scheduler.num_preemptions > 0) == (policy != 'orca')


def test_no_deadlock_while_one_sample_can_go_on():
    "Each group of two needs two blocks, and one is free: one sample takes it, ends and gives it back, and then the others follow."
    engine = make_plain(4, policy='unreserved', budget=256, seats=4, watermark=0)
    seqs = [engine.add(request('a', 3, 3, n=2)), engine.add(request('b', 4, 3, n=2))]
    run(engine)
    assert {x.finish_reason for group in seqs for x in group} == {'length'}


def test_a_deadlock_of_two_searches():
    "Beams that have their answers wait for those that need blocks: nobody computes anything, and it is said."
    engine = make_plain(12, policy='unreserved', budget=256, seats=6, watermark=0, in_flight=2)
    for name in 'ab': engine.add(Request(name, range(6), SamplingParams(beam_width=3, temperature=0, max_tokens=40)))
    with pytest.raises(DeadlockError):
        for _ in range(300): engine.step()
    engine.abort('a')
    run(engine)


# vLLM's policy of 2023

def test_vllms_prompts_are_whole():
    "Prompts of exactly the budget too, and those that come back with all their tokens."
    engine = build(24, policy='vllm', seats=4, budget=64, preemption='recompute')
    seqs = [engine.add(request(f'{i}', n, 12, ignore_eos=True)) for i, n in enumerate((30, 50, 3, 52, 17, 40))]
    finish(engine)
    for x in seqs: check_ended(x, 64)
    assert engine.scheduler.num_preemptions
    for p in engine.executor.plans:
        for c in p.chunks: assert c.stop - c.start == 1 or c.start == 0 and c.stop >= len(seqs[c.seq_id][0].request.prompt_token_ids)
    engine = make_plain(40, policy='vllm', budget=64, max_len=64)
    [a], [b] = engine.add(request('a', 63, 1)), engine.add(request('b', 2, 1))
    engine.step()
    assert a.finish_reason == 'length' and b.num_computed_tokens == 0            # 63 + 2 are more than the budget
    engine.step()
    assert b.finish_reason == 'length'


@pytest.mark.parametrize('preemption', ['recompute', 'swap'])
@pytest.mark.parametrize('in_flight', [1, 2])
def test_vllm_preempts_the_latest(preemption, in_flight):
    engine = build(9, policy='vllm', in_flight=in_flight, swap=20, preemption=preemption, watermark=0)
    s, victim = engine.scheduler, engine.scheduler.policy.victim
    asked = []
    def latest(running):
        asked.append(victim(running).key == max(g.key for g in running))
        return victim(running)
    s.policy.victim = latest
    for i in range(6): engine.add(request(f'{i}', 5 + i, 16, ignore_eos=True))
    finish(engine)
    assert len(asked) > 1 and all(asked) and {e[2] for e in events(engine, 'preempt')} == {preemption}


def test_vllm_admits_nobody_while_anyone_is_swapped_out():
    engine = build(12, policy='vllm', swap=30, preemption='swap', watermark=0)
    s = engine.scheduler
    for i in range(8): engine.add(request(f'{i}', 5, 20, ignore_eos=True))
    start = s._start
    def _start(group, draft):
        assert not s.num_swapped
        return start(group, draft)
    s._start = _start
    swapped = []
    run(engine, each=lambda outputs: swapped.append(s.num_swapped))
    finish(engine)
    assert sum(n > 0 for n in swapped) > 5


def test_whoever_is_swapped_out_comes_in_before_a_recomputed_one_in_front_of_it():
    "c was swapped out, then b, for whom the swap pool has no room, is to be recomputed: b may not come in before c, nor c wait for b."
    engine = build(9, policy='vllm', seats=3, swap=3, preemption='swap', watermark=0)
    seqs = [engine.add(request(n, 8, 22, ignore_eos=True)) for n in 'abc']
    finish(engine, 300)
    kinds = [e[2] for e in events(engine, 'preempt')]
    assert 'swap' in kinds and 'recompute' in kinds
    for x in seqs: check_ended(x, 64)


# the pipeline

def test_a_pipeline_of_k_stages_is_k_times_as_fast():
    "Each request takes as long as before, and k times as many are served; requests in one plan at most."
    took, latency = {}, {}
    for k in (1, 2, 4):
        engine = make_plain(400, size=16, seats=2, in_flight=k, budget=512)
        seqs = [engine.add(request(f'{i}', 10, 20)) for i in range(16)]
        ends = {}
        run(engine, each=lambda outputs: ends.update({x.request.request_id: engine.now for x in outputs.finished}))
        took[k], latency[k] = engine.now, ends['0']
        assert all(x.finish_reason == 'length' for [x] in seqs)
    assert latency[1] == pytest.approx(20 * 0.01) and latency[2] == pytest.approx(latency[1]) and latency[4] == pytest.approx(latency[1])
    assert took[1] / took[2] == pytest.approx(2, rel=.05) and took[1] / took[4] == pytest.approx(4, rel=.1)


def test_a_lone_sequence_gains_nothing_from_stages():
    for k in (1, 2, 3):
        engine = make_plain(40, in_flight=k)
        engine.add(request('a', 10, 20))
        run(engine)
        assert engine.now == pytest.approx(0.2)


# systems in the simulator

COST = Linear(10e-3, 1e-3, 1e-4, 1e-7)


@pytest.mark.parametrize('sampling', [{}, dict(n=2), dict(beam_width=2)], ids=str)
@pytest.mark.parametrize('stages', [1, 2])
@pytest.mark.parametrize('name', sorted(systems))
def test_simulate(name, stages, sampling):
    "All end, and the counts are what the workload says."
    workload = random_workload(12, (4, 60), (2, 40), seed=3).poisson(20)
    workload = Workload('w', workload.arrivals, workload.prompts, workload.output_lens, sampling)
    cost = SimpleNamespace(stages=stages, seconds=COST.seconds)
    steps = []
    def on_step(engine, outputs):
        steps.append(engine.now)
        assert len(steps) < 5000, 'it never ends'
    report = simulate(name, workload, cost, 400, block_size=4, max_model_len=128, on_step=on_step)
    assert (report['requests'], report['refused'], report['out_of_memory']) == (12, 0, 0)
    assert report['output_tokens'] == sum(workload.output_lens) * sampling.get('n', 1)
    assert sum(report['memory'].values()) == pytest.approx(1) and min(report['memory'].values()) >= 0
    assert steps == sorted(steps) and report['iterations'] == len(steps) and report['seconds'] <= steps[-1]
    assert 0 < report['median_normalized_latency'] <= report['p99_normalized_latency'] and report['mean_running'] > 0


@pytest.mark.parametrize('name', ['orca-max', 'orca-oracle', 'vllm', 'pagedlm', 'ft'])
def test_simulate_refuses_and_serves_the_rest(name):
    "Requests that are longer than the model, or than the pool: counted, and nobody waits for them."
    workload = Workload('w', [0, 0, .1, .1, .2], [range(1, 9), range(1, 200), range(1, 5), range(1, 129), range(1, 6)], [4, 4, 4, 4, 4])
    report = simulate(name, workload, COST, 40, block_size=4, max_model_len=128)
    assert (report['requests'], report['refused']) == (3, 2) and report['output_tokens'] == 12


def test_simulate_refuses_whom_orca_can_never_reserve_for():
    workload = Workload('w', [0, 0, .1], [range(1, 9), range(1, 61), range(1, 6)], [4, 40, 4])
    report = simulate('orca', workload, COST, 20, block_size=4, max_model_len=128)
    assert (report['requests'], report['refused']) == (2, 1)


def test_simulate_says_when_it_is_stuck():
    workload = random_workload(8, (4, 8), (30, 40), seed=1)
    with pytest.raises(DeadlockError): simulate('unreserved', workload, COST, 20, block_size=4, max_model_len=64)
    assert simulate('pagedlm', workload, COST, 20, block_size=4, max_model_len=64)['requests'] == 8


def test_an_interrupt_while_signals_are_held_back_is_not_the_last_that_is():
    "A Ctrl-C between any two lines of hold_interrupts itself: the next block is held again, and the handler is the old one."
    def bomb(at):
        count = 0
        def line(frame, event, arg):
            nonlocal count
            count += event == 'line'
            if event == 'line' and count == at: signal.raise_signal(signal.SIGINT)
            return line
        sys.settrace(lambda frame, event, arg: line if frame.f_code.co_filename.endswith('engine.py') else None)
        try:
            with hold_interrupts(): pass
        except KeyboardInterrupt: pass
        finally: sys.settrace(None)
        return count >= at
    at = 1
    while bomb(at):
        assert not hold_interrupts._holds and signal.getsignal(signal.SIGINT) is signal.default_int_handler, at
        at += 1
    assert at > 8


def test_a_policy_of_ones_own_is_a_system():
    class Shortest(Policy):
        name = 'shortest'
        def place(self, scheduler, request): return request.params.max_tokens
    workload = random_workload(20, (4, 8), (2, 40), seed=1)
    asked = Shortest, Shortest(), System(Shortest, max_num_seqs=2), System(max_num_seqs=2)
    reports = [simulate(x, workload, COST, 200, block_size=4, max_model_len=64) for x in asked]
    assert [r['requests'] for r in reports] == [20] * 4 and reports[0] | dict(wall_seconds=0) == reports[1] | dict(wall_seconds=0)
    assert reports[2]['mean_normalized_latency'] < reports[3]['mean_normalized_latency']


@pytest.mark.parametrize('stages', [1, 2])
def test_ctrl_c_in_a_simulation(stages):
    "It comes out soon, and the scheduler it leaves goes on where it was."
    engines, steps = [], 0
    def on_step(engine, outputs):
        nonlocal steps
        engines.append(engine)
        steps += 1
        if steps == 30: signal.raise_signal(signal.SIGINT)
    workload = random_workload(60, (4, 60), (100, 200), seed=3)
    with pytest.raises(KeyboardInterrupt):
        cost = SimpleNamespace(stages=stages, seconds=COST.seconds)
        simulate('vllm', workload, cost, 300, block_size=4, max_model_len=300, on_step=on_step)
    engine = engines[-1]
    assert 30 <= steps <= 1100 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    check(engine)
    for _ in range(5000):
        if engine.has_unfinished: engine.step()
    assert not engine.has_unfinished and engine.scheduler.memory.num_free_blocks == 300


def test_time_is_only_turned_where_it_is_simulated():
    engine = make_plain(10)
    engine.wait_until(3.0), engine.wait_until(1.0)
    assert engine.now == 3.0
    with pytest.raises(SchedulerError): Engine(engine.scheduler, engine.executor).wait_until(1.0)
