"Contiguous memory: two allocators and three estimates, each against an account of its own, and all under the real scheduler."
import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
from drive import CheckedExecutor, check_tokens, drive, request, serve

from pagedlm.core import ConfigError, Request, RequestTooLargeError, SamplingParams, Sequence, Usage
from pagedlm.memory.block_manager import BlockManager, check_pool
from pagedlm.memory.contiguous import Buddy, ContiguousMemory, Spans
from pagedlm.scheduling.engine import Engine, counting_script
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace

RESERVES, ALLOCATORS = ('max', 'pow2', 'request'), ('first_fit', 'buddy')
every_kind = pytest.mark.parametrize('reserve, allocator', list(product(RESERVES, ALLOCATORS)))


def power(n):
    size = 1
    while size < n: size *= 2
    return size


def sequence(row, prompt_len, index=0, **params):
    return Sequence(row, Request(f'r{row}', [1] * prompt_len, SamplingParams(**params)), index, row)


def sizes(allocator): return [stop - start for start, stop in allocator.holes]


# the buddy system alone

def test_chunks_of_the_papers_pool():
    assert sizes(Buddy(983, 128)) == 7 * [128] + [64, 16, 4, 2, 1]
    assert sizes(Buddy(603, 128)) == 4 * [128] + [64, 16, 8, 2, 1]
    assert Counter(sizes(Buddy(3757, 128))) == {128: 29, 32: 1, 8: 1, 4: 1, 1: 1}
    assert sizes(Buddy(40, 128)) == [32, 8] and sizes(Buddy(40, 9)) == [16, 16, 8] and sizes(Buddy(1, 1)) == [1]


@pytest.mark.parametrize('longest', [1, 5, 16, 100])
def test_first_chunks_cover_any_pool(longest):
    "From the front, aligned, the longest first, so that an empty pool of N has N // size chunks of any size that there is."
    for blocks in range(1, 200):
        buddy = Buddy(blocks, longest)
        assert [b for start, stop in buddy.holes for b in range(start, stop)] == list(range(blocks))
        assert all(stop - start == power(stop - start) and start % (stop - start) == 0 for start, stop in buddy.holes)
        for n in range(1, longest + 1):
            size, room = power(n), Buddy(blocks, longest)
            starts = [room.take(n) for _ in range(blocks // size + 1)]
            assert starts[-1] is None and None not in starts[:-1]


@pytest.mark.parametrize('seed', range(8))
def test_buddies_at_random(seed):
    rng = random.Random(seed)
    blocks, longest = rng.randrange(1, 150), rng.choice([1, 7, 32, 128])
    buddy, taken, refused = Buddy(blocks, longest), {}, 0
    first = buddy.holes
    for step in range(1500):
        if rng.random() < (.9 if step % 500 < 250 else .2):
            n = rng.randrange(1, longest + 1)
            room, before = [size for size in sizes(buddy) if size >= n], Counter(sizes(buddy))
            start = buddy.take(n)
            assert (start is None) == (not room)
            if start is None: refused += 1; continue
            size, taken[start] = min(room), n                               # of the smallest that is long enough, the halves are left
            before[size] -= 1
            while size > power(n): size //= 2; before[size] += 1
            assert +before == Counter(sizes(buddy))
        elif taken:
            start = rng.choice(list(taken))
            buddy.give_back(start, start + taken.pop(start))
        held = [(start, start + power(n)) for start, n in taken.items()]
        chunks = sorted(held + buddy.holes)
        assert [a for a, _ in chunks[1:]] == [b for _, b in chunks[:-1]] and chunks[0][0] == 0 and chunks[-1][1] == blocks
        assert all(start % (stop - start) == 0 for start, stop in chunks)
        free = set(buddy.holes)
        merged = [(a, b) for a, b in free if b - a < buddy.largest and ((a ^ (b - a)), (a ^ (b - a)) + b - a) in free]
        assert not merged, f'buddies that are both free: {merged}'
        assert buddy.num_free == sum(sizes(buddy)) and buddy.lost(n := rng.randrange(1, 200)) == sum(s for s in sizes(buddy) if s < n)
    assert refused
    for start in list(taken): buddy.give_back(start, start + taken.pop(start))
    assert buddy.holes == first


@pytest.mark.parametrize('make', [Spans, lambda blocks: Buddy(blocks, 8)])
def test_nothing_is_given_back_twice(make):
    spans = make(32)
    start = spans.take(4)
    spans.give_back(start, start + 4)
    with pytest.raises(AssertionError): spans.give_back(start, start + 4)


@pytest.mark.parametrize('seed', range(4))
def test_first_fit_against_a_list(seed):
    "The first of the free blocks behind which enough others are free, found by looking at each."
    rng, spans, owner, taken = random.Random(seed), Spans(60), [None] * 60, {}
    for who in range(1500):
        if rng.random() < .5:
            n = rng.randrange(1, 14)
            start = next((i for i in range(61 - n) if owner[i:i+n] == [None] * n), None)
            assert spans.take(n) == start
            if start is not None: owner[start:start+n], taken[who] = [who] * n, (start, start + n)
        elif taken:
            start, stop = taken.pop(rng.choice(list(taken)))
            spans.give_back(start, stop)
            owner[start:stop] = [None] * (stop - start)
        assert spans.num_free == owner.count(None) == sum(sizes(spans))
    for span in taken.values(): spans.give_back(*span)
    assert spans.holes == [(0, 60)]


# the memory

def blocks_by_the_paper(reserve, prompt, answer, most, size):
    "Blocks to ask for: prompt and estimate, within the model's length."
    estimate = most if reserve == 'max' or answer is None else power(answer) if reserve == 'pow2' else answer
    return -(-min(prompt + estimate, most) // size)


@every_kind
def test_spans_are_as_long_as_the_paper_says(reserve, allocator):
    for prompt, answer in product((1, 16, 100, 161, 1000, 2047), (1, 2, 64, 65, 338, 1048, None)):
        memory = ContiguousMemory(983, 16, 2048, reserve, allocator)
        grant = memory.admit(seq := sequence(0, prompt, max_tokens=answer), prompt)
        asked = blocks_by_the_paper(reserve, prompt, answer, 2048, 16)
        held = power(asked) if allocator == 'buddy' else asked
        assert len(grant.blocks) == len(memory.table(seq)) == asked and memory.writable[0] == asked * 16
        assert grant.blocks == list(range(grant.blocks[0], grant.blocks[0] + asked)) == memory.holders()[0][:asked]
        assert 983 - memory.num_free_blocks == held == len(memory.holders()[0])
        assert held == memory.needed(prompt, 1, answer and min(prompt + answer, 2048))


@every_kind
@pytest.mark.parametrize('seed', range(4))
def test_memory_at_random(reserve, allocator, seed):
    "Admit, compute, fork and free in any order; who is refused, who holds what and what each slot is, all by another count."
    rng = random.Random(seed)
    size, blocks, done = rng.choice([1, 3, 16]), rng.choice([20, 37, 64]), Counter()
    most = 9 * size
    memory = ContiguousMemory(blocks, size, most, reserve, allocator)
    groups = []                                                             # each [sequences, spare spans, blocks asked for]
    last = 9 if reserve == 'max' else 1
    tokens, first = {}, memory.allocator.holes
    rounded = power if allocator == 'buddy' else int
    for _ in range(500):
        verb, group = rng.choice(['admit', 'compute', 'compute', 'fork', 'free']), rng.choice(groups) if groups else None
        row = next(r for r in range(100) if r not in tokens)
        if verb == 'admit':
            answer, n, keep = rng.choice([None, *range(6 * size)]), rng.randrange(1, 5), rng.choice([0, 0, 3])
            seq = sequence(row, rng.randrange(1, 3 * size + 1), n=n, max_tokens=answer)
            last = asked = blocks_by_the_paper(reserve, seq.prompt_len, answer, most, size)
            places = sum(s // rounded(asked) for s in sizes(memory.allocator))
            room = places >= n and memory.num_free_blocks - n * rounded(asked) >= keep
            before = memory.holders(), memory.num_free_blocks
            grant = memory.admit(seq, seq.prompt_len, keep)
            assert (grant is not None) == room
            if room: groups.append([[seq], n - 1, asked]); tokens[row] = 0
            else: assert (memory.holders(), memory.num_free_blocks) == before
            done[f'admit {n} {room}'] += 1
            done['refused in vain'] += places < n and memory.num_free_blocks >= n * rounded(asked)
        elif group is None: continue
        elif verb == 'compute':
            for s in group[0]: tokens[s.row] = rng.randrange(tokens[s.row], min(most, s.max_len or most) + 1)
            rows = [s.row for s in group[0]]
            memory.computed(np.array(rows), np.array([tokens[r] for r in rows]))
            assert memory.extend([(s, tokens[s.row]) for s in group[0]]) is not None
        elif verb == 'fork':
            parent, spares, asked = group[0][0], group[1], group[2]
            room = spares or max(sizes(memory.allocator), default=0) >= rounded(asked)
            grant = memory.fork(parent, child := Sequence(row, parent.request, 1, row))
            assert (grant is not None) == bool(room)
            if grant:
                n = -(-tokens[parent.row] // size)
                assert grant.copies == list(zip(memory.table(parent)[:n], memory.table(child)))
                group[0].append(child)
                group[1], tokens[row] = max(spares - 1, 0), tokens[parent.row]
            done[f'fork {bool(grant)} {spares > 0}'] += 1
        else:
            s = group[0].pop(i := rng.randrange(len(group[0])))
            memory.free(s)
            del tokens[s.row]
            if not i: group[1] = 0                                                         # the spares are the first one's
            groups = [g for g in groups if g[0]]
        check_pool(memory)
        held = [memory.table(s) for g in groups for s in g[0]]
        assert len({b for table in held for b in table}) == sum(map(len, held))
        spans = [(s, g[2], 1 + (g[1] if s is g[0][0] else 0)) for g in groups for s in g[0]]
        used, limits = sum(tokens.values()), sum(k * min(most, s.max_len or most) for s, _, k in spans)
        asked, held = (sum(k * f(n) * size for _, n, k in spans) for f in (int, rounded))
        lost = sum(s % rounded(last) if reserve == 'max' else s * (s < rounded(last)) for s in sizes(memory.allocator)) * size
        assert memory.usage() == Usage(used, limits - used, asked - limits, held - asked + lost, 0, blocks * size - held - lost)
    for s in [s for g in groups for s in g[0]]: memory.free(s)
    assert memory.allocator.holes == first and memory.usage().used == memory.usage().internal == 0
    assert sum(n for verb, n in done.items() if verb.endswith('False')) > 10 and done['refused in vain'] + (reserve == 'max')


@pytest.mark.parametrize('allocator', ALLOCATORS)
def test_refused_though_enough_is_free(allocator):
    "Every other span of 4 comes back: half of the pool is free, and 5 side by side are not."
    memory = ContiguousMemory(40, 16, 128, 'request', allocator)
    seqs = [sequence(i, 30, max_tokens=34) for i in range(10)]
    assert all(memory.admit(s, 30) for s in seqs) and memory.num_free_blocks == 0
    for s in sorted(seqs, key=lambda s: memory.table(s))[::2]: memory.free(s)
    late = sequence(20, 30, max_tokens=50)
    assert memory.num_free_blocks == 20 >= memory.needed(30, 1, late.max_len) and memory.admit(late, 30) is None
    assert memory.usage().external == 20 * 16 and memory.usage().free == 0
    memory.free(min((s for s in seqs if memory.table(s)), key=lambda s: memory.table(s)))    # a neighbour leaves, and a buddy too
    assert memory.admit(late, 30) is not None
    check_pool(memory)


@every_kind
def test_a_refusal_is_cheap(reserve, allocator, monkeypatch):
    "The head of the line asks at every iteration: the free runs are measured again only when something has changed."
    memory, row = ContiguousMemory(100, 16, 512, reserve, allocator), 0
    while memory.admit(sequence(row, 40, max_tokens=80), 40): row += 1
    measured, lost = [], memory.allocator.lost
    monkeypatch.setattr(memory.allocator, 'lost', lambda *args: measured.append(args) or lost(*args))
    for _ in range(50):
        assert memory.admit(sequence(row, 90, max_tokens=300), 90) is None
        memory.usage()
    assert len(measured) == (reserve != 'max')
    check_pool(memory)


def test_bad_arguments():
    for wrong, said in ((dict(num_blocks=0), 'num_blocks=0'), (dict(block_size=0), 'block_size=0'), (dict(max_model_len=-1), '=-1'),
                        (dict(reserve='Pow2'), 'pow2'), (dict(reserve=''), 'request'), (dict(allocator='first fit'), 'first_fit')):
        with pytest.raises(ConfigError, match=said): ContiguousMemory(**dict(num_blocks=8, block_size=16, max_model_len=64) | wrong)


# under the scheduler

def engine_over(memory, seats=8, budget=64, **options):
    executor = CheckedExecutor(counting_script, memory.num_blocks, memory.block_size, 0)
    executor.scheduler, executor.plans = Scheduler(memory, seats, budget, memory.max_model_len or 64, **options), []
    return Engine(executor.scheduler, executor, Trace('full'), clock=None)


@every_kind
@pytest.mark.parametrize('policy', ['continuous', 'static'])
def test_tokens_are_the_oracles(reserve, allocator, policy):
    rng = random.Random(3)
    engine = engine_over(ContiguousMemory(75, 4, 64, reserve, allocator), policy=policy)
    check_tokens(serve(engine, [request(f'{i}', rng.randrange(1, 30), rng.randrange(1, 25), rng.choice([1, 1, 2, 4])) for i in range(25)]))
    assert not engine.scheduler.num_preemptions


@every_kind
def test_beams_are_those_of_paged_memory(reserve, allocator):
    def best(memory):
        engine = engine_over(memory)
        asks = [SamplingParams(beam_width=width, n=width, temperature=0, max_tokens=12) for width in (2, 4, 3)]
        seqs = [s for i, params in enumerate(asks) for s in engine.add(Request(f'{i}', range(5 + 6 * i), params))]
        drive(engine, 200)
        return [(s.output_token_ids, s.score) for s in seqs]
    assert best(ContiguousMemory(80, 4, 64, reserve, allocator)) == best(BlockManager(80, 4))


@every_kind
def test_refused_at_the_door_if_and_only_if_it_never_fits(reserve, allocator):
    "`needed` compares with the pool as the empty pool itself would answer; who is let in line gets in, and ends."
    rng, refused = random.Random(5), 0
    for _ in range(300):
        blocks, size = rng.randrange(1, 40), rng.choice([1, 4, 16])
        memory = ContiguousMemory(blocks, size, rng.choice([2 * size, 10 * size, 32 * size]) + 1, reserve, allocator)
        engine, first = engine_over(memory), memory.allocator.holes
        ask = request('a', rng.randrange(1, memory.max_model_len), rng.randrange(1, 9 * size), rng.choice([1, 1, 2, 5]))
        lone = sequence(0, ask.prompt_len, n=ask.params.n, max_tokens=ask.params.max_tokens)
        fits = memory.admit(lone, lone.prompt_len) is not None
        memory.free(lone)
        assert memory.allocator.holes == first
        if fits:
            engine.add(ask)
            for _ in range(1000): engine.has_unfinished and engine.step()
            assert not engine.has_unfinished
        else:
            refused += 1
            with pytest.raises(RequestTooLargeError) as e: engine.add(ask)
            assert e.value.needed > e.value.available == blocks
    assert 30 < refused < 270


def test_rounding_refuses_what_first_fit_can_hold():
    "9 of 12 blocks: a chunk of 16, and the largest there is has 8. Five samples of 3 blocks: five chunks of 4, and there are four."
    for blocks, n, length in ((12, 1, 130), (16, 5, 40)):
        flat, chunks = (engine_over(ContiguousMemory(blocks, 16, 512, 'request', a)) for a in ALLOCATORS)
        check_tokens(serve(flat, [request('a', length, 8, n)]))
        with pytest.raises(RequestTooLargeError) as e: chunks.add(request('a', length, 8, n))
        assert (e.value.needed, e.value.available) == ((16, 12) if n == 1 else (20, 16))


@pytest.mark.parametrize('allocator', ALLOCATORS)
def test_seven_run_in_the_papers_pool(allocator):
    "OPT-13B, the longest length for everybody: seven requests fit, whatever they ask for (Figure 13, Max)."
    engine = engine_over(ContiguousMemory(983, 16, 2048, 'max', allocator), seats=64, budget=2560)
    for i in range(20): engine.add(request(f'{i}', 20 + i, 40))
    engine.step()
    assert engine.scheduler.num_running == 7 and engine.scheduler.memory.usage().external == 87 * 16
    drive(engine, 300)
