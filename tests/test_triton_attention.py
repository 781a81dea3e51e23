"""Random batches through the Triton kernels (compiled where there is a GPU, else in the interpreter, in a process of its own), and plans
that are followed in Python: every tile once, every part where the combining program looks for it.
"""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip('triton')
from pagedlm.compute.triton_attention import TritonAttention, paged_attention
from pagedlm.core import ConfigError

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
SEEDS, PROCESSES = (range(24), 1) if DEVICE == 'cpu' else (range(96), 8)           # on a GPU nearly all of the time goes to compiling


def follow(tiling, plan, capacity, kv_heads, window):
    "What the two kernels do with one launch's plan: the tiles of each (sequence, key head, first row), after checking the slots."
    share, work = plan[:2].tolist()
    first, columns = plan[2:2 + tiling.programs].tolist(), plan[2 + tiling.programs:tiling.length(capacity)].reshape(5, capacity).tolist()
    _, keys, _, start, _ = tiling.tile
    def unit(u):
        begin, seq, row, position, tokens = (c[u] for c in columns)
        tile = max(position - window + 1, 0) // keys if window else 0
        return begin, seq, row, tile, start + max(-(-(position + tokens) // keys) - tile, 1)
    walks, slots, joined = {}, {}, {}
    for p in range(tiling.programs):
        at, end = p * share, min((p + 1) * share, work)
        if at >= end: continue
        u = first[p]
        skip = at - unit(u)[0]
        while at < end:
            begin, seq, row, tile, n = unit(u)
            assert at == begin + skip and 0 <= skip < n * kv_heads
            head, done = divmod(skip, n)
            count = min(n - done, end - at)
            walks.setdefault((seq, head, row), []).extend(range(tile + max(done - start, 0), tile + max(done + count - start, 0)))
            if count < n:
                slot = 2 * p + (done == 0)
                assert slot not in slots
                slots[slot] = seq, head, row
            at, skip = at + count, skip + count
            if skip == n * kv_heads: u, skip = u + 1, 0
    for p in range(tiling.programs):
        cut = (p + 1) * share
        if cut >= work: continue
        begin, seq, row, tile, n = unit(first[p + 1])
        head, done = divmod(cut - begin, n)
        if done == 0 or done > share: continue
        parts = (cut - done + n - 1) // share - p + 1
        for i in range(parts): assert slots.pop(2 * (p + i) + (i == 0)) == (seq, head, row)
        joined[seq, head, row] = parts
    assert not slots, 'a part that nobody combines'
    return walks


@pytest.mark.parametrize('seed', range(40))
def test_plan_is_followed(seed):
    rng = np.random.default_rng(seed)
    kv_heads, group, window = int(rng.integers(1, 5)), int(rng.integers(1, 9)), int(rng.choice([0, 1, 70, 1000]))
    backend = TritonAttention(kv_heads * group, kv_heads, 64, torch.float16, 'meta', window or None, chip=(90, int(rng.integers(1, 40))))
    n = int(rng.integers(1, 60))
    lens = np.where(rng.random(n) < 0.7, 1, rng.integers(0, 400, n))
    starts = rng.integers(0, 3000, n)
    stops = starts + lens
    plan, rows = backend.plan(starts, stops), np.cumsum(lens) - lens
    short, base = backend.short, backend.short.length(n)
    got = follow(short, plan[:base], n, kv_heads, window)
    if lens.max() > short.tokens: got |= follow(backend.long, plan[base:], (len(plan) - base - backend.long.length(0)) // 5, kv_heads, window)
    want = {}
    for i in range(n):
        tiling = short if lens[i] <= short.tokens else backend.long
        for at in range(0, int(lens[i]), tiling.tokens):
            position, keys = int(starts[i]) + at, tiling.tile[1]
            stop = position + min(tiling.tokens, int(lens[i]) - at)
            tiles = list(range(max(position - window + 1, 0) // keys if window else 0, -(-stop // keys)))
            want |= {(i, head, int(rows[i]) + at): tiles for head in range(kv_heads)}
    assert got == want


def test_plan_length_depends_on_size_only():
    backend = TritonAttention(32, 8, 128, torch.bfloat16, 'meta', chip=(90, 132))
    for size in (1, 8, 256):
        plans = [backend.plan(np.full(n, stop - 1), np.full(n, stop), size=size) for n in (0, 1, size // 2, size) for stop in (1, 100_000)]
        assert {len(p) for p in plans} == {backend.short.length(size)} and {p.dtype for p in plans} == {np.dtype(np.int32)}
        for p in plans: assert len(follow(backend.short, p, size, 8, 0)) == 8 * size       # padding has a walk too: zeros are written


def test_shares_are_equal():
    "No program has more than its share, and the share is the least that suffices."
    backend = TritonAttention(32, 8, 128, torch.bfloat16, 'meta', chip=(90, 132))
    share, work = backend.plan([99_999] + [49] * 7, [100_000] + [50] * 7)[:2]
    _, keys, _, start, _ = backend.short.tile
    assert work == 8 * (-(-100_000 // keys) + 7 + 8 * start) and share == -(-work // backend.short.programs)


def test_errors():
    for shape in [(9, 2, 64, torch.float16), (8, 2, 512, torch.float16), (8, 2, 64, torch.float64)]:
        with pytest.raises(ConfigError, match='triton'): TritonAttention(*shape, 'meta')
    if DEVICE == 'cpu' and os.environ.get('TRITON_INTERPRET') != '1':
        from pagedlm.compute.attention import make_case
        case = make_case([(4, 5)])
        with pytest.raises(ConfigError, match='needs a GPU'): paged_attention(case.q, case.k_cache, case.v_cache, case.meta, case.scale)


def random_case(seed):
    "(backend, case): everything at random, poisoned; K and V of a block side by side in every other one."
    from dataclasses import replace
    from pagedlm.compute.attention import make_case
    rng = np.random.default_rng(seed)
    pick = lambda *x: x[rng.integers(len(x))]
    group, kv_heads, head_dim = pick(1, 2, 3, 4, 7, 8, 16), pick(1, 2), pick(32, 32, 64, 80, 96, 128, 256)
    dtype, window = pick(torch.float32, torch.float16, torch.bfloat16), pick(None, None, 1, 20, 130)
    stops = rng.integers(1, 260, rng.integers(1, 5))
    lens = np.minimum(stops, [pick(1, 1, 2, 5, 40, int(s)) for s in stops])
    shape = group * kv_heads, kv_heads, head_dim
    case = make_case(list(zip(stops - lens, stops)), block_size=pick(1, 2, 5, 16, 48, 64, 128, 256), num_heads=shape[0],
                     num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, window=window, seed=seed, device=DEVICE)
    if seed % 2:
        kv = torch.stack([case.k_cache, case.v_cache], 1)                     # [num_blocks, 2, ...]
        case = replace(case, k_cache=kv[:, 0], v_cache=kv[:, 1])
    chip = (90, int(rng.integers(1, 5))) if DEVICE == 'cpu' else None
    backend = TritonAttention(*shape, dtype, DEVICE, window, chip=chip)
    for tiling in (backend.short, backend.long): tiling.part.fill_(torch.nan), tiling.lse.fill_(torch.nan)
    return backend, case


def test_random_batches():
    env = os.environ | ({'TRITON_INTERPRET': '1'} if DEVICE == 'cpu' else {})
    seeds = [list(SEEDS[i::PROCESSES]) for i in range(PROCESSES)]
    running = [subprocess.Popen([sys.executable, __file__, json.dumps(some)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
               for some in seeds]
    for process, some in zip(running, seeds):
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, err[-3000:]
        assert json.loads(out.splitlines()[-1]) == some


if __name__ == '__main__':
    from pagedlm.compute.attention import check, make_case
    from pagedlm.compute.triton_attention import fix_interpreter
    if DEVICE == 'cpu': fix_interpreter()
    seeds = json.loads(sys.argv[1])
    for seed in seeds:
        try: check(*random_case(seed))
        except Exception as e: raise AssertionError(f'seed {seed}') from e
    many_parts = make_case([(1300, 1301)], num_heads=16, num_kv_heads=1, head_dim=256, device=DEVICE)      # more than are combined at a time
    check(TritonAttention(16, 1, 256, torch.float32, DEVICE, chip=(90, 4)), many_parts)
    print(json.dumps(seeds))
