"A Ctrl-C at any line of a step comes out of it as KeyboardInterrupt, and finds an engine that has lost nothing."
import signal
import sys

import pytest
from drive import check_tokens, drive, make, oracle, request

from pagedlm.memory.block_manager import check_pool

OURS = ('scheduler.py', 'policies.py', 'engine.py', 'block_manager.py', 'block_allocator.py', 'block_table.py', 'copy_on_write.py', 'trace.py')


class CtrlC:
    "A trace function that raises SIGINT at one line of the package, counted over all that are run."
    def __init__(self, at): self.at, self.count, self.hit = at, 0, False

    def __call__(self, frame, event, arg): return self.line if frame.f_code.co_filename.endswith(OURS) else None

    def line(self, frame, event, arg):
        if event == 'line':
            self.count += 1
            if self.count == self.at:
                self.hit = True
                signal.raise_signal(signal.SIGINT)
        return self.line


def interrupted(engine, call, at):
    "Whether line `at` of `call` was reached; the interrupt must come out."
    bomb = CtrlC(at)
    sys.settrace(bomb)
    try:
        try: call()
        finally: sys.settrace(None)
    except KeyboardInterrupt: assert bomb.hit
    else: assert not bomb.hit, 'the interrupt was swallowed'
    return bomb.hit


@pytest.mark.parametrize('first', [0, 3, 7, 13])
def test_interrupt_in_a_step(first):
    "After it, the engine goes on as if nothing had been: every token comes, and every block comes back."
    lines = 0
    for at in range(1 + first % 3, 10_000, 3):                  # every third line, other ones in each case
        engine = make(14, 4, swap=8, budget=16)
        groups = [engine.add(r) for r in (request('a', 9, 12), request('g', 13, 14, 3), request('c', 8, 12))]
        for _ in range(first): engine.step()
        if not interrupted(engine, engine.step, at): break
        check_pool(engine.scheduler.memory)
        if at % 5 == 0:                                         # as LLM does with an interrupted generate
            engine.abort('a')
            groups = groups[1:]
        drive(engine, 150)
        for seqs in groups:
            for s in seqs:
                want = oracle(s.request, s.index)
                assert s.output_token_ids == (want if s.finish_reason == 'length' else want[:len(s.output_token_ids)])
        lines += 1
    assert lines > 20 and not interrupted(engine, lambda: None, 1)


def test_interrupt_at_the_door():
    for at in range(1, 1000):
        engine = make(20)
        if not interrupted(engine, lambda: engine.add(request('a', 9, 3)), at): break
        if engine.has_unfinished: engine.abort('a')             # it may have come in or not, but not by half
        seqs = engine.add(request('a', 9, 3))
        drive(engine, 9)
        check_tokens([seqs])
    assert at > 10


def test_second_interrupt_is_not_held_back():
    engine = make(20)
    engine.add(request('a', 9, 3))
    engine.add(request('b', 9, 3))

    def stuck(plan):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    execute, engine.executor.execute = engine.executor.execute, stuck
    with pytest.raises(KeyboardInterrupt): engine.step()
    engine.executor.execute = execute
    assert not engine.has_unfinished and engine.scheduler.memory.num_free_blocks == 20
