"An engine without a model for the tests: each plan is compared with the memory, each step with a recount, each run with a bound."
import numpy as np

from pagedlm.core import Request, SamplingParams
from pagedlm.memory.block_manager import BlockManager, check_plan, check_pool
from pagedlm.memory.contiguous import ContiguousMemory
from pagedlm.scheduling.engine import Engine, ScriptedExecutor, counting_script
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace

MEMORIES, POLICIES, PREEMPTIONS, SIZES = ('paged', 'contiguous'), ('continuous', 'static'), ('auto', 'recompute', 'swap'), (1, 5, 16)


class CheckedExecutor(ScriptedExecutor):
    "Compares each plan with the memory that it was made from, and keeps it."
    def execute(self, plan):
        s = self.scheduler
        check_plan(plan, s.memory, {int(s.rows.seq_id[r]): r for r in s._group})
        assert plan.num_tokens <= s.max_num_batched_tokens
        self.plans.append(plan)
        return super().execute(plan)


def make(blocks, size=4, seats=8, budget=64, kind='paged', swap=0, max_len=256, script=counting_script, reserve='request', **options):
    "An engine over a pool of `blocks` blocks, its trace at level full and its plans in `engine.executor.plans`."
    memory = BlockManager(blocks, size, swap) if kind == 'paged' else ContiguousMemory(blocks, size, max_len, reserve)
    executor = CheckedExecutor(script, blocks, size, memory.num_swap_blocks)
    executor.scheduler, executor.plans = Scheduler(memory, seats, budget, max_len, **options), []
    return Engine(executor.scheduler, executor, Trace('full'), clock=None)


def request(name, length, max_tokens=8, n=1, **params):
    "A prompt of `length` tokens that differs from those of other names."
    start = sum(map(ord, name)) * 31 % 1000
    return Request(name, np.arange(start, start + length), SamplingParams(n=n, max_tokens=max_tokens, **params))


def oracle(request, index=0, script=counting_script):
    "The output of one sample when nobody else is there and nothing but max_tokens ends it."
    tokens = request.prompt_token_ids.tolist()
    for _ in range(request.params.max_tokens): tokens.append(script(np.array(tokens, np.int32), index))
    return tokens[request.prompt_len:]


def most_steps(requests):
    """Steps in which requests that arrive in this order must end: the oldest that has not ended is never thrown out for another
    and computes a token per step at least; letting it in, bringing it back and telling its end take a few more."""
    return sum(r.prompt_len + r.params.max_tokens + r.params.n + 4 for r in requests)


def drive(engine, most):
    "Step until all have ended, in `most` steps at most; everything is checked, and the outputs of each step are returned."
    memory, outputs = engine.scheduler.memory, []
    for _ in range(most):
        if not engine.has_unfinished: break
        outputs.append(engine.step())
        check_pool(memory)
    assert not engine.has_unfinished, f'not done after {most} steps'
    assert memory.num_free_blocks == memory.num_blocks
    return outputs


def serve(engine, requests):
    "Add all, drive, and return their sequences, one list per request."
    seqs = [engine.add(r) for r in requests]
    drive(engine, most_steps(requests))
    return seqs


def check_tokens(groups):
    "All of these ended by length, with the oracle's tokens."
    for seqs in groups:
        for s in seqs: assert (s.finish_reason, s.output_token_ids) == ('length', oracle(s.request, s.index)), s


def events(engine, *kinds):
    "(iteration, request id, detail) of the events of some kinds."
    return [(e.iteration, e.request_id, e.detail) for e in engine.trace.events if e.kind in kinds]
