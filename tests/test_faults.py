"""Faults that users of serving engines reported in public, each as a scenario with the right outcome; the names say where.

Without a model wherever that is possible: the ScriptedExecutor reads every context back through its block table, and every run has a bound.
Not here yet, since what they are about is not: prefix caching (vLLM PR#3239, PR#12621, nano-vllm#144, HF's snapshot that evicts its newest block,
nano-vllm's measured O(n) hit), planning a step ahead (vllm-ascend#7769, vLLM PR#38624) and captured graphs (transformers PR#45323).
"""
import itertools
import json
from collections import Counter

import numpy as np
import pytest

from pagedlm.core import BlockError, DuplicateRequestError, InvalidRequestError, Request, RequestTooLargeError, SamplingParams, Status
from pagedlm.memory.block_allocator import BlockAllocator
from pagedlm.memory.block_manager import BlockManager, check_pool
from pagedlm.scheduling.engine import ScriptedExecutor
from pagedlm.trace import usage_kinds

from drive import MEMORIES, POLICIES, PREEMPTIONS, SIZES, check_tokens, drive, events, make, most_steps, oracle, request, serve

every_memory = pytest.mark.parametrize('kind', MEMORIES)
every_policy = pytest.mark.parametrize('policy', POLICIES)
every_preemption = pytest.mark.parametrize('preemption', PREEMPTIONS)
every_size = pytest.mark.parametrize('size', SIZES)


# too large

@every_memory
@every_policy
@every_size
def test_prompt_larger_than_pool__vllm_35541(kind, policy, size):
    "63 blocks asked of a pool of 49: refused when added, with both numbers; the others finish."
    engine = make(49, size, kind=kind, policy=policy, max_len=2000)
    others = [engine.add(request(name, 9, 6, n)) for name, n in (('a', 1), ('b', 2))]
    engine.step()
    before = engine.scheduler.memory.usage()
    with pytest.raises(RequestTooLargeError, match='63 blocks.*has 49') as e: engine.add(request('big', 62 * size, 1))
    assert (e.value.needed, e.value.available) == (63, 49) and engine.scheduler.memory.usage() == before
    others.append(engine.add(request('c', 9, 6)))
    drive(engine, 60)
    check_tokens(others)
    assert [name for _, name, _ in events(engine, 'refuse')] == ['big']


@every_memory
@every_policy
@pytest.mark.parametrize('size', [1, 3, 4])
def test_whoever_is_let_in_gets_tokens__vllm_35541(kind, policy, size):
    "No prompt between: it is refused when added, or every sample of it gets tokens in a bounded number of steps."
    seen = Counter()
    for n, length, max_tokens in itertools.product((1, 2, 3), range(1, 26), (1, 5)):
        engine = make(5, size, kind=kind, policy=policy, budget=8)
        try: seqs = engine.add(request('a', length, max_tokens, n))
        except RequestTooLargeError: seen['refused'] += 1; continue
        drive(engine, most_steps([seqs[0].request]))
        for s in seqs:
            got = s.output_token_ids
            assert got == oracle(s.request, s.index)[:len(got)] and got
            assert s.finish_reason == 'length' if len(got) == max_tokens else s.finish_reason == 'memory' and kind == 'paged'
            seen[s.finish_reason] += 1
    assert seen['refused'] and seen['length'] and bool(seen['memory']) == (kind == 'paged')


@every_policy
@every_preemption
@every_size
@pytest.mark.parametrize('watermark', [0, .2])
def test_outgrows_the_pool_alone__vllm_52530(policy, preemption, size, watermark):
    "The prompt fits, prompt and output do not: it fills the pool to the last slot, ends with \"memory\", and the rest is served."
    engine = make(6, size, swap=6, policy=policy, preemption=preemption, watermark=watermark)
    requests = [request('big', 2 * size, 9 * size), request('small', size, 2 * size), request('late', size, size)]
    big, *others = serve(engine, requests)
    assert big[0].finish_reason == 'memory' and big[0].num_tokens == 6 * size + 1
    assert big[0].output_token_ids == oracle(requests[0])[:4 * size + 1]
    check_tokens(others)
    group, = serve(engine, [request('group', 2 * size, 9 * size, 3)])    # with siblings: one after the other makes room
    assert [s.finish_reason for s in group] == ['memory'] * 3 and group[0].num_tokens == 6 * size + 1
    for s in group: assert s.output_token_ids == oracle(s.request, s.index)[:len(s.output_token_ids)]


def test_lone_decode_beyond_the_pool__nano_vllm():
    engine = make(1, 4)
    (seq,), = serve(engine, [request('a', 3, 9)])
    assert seq.finish_reason == 'memory' and seq.output_token_ids == oracle(seq.request)[:2]


# asked for nothing, or in the wrong way

@pytest.mark.parametrize('prompt', [[], (), np.zeros(0, np.int32), None, 'text', [-1], [1.5, 'x'], [[1, 2], [3, 4]], [2**31]])
def test_empty_prompt__nano_vllm__vllm_7283(prompt):
    with pytest.raises(InvalidRequestError, match="'a'"): Request('a', prompt)


@every_memory
@every_policy
@pytest.mark.parametrize('n', [1, 3])
def test_max_tokens_0_and_1__nano_vllm__vllm_6521(kind, policy, n):
    "No token, one token; both end and hold nothing, alone and beside others."
    engine = make(40, kind=kind, policy=policy)
    assert serve(engine, [request('zero', 9, 0, n)])[0][0].output_token_ids == []
    groups = [engine.add(request(name, 9, m, n)) for name, m in (('long', 9), ('none', 0), ('one', 1), ('none too', 0))]
    outputs = engine.step()
    ended = [(s.request.request_id, s.finish_reason) for s in outputs.finished]
    assert ended == [(name, 'length') for name in ('none', 'none too', 'one') for _ in range(n)]
    drive(engine, 40)
    check_tokens(groups)


@every_memory
def test_duplicate_ids__vllm_10583(kind):
    "The second is refused whatever the first is doing, and the first is unharmed; an id is free again once its request has ended."
    engine = make(12, kind=kind, budget=8, swap=8, preemption='swap')
    s = engine.scheduler
    first, old = engine.add(request('old', 12, 24))[0], engine.add(request('x', 12, 20))[0]
    seen = set()
    for _ in range(100):
        if old.status == Status.FINISHED: break
        seen.add(old.status)
        with pytest.raises(DuplicateRequestError, match="'x'"): engine.add(request('x', 5, 3))
        plan = s.plan()
        with pytest.raises(DuplicateRequestError, match="'x'"): engine.add(request('x', 5, 0))
        s.commit(plan, engine.executor.execute(plan))
    assert seen >= {Status.WAITING, Status.RUNNING} and (kind == 'contiguous' or Status.SWAPPED in seen)
    engine.add(request('x', 5, 0))
    with pytest.raises(DuplicateRequestError): engine.add(request('x', 5, 3))    # it has ended, but nobody has been told
    engine.step()
    drive(engine, 60)
    check_tokens([[first], [old], *serve(engine, [request('x', 5, 3)])])


# swap

@every_policy
@pytest.mark.parametrize('preemption', ['auto', 'swap'])
@pytest.mark.parametrize('size', [1, 4])
def test_three_sequences_tiny_pools__vllm_546(policy, preemption, size):
    "Whatever the GPU and CPU pools, whatever the samples: all end, and what did not outgrow the pool is complete."
    seen = Counter()
    for blocks, swap, n in itertools.product((5, 6, 7, 10), (0, 1, 2, 5, 12), (1, 2)):
        engine = make(blocks, size, swap=swap, policy=policy, preemption=preemption)
        for seqs in serve(engine, [request(name, size + i, 3 * size, n) for i, name in enumerate('abc')]):
            shared = seqs[0].prompt_len // size
            alone = shared + n * (-(-(seqs[0].prompt_len + 3 * size - 1) // size) - shared)      # blocks, at its longest
            assert alone > blocks or all(s.finish_reason == 'length' for s in seqs)
            check_tokens([[s for s in seqs if s.finish_reason != 'memory']])
        assert engine.scheduler.memory.swap_allocator.num_free == swap
        seen.update(detail for _, _, detail in events(engine, 'preempt'))
    assert seen['swap'] and seen['recompute']


@pytest.mark.parametrize('n', [1, 3])
@every_policy
@every_size
def test_swap_space_of_one_block__vllm_787(n, policy, size):
    "What does not fit the swap pool is computed again; what fits is swapped."
    for swap in 1, 100:
        engine = make(3 * n + 5, size, swap=swap, policy=policy, preemption='swap', watermark=0)
        check_tokens(serve(engine, [request(name, 2 * size, 4 * size, n if name == 'b' else 1) for name in 'ab']))
        assert {detail for _, _, detail in events(engine, 'preempt')} == {'recompute' if swap == 1 else 'swap'}


# abort

STATES = dict(waiting=0, prefill=2, running=6, preempted=18)             # steps until the group is in that state

def group_in(state, kind, preemption='recompute'):
    "An engine whose group 'g' of three samples is waiting, in the middle of its prompt, running, or thrown out; beside another."
    engine = make(33 if kind == 'contiguous' else 13, 4, kind=kind, budget=8, swap=20, preemption=preemption, watermark=0)
    other, group = engine.add(request('other', 8, 30)), engine.add(request('g', 13, 14, 3))
    for _ in range(STATES[state]): engine.step()
    away = Status.SWAPPED if preemption == 'swap' else Status.WAITING
    want = Status.WAITING if state == 'waiting' else away if state == 'preempted' else Status.RUNNING
    assert {s.status for s in group} == {want} and engine.scheduler.num_preemptions == (state == 'preempted')
    assert [bool(s.output_token_ids) for s in group] == [state in ('running', 'preempted')] * 3
    return engine, other, group


ABORTS = [(state, kind, preemption) for state in STATES for kind in MEMORIES for preemption in ('recompute', 'swap')
          if (state, kind) != ('preempted', 'contiguous') and (kind, preemption) != ('contiguous', 'swap')]


@pytest.mark.parametrize('state, kind, preemption', ABORTS)
def test_abort_stops_every_sample__vllm_14326(state, kind, preemption):
    engine, other, group = group_in(state, kind, preemption)
    memory = engine.scheduler.memory
    assert engine.abort('g') and not engine.abort('g')
    assert {(s.status, s.finish_reason, s.row) for s in group} == {(Status.FINISHED, 'abort', -1)}
    assert set(memory.holders()) == {other[0].row} - {-1}
    check_pool(memory)
    outputs = drive(engine, 60)
    assert not any(o.request_id == 'g' for step in outputs for o in step)
    check_tokens([other])


@pytest.mark.parametrize('state, kind, preemption', ABORTS)
def test_abort_during_the_forward__vllm_29906(state, kind, preemption):
    "Between plan and commit: no output, blocks stay until the commit and are freed exactly once; the id can be used again at once."
    engine, other, group = group_in(state, kind, preemption)
    s, memory = engine.scheduler, engine.scheduler.memory
    plan = s.plan()
    held, freed = {row: blocks for row, blocks in memory.holders().items()}, []
    free, memory.free = memory.free, lambda seq: (freed.append(seq.seq_id), free(seq))
    rows = [x.row for x in group if x.row >= 0]
    assert engine.abort('g') and not engine.abort('g') and {x.finish_reason for x in group} == {'abort'}
    assert memory.holders() == held and not freed
    again = engine.add(request('g', 7, 5))
    outputs = s.commit(plan, engine.executor.execute(plan))
    assert not any(x in group for x in [*outputs.sequences, *outputs.finished])
    assert sorted(freed) == sorted(x.seq_id for x in group)[:len(rows)] and not set(memory.holders()) & set(rows)
    check_pool(memory)
    drive(engine, 60)
    assert max(Counter(freed).values()) == 1
    check_tokens([other, again])


def test_abort_of_all_in_flight__vllm_29906():
    engine = make(20)
    for name in 'abc': engine.add(request(name, 8, 20, 2))
    for _ in range(3): engine.step()
    plan = engine.scheduler.plan()
    for name in 'abc': engine.abort(name)
    assert engine.has_unfinished and engine.scheduler.memory.num_free_blocks < 20     # not before the forward is over
    assert len(engine.scheduler.commit(plan, engine.executor.execute(plan))) == 0
    assert not engine.has_unfinished and engine.scheduler.memory.num_free_blocks == 20


# every block is counted once

def random_steps(seed, kind, policy):
    "An engine stepped through random arrivals, samples and aborts: yields it after every step."
    rng = np.random.default_rng(seed)
    engine = make(int(rng.integers(8, 20)), int(rng.choice([1, 4, 5])), 6, 16, kind, swap=8, max_len=40, policy=policy)
    for step in range(300):
        if step < 60 and rng.random() < .5:
            try: engine.add(request(f'r{step}', int(rng.integers(1, 25)), int(rng.integers(0, 12)), int(rng.choice([1, 1, 3]))))
            except InvalidRequestError: pass
        if step < 60 and rng.random() < .1 and (live := sorted(engine.scheduler._requests)): engine.abort(live[0])
        if step >= 60 and not engine.has_unfinished: return
        engine.step()
        yield engine
    raise AssertionError('it never ends')


@every_memory
@every_policy
def test_free_cached_and_used_are_all_blocks__sglang_35270(kind, policy):
    for seed in range(4):
        for engine in random_steps(seed, kind, policy):
            memory = engine.scheduler.memory
            check_pool(memory)
            held = {b for blocks in memory.holders().values() for b in blocks}
            assert memory.num_free_blocks + len(held) == memory.num_blocks


@every_memory
@every_policy
def test_usage_gauge__vllm_20302(kind, policy):
    "used / total at every step is what the sequences themselves hold, recounted slot by slot; the trace has the same numbers."
    most = 0
    for seed in range(4, 8):
        for engine in random_steps(seed, kind, policy):
            s, memory = engine.scheduler, engine.scheduler.memory
            size, slots = memory.block_size, set()
            for seq in (s.rows.seq[r] for r in s._group):
                table = memory.table(seq)
                if table: slots |= {(table[t // size], t % size) for t in range(seq.num_computed_tokens)}
            usage = memory.usage()
            assert usage.used == len(slots) and usage.total == memory.num_blocks * size
            assert [engine.trace[k][-1] for k in usage_kinds] == [getattr(usage, k) for k in usage_kinds]
            most = max(most, usage.used / usage.total)
        assert memory.usage().used == 0
    assert most > .5


@pytest.mark.parametrize('size', [1, 4, 5])
@pytest.mark.parametrize('filled', [3, 4, 8])
def test_copy_does_not_alias_its_source__rapid_mlx_196(size, filled):
    "Fork, write, evict the parent, let a stranger write over all that it had: the child's keys and values are unchanged."
    import torch
    from pagedlm.compute.kv_cache import KVCache
    from pagedlm.core import Sequence
    memory, kv = BlockManager(16, size), KVCache(2, 16, size, 2, 4, torch.float32)
    asked = request('a', filled, 20, 2)
    parent, child, stranger = (Sequence(i, asked, row=i) for i in range(3))

    def write(seq, start, stop, value):
        slots = torch.tensor([memory.table(seq)[t // size] * size + t % size for t in range(start, stop)])
        for layer in range(2): kv.write(layer, torch.full((stop - start, 2, 4), value), torch.full((stop - start, 2, 4), -value), slots)
        memory.computed(np.array([seq.row]), np.array([stop]))

    def read(seq, stop):
        at = [(memory.table(seq)[t // size], t % size) for t in range(stop)]
        return [float(kv.layer(layer)[x][b, :, offset].mean()) for b, offset in at for layer in range(2) for x in range(2)]

    memory.admit(parent, filled)
    write(parent, 0, filled, 1.0)
    memory.fork(parent, child)
    for seq, value in (child, 2.0), (parent, 3.0):
        grant, = memory.extend([(seq, filled + 1)])
        kv.copy(grant.copies)
        write(seq, filled, filled + 1, value)
    want = [1.0, -1.0] * 2 * filled + [2.0, -2.0] * 2
    assert read(child, filled + 1) == want
    memory.free(parent)
    room = memory.num_free_blocks * size
    memory.admit(stranger, room)
    write(stranger, 0, room, 9.0)
    check_pool(memory)
    assert read(child, filled + 1) == want


@every_memory
@every_size
def test_samples_outlive_their_leader__rapid_mlx_196(kind, size):
    "The same in the engine: the first sample ends, strangers fill what it had, and the others still read their own context."
    engine = make(40, size, kind=kind)
    group = engine.add(request('g', 2 * size + size // 2, 2 * size + 5, 3))
    engine.step()
    engine.step()
    engine.scheduler.finish(group[0])
    others = [engine.add(request(f'o{i}', size, size, 1)) for i in range(3)]
    drive(engine, 200)
    check_tokens([group[1:], *others])


@pytest.mark.parametrize('bad', [[0, 0], [1, 0, 1, 1], [0, 5], [5], [0, 8], [-1], [0, -8], [0, 1, 2, 0]])
def test_block_freed_twice_in_one_call__dynamo_13398(bad):
    "Blocks 0 and 2 have one holder, 1 has two, the others none: refused, and the pool is as it was."
    pool = BlockAllocator(8)
    pool.allocate_many(3)
    pool.share(1)
    before = pool.num_free, list(pool.free_blocks()), pool.ref_counts.copy()
    with pytest.raises(BlockError): pool.free_many(bad)
    assert (pool.num_free, list(pool.free_blocks()), pool.ref_counts) == before
    assert pool.free_many([1, 1, 0]) == [1, 0] and pool.num_free == 7


# who waits for whom

@every_memory
@every_policy
@pytest.mark.parametrize('budget', [8, 9, 32])
def test_long_prefills_do_not_starve_decodes__sglang_32549(kind, policy, budget):
    "Prompts of 20 iterations each arrive all the time: whoever has had a token gets one in every iteration until its end."
    engine = make(400, 4, 8, budget, kind, max_len=2000, policy=policy)
    times, plans = {}, engine.executor.plans
    for step in range(150):
        if step in (0, 1, 40): engine.add(request(f'short{step}', 5, 60))
        if step % 10 == 2:
            try: engine.add(request(f'long{step}', 20 * budget, 10))
            except RequestTooLargeError: assert kind == 'contiguous'
        for o in engine.step():
            if o.token_ids: times.setdefault(o.request_id, []).append(step)
    assert max(p.num_tokens for p in plans) <= budget
    assert len(times) >= 4 and sum(name.startswith('long') for name in times) >= 2
    assert {b - a for t in times.values() for a, b in zip(t, t[1:])} == {1}


@every_memory
@pytest.mark.parametrize('budget', [16, 64])
@pytest.mark.parametrize('n', [1, 2])
def test_short_beside_a_very_long_prefill__vllm_10774(kind, budget, n):
    "A one-chunk request beside fifty-chunk ones: it is over before their prompts are; and the long ones are not starved in turn."
    engine = make(2000, 4, 8, budget, kind, max_len=8000)
    long = [engine.add(request(f'long{i}', 50 * budget, 4))[0] for i in range(2)]
    for _ in range(3): engine.step()
    short = engine.add(request('short', budget // 4, 10, n))
    first = step = 0
    while not all(s.status == Status.FINISHED for s in short):
        step += 1
        engine.step()
        first = first or step * bool(short[0].output_token_ids)
    assert first <= 2 and step <= first + 9 and not any(s.output_token_ids for s in long)
    assert all(s.num_computed_tokens < 25 * budget for s in long)
    for i in range(400):                                                 # now shorts come all the time
        if long[0].output_token_ids: break
        engine.add(request(f's{i}', budget // 4, 2))
        engine.step()
    assert i < 220, 'the long prompt gets a share of every iteration'
    drive(engine, 2000)
    check_tokens([long, short])


# with a model and text

@pytest.fixture(scope='module')
def llm(tmp_path_factory):
    "A tiny random model in a folder, with a tokenizer of bytes and a few words; float32, and no kernel threads that busy cores slow down."
    import torch
    from pagedlm.compute.attention import gather_attention
    from pagedlm.compute.model import ModelConfig, random_weights
    from pagedlm.serving.llm import LLM
    from safetensors.torch import save_file
    from test_detokenizer import byte_tokenizer
    folder, tokenizer = tmp_path_factory.mktemp('tiny'), byte_tokenizer(WORDS)
    config = dict(architectures=['LlamaForCausalLM'], vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256, dtype='float32')
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'tokenizer_config.json').write_text('{"eos_token": "<|end|>"}')
    tokenizer.raw.save(str(folder / 'tokenizer.json'))
    save_file(random_weights(ModelConfig.from_hf(config), dtype=torch.float32), str(folder / 'model.safetensors'))
    return LLM(str(folder), block_size=4, num_blocks=200, max_num_seqs=16, attention=gather_attention)

WORDS = [b'one ', b'ST', b'OP', b'PED', b' two', b'!']
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def scripted(llm):
    "f(words): an LLM whose model says these words, one per token, whatever it is asked."
    def say(*words, **options):
        other = llm.variant(**options)
        ids = [other.tokenizer.raw.token_to_id(w.replace(' ', 'Ġ')) for w in words]
        start = {}
        def script(tokens, index): return ids[(len(tokens) - start.setdefault(index, len(tokens))) % len(ids)]
        other.engine.executor = ScriptedExecutor(script)
        return other
    return say


def free_of(llm): return llm.engine.scheduler.memory.num_free_blocks


@pytest.mark.parametrize('empty', ['', [[]], {'prompt': ''}, {'prompt_token_ids': []}, ['fine', '', 'fine']])
def test_empty_prompt_then_the_next_request_works__vllm_7283(llm, empty):
    with pytest.raises(InvalidRequestError, match='empty'): llm.generate(empty, GREEDY)
    assert not llm.engine.has_unfinished and free_of(llm) == 200
    assert len(llm.generate('next', GREEDY)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize('n', [1, 2])
def test_max_tokens_0_and_1_with_text__vllm_6521(llm, n):
    zero, one = SamplingParams(n=n, max_tokens=0), SamplingParams(n=n, max_tokens=1, ignore_eos=True)
    for params in zero, one, [zero, one], [one, zero]:
        for out, p in zip(llm.generate(['a', 'bc'], params), [params] * 2 if isinstance(params, SamplingParams) else params):
            assert [(len(o.token_ids), o.finish_reason) for o in out.outputs] == [(p.max_tokens, 'length')] * n
            assert p.max_tokens or [o.text for o in out.outputs] == [''] * n
    assert [(d.text, d.token_ids, d.finish_reason) for d in llm.stream('a', SamplingParams(max_tokens=0))] == [('', [], 'length')]
    assert free_of(llm) == 200


@pytest.mark.parametrize('include', [False, True])
@pytest.mark.parametrize('max_tokens', [4, 8])
def test_stop_string_over_three_tokens__vllm_3574(scripted, include, max_tokens):
    "Nothing of it is shown, token by token; the sequence ends there, and gives its memory back."
    llm = scripted('one ', 'ST', 'OP', 'PED', ' two')
    params = SamplingParams(stop='STOPPED', max_tokens=max_tokens, include_stop_str_in_output=include)
    deltas = [(d.text, d.finish_reason) for d in llm.stream('a', params)]
    assert deltas == [('one ', None), ('', None), ('', None), ('STOPPED' if include else '', 'stop')]
    out = llm.generate('b', params, use_tqdm=False)[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ('one STOPPED' if include else 'one ', 'stop', 'STOPPED') and len(out.token_ids) == 4
    assert not llm.engine.has_unfinished and free_of(llm) == 200


def test_almost_a_stop_string_is_shown__vllm_3574(scripted):
    "What was held back comes out when it turns out to be something else, or when the text ends."
    llm = scripted('one ', 'ST', 'OP', '!', 'ST')
    assert ''.join(d.text for d in llm.stream('a', SamplingParams(stop=['STOPPED', 'STX'], max_tokens=5))) == 'one STOP!ST'


def test_greedy_text_does_not_depend_on_the_batch__vllm_5898(llm):
    "float32: alone, in a batch, in chunks, in other blocks, and thrown out in between: the same tokens."
    rng, params = np.random.default_rng(0), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [rng.integers(0, 256, n).tolist() for n in (1, 2, 16, 17, 60)]
    tell = lambda m, prompts: [o.outputs[0].token_ids for o in m.generate(prompts, params)]
    alone = [tell(llm, [p])[0] for p in prompts]
    assert tell(llm, prompts) == alone
    for options in dict(block_size=1), dict(block_size=16), dict(max_num_seqs=3, max_num_batched_tokens=11):
        assert tell(llm.variant(**options), prompts) == alone
    for preemption in 'recompute', 'swap':
        small = llm.variant(num_blocks=28, swap_blocks=28, preemption=preemption)
        assert tell(small, prompts) == alone
        assert {e.detail for e in small.trace.events if e.kind == 'preempt'} == {preemption}


# nobody waits for what will never come

def take(deltas, most=40):
    "All of an iterator that must end by itself."
    got = list(itertools.islice(deltas, most))
    assert len(got) < most, 'it never ends'
    return got


@pytest.mark.parametrize('n', [1, 2])
def test_stream_whose_request_is_aborted_ends__vllm_14326(llm, n):
    stream = llm.stream('a', SamplingParams(n=n, temperature=0, max_tokens=100, ignore_eos=True))
    first = next(stream)
    assert first.finish_reason is None
    llm.on_step = stop_after(llm, 30)
    try:
        for name in list(llm.engine.scheduler._requests): assert llm.engine.abort(name)
        rest = take(stream)
    finally: llm.on_step = None
    assert [d.finish_reason for d in rest if d.finish_reason] == ['abort'] * n
    assert free_of(llm) == 200


@pytest.mark.parametrize('items', [0, 1])
def test_closed_stream_is_aborted__vllm_14326(llm, items):
    "Also one that was closed before its first item."
    stream = llm.stream(['a', 'b'], SamplingParams(n=2, max_tokens=100, ignore_eos=True))
    take(itertools.islice(stream, items))
    stream.close()
    left = list(llm.engine.scheduler._requests)
    for name in left: llm.engine.abort(name)                             # for the tests that come
    assert not left and free_of(llm) == 200


def test_streams_end_when_the_model_fails__vllm_7283(llm):
    "The failure is raised where it is met; the other stream is told, and the next request works."
    one, two = llm.stream('a', GREEDY), llm.stream('b', GREEDY)
    next(one), next(two)
    runner = llm.engine.executor
    execute, runner.execute = runner.execute, lambda plan: 1 / 0
    try:
        with pytest.raises(ZeroDivisionError): take(one)
    finally: del runner.execute
    assert runner.execute == execute
    llm.on_step = stop_after(llm, 30)
    try: rest = take(two)
    finally: llm.on_step = None
    assert rest[-1].finish_reason == 'error' and free_of(llm) == 200
    assert len(llm.generate('next', GREEDY)[0].outputs[0].token_ids) == 12


def stop_after(llm, most):
    "A callback for `llm.on_step` that makes an endless loop a failure."
    left = iter(range(most))
    def on_step(_): assert next(left, None) is not None, 'it never ends'
    return on_step
