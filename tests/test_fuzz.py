"A state machine drives the real scheduler, memories and engine at random; every step is checked, every token against an oracle."
import random
from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pagedlm.core import DuplicateRequestError, InvalidRequestError, Request, RequestTooLargeError, SamplingParams, Status
from pagedlm.memory.block_manager import BlockManager, check_plan, check_pool
from pagedlm.memory.contiguous import ContiguousMemory
from pagedlm.scheduling.engine import Engine, ScriptedExecutor, counting_script
from pagedlm.scheduling.scheduler import Policy, Scheduler, StaticPolicy
from pagedlm.trace import Trace

EOS, MAX_LEN = 7, 48
seen = Counter()


def script(tokens, index):
    "A short vocabulary, so that end tokens really come."
    return counting_script(tokens, index) % 23


def oracle(request, index):
    "What one sample gets when nobody else is there: tokens and finish reason."
    p, tokens = request.params, request.prompt_token_ids.tolist()
    ends = {*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))}
    stop_len = min(MAX_LEN, len(tokens) + p.max_tokens)
    while len(tokens) < stop_len:
        tokens.append(script(np.array(tokens, np.int32), index))
        if tokens[-1] in ends and len(tokens) - request.prompt_len > p.min_tokens: return tokens, 'stop'
    return tokens, 'length'


class CheckedExecutor(ScriptedExecutor):
    "Also compares each plan with the memory that it was made from."
    def execute(self, plan):
        s = self.scheduler
        rows = {int(s.rows.seq_id[r]): r for r in s._group}
        check_plan(plan, s.memory, rows)
        assert plan.num_tokens <= s.max_num_batched_tokens
        assert len(plan.swap_outs) == 0 or len(plan.swap_ins) == 0
        seen.update(swap_out=len(plan.swap_outs) > 0, swap_in=len(plan.swap_ins) > 0, copies=len(plan.copies) > 0, forks=len(plan.forks) > 0,
                    chunked=bool((plan.stops - plan.starts > 1).any() and len(plan.due) < plan.num_chunks), steps=1)
        return super().execute(plan)


class AnyVictim(Policy):
    "Throws out whoever the dice say: also one who has been granted room in this very plan, and one who is asking for it."
    def __init__(self, seed):
        super().__init__()
        self.dice = random.Random(seed)

    def victim(self, running):
        group = self.dice.choice(running)
        seen.update(victims=1, early_victims=group is not running[-1], forked_victims=len(group.holding) > 1)
        return group


class AnyVictimStatic(AnyVictim, StaticPolicy): pass


class StubbornMemory:
    "Any memory, except that its next `refusals` answers to `extend` are None: somebody else has taken what there was."
    def __init__(self, memory): self.memory, self.refusals = memory, 0
    def __getattr__(self, name): return getattr(self.memory, name)

    def extend(self, wants):
        if not self.refusals: return self.memory.extend(wants)
        self.refusals -= 1
        seen['refusals'] += 1

    def append(self, rows, uptos): return None if self.refusals else self.memory.append(rows, uptos)


asks = st.tuples(st.integers(1, 30), st.sampled_from([1, 1, 2, 3]), st.integers(0, 20), st.integers(0, 3),
                 st.sampled_from([(), (3,), (3, 5)]), st.sampled_from([True, True, False]), st.sampled_from([False, False, False, True]))
rarely = st.sampled_from([True] + 9 * [False])


class Machine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(3, 24), size=st.sampled_from([1, 2, 3, 5, 16]), swap=st.sampled_from([0, 1, 12, 40, 40]),
                seats=st.integers(1, 6), extra=st.integers(0, 20), paged=st.booleans(), cached=st.booleans(),
                policy=st.sampled_from(['continuous', 'static', AnyVictim, AnyVictim, AnyVictimStatic]), seed=st.integers(0, 99),
                preemption=st.sampled_from(['auto', 'recompute', 'swap', 'swap']), watermark=st.sampled_from([0, .01, .2]))
    def start(self, blocks, size, swap, seats, extra, paged, cached, policy, seed, preemption, watermark):
        self.memory = StubbornMemory(BlockManager(blocks, size, swap, cached) if paged else ContiguousMemory(blocks, size, MAX_LEN, 'request'))
        self.executor = CheckedExecutor(script, blocks, size, swap)
        policy = policy if isinstance(policy, str) else policy(seed)
        self.scheduler = Scheduler(self.memory, seats, seats + extra, MAX_LEN, policy, preemption, watermark, (EOS,))
        self.executor.scheduler = self.scheduler
        self.engine = Engine(self.scheduler, self.executor, Trace('full'))
        self.requests, self.got, self.count = {}, {}, 0

    @rule(several=st.lists(asks, min_size=1, max_size=4))
    def add(self, several):
        for length, n, max_tokens, min_tokens, more, ignore, again in several:
            name = str(self.count - again)
            params = SamplingParams(n=n, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop_token_ids=more, ignore_eos=ignore)
            request = Request(name, np.arange(self.count % 3, self.count % 3 + length) % 50, params, priority=self.count % 7 // 3)
            before = self.memory.num_free_blocks
            try: seqs = self.engine.add(request)
            except InvalidRequestError as e:
                assert self.memory.num_free_blocks == before
                if isinstance(e, RequestTooLargeError): assert e.needed > e.available == self.memory.num_blocks
                else: assert isinstance(e, DuplicateRequestError) or n > self.scheduler.max_num_seqs
                continue
            self.requests[name] = (request, seqs)
            self.got[name] = [[] for _ in seqs]
            self.count += 1

    @rule(lengths=st.lists(st.integers(1, 6), min_size=3, max_size=6), n=st.sampled_from([1, 1, 2]))
    def crowd(self, lengths, n):
        "Short prompts and long answers: those who are let in outgrow the pool together."
        self.add([(length, n, 40, 0, (), True, False) for length in lengths])
        self.step(20)

    def tell(self, outputs):
        for o in outputs:
            if o.request_id in self.got: self.got[o.request_id][o.index] += o.token_ids
        for s in outputs.finished: self.ended(s)
        self.check()

    def ended(self, s):
        request = s.request
        tokens, reason = oracle(request, s.index)
        have = s.token_ids.tolist()
        seen[s.finish_reason] += 1
        if s.finish_reason in ('stop', 'length'): assert (have, s.finish_reason) == (tokens, reason)
        else: assert s.finish_reason in ('memory', 'abort', 'error') and have == tokens[:len(have)]
        if self.requests[request.request_id][0] is request:         # its id may be in use again
            assert self.got[request.request_id][s.index] == have[request.prompt_len:]

    def check(self):
        check_pool(self.memory)
        s = self.scheduler
        seats = sum(len(g.live) for g in s.running_groups()) + len(s._held)
        assert seats == s._seats <= s.max_num_seqs
        assert s.num_swapped == sum(g.status == Status.SWAPPED for g in s._waiting)
        assert [g.key for g in s._waiting] == sorted(g.key for g in s._waiting)

    @rule(times=st.integers(1, 12))
    def step(self, times):
        for _ in range(times):
            before = self.scheduler.num_preemptions
            self.tell(self.engine.step())
            seen['preemptions'] += self.scheduler.num_preemptions - before

    @rule(refusals=st.integers(2, 3), lengths=st.lists(st.integers(1, 6), min_size=2, max_size=3), n=st.sampled_from([1, 2]))
    def pressed(self, refusals, lengths, n):
        "For a while there is less room than there was: somebody is thrown out who would have stayed."
        self.add([(length, n, 12, 0, (), True, False) for length in lengths])
        for _ in range(8):
            self.memory.refusals = refusals if len(self.scheduler.running_groups()) > 1 else 0
            self.step(1)
        self.memory.refusals = 0

    def pick(self, data):
        live = sorted(self.scheduler._requests)
        return data.draw(st.sampled_from(live)) if live else None

    @rule(data=st.data())
    def abort(self, data):
        name = self.pick(data)
        if name is None: assert not self.engine.abort('nobody'); return
        assert self.engine.abort(name)
        assert all(s.status == Status.FINISHED for s in self.requests[name][1])
        self.check()

    @rule(data=st.data())
    def abort_in_flight(self, data):
        plan = self.scheduler.plan()
        name = self.pick(data)
        if name: self.engine.abort(name)
        result = self.executor.execute(plan)
        outputs = self.scheduler.commit(plan, result)
        assert all(o.request_id != name for o in outputs)
        self.tell(outputs)

    @rule(data=st.data())
    def stop_string(self, data):
        name = self.pick(data)
        running = [] if name is None or self.scheduler._requests[name].unforked else self.scheduler.sequences(name)
        if seqs := [s for s in running if s.status == Status.RUNNING]:
            seq = data.draw(st.sampled_from(seqs))
            self.scheduler.finish(seq)
            assert seq.status == Status.FINISHED and seq.finish_reason == 'stop'
            self.check()

    @rule(data=st.data(), now=rarely)
    def broken_logits(self, data, now):
        if not now: return self.step(3)
        plan = self.scheduler.plan()
        result = self.executor.execute(plan)
        if len(plan.due):
            result.tokens[data.draw(st.sampled_from(range(len(plan.due))))] = -1
            for i, t in zip(plan.due.tolist(), result.tokens.tolist()):
                if t < 0: self.executor.tokens[i].pop()
        outputs = self.scheduler.commit(plan, result)
        assert len(outputs) == len(plan.due) - (len(plan.due) > 0)
        self.tell(outputs)

    @rule(now=rarely)
    def executor_fails(self, now):
        if not (now and self.scheduler.num_running): return self.step(3)
        execute, self.executor.execute = self.executor.execute, lambda plan: 1 / 0
        try: self.engine.step()
        except ZeroDivisionError: pass
        self.executor.execute = execute
        assert not self.scheduler.num_running
        self.check()

    def teardown(self):
        if not hasattr(self, 'engine'): return
        for _ in range(4000 + 100 * len(self.requests)):
            if not self.engine.has_unfinished: break
            self.tell(self.engine.step())
        assert not self.engine.has_unfinished, 'some request never ends'
        assert all(s.status == Status.FINISHED for _, seqs in self.requests.values() for s in seqs)
        assert self.memory.num_free_blocks == self.memory.num_blocks
        assert not (self.scheduler._group or self.scheduler._pending or self.scheduler._leaders)
        cache = getattr(self.memory.memory, 'cache', None)
        assert not (cache and cache.promised)
        seen['hits'] += sum(e.kind == 'hit' for e in self.engine.trace.events)


Machine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, report_multiple_bugs=False,
                                     suppress_health_check=list(HealthCheck))
TestMachine = Machine.TestCase


def test_zz_the_machine_met_what_it_was_built_for():
    "Run after the machine: a fuzz test that never preempts proves nothing."
    print(dict(seen))
    assert seen['steps'] > 2000
    for what in ('preemptions', 'swap_out', 'swap_in', 'copies', 'forks', 'chunked', 'stop', 'length', 'memory', 'refusals', 'early_victims',
                 'forked_victims', 'hits'): assert seen[what] > 5, (what, seen)
