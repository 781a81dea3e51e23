"""What tests/gpu.sh runs: the `#| cuda` cells and tests, then the measurements; a process for each section, one JSON for all.

Paged attention is measured beside `scaled_dot_product_attention` and flex_attention on contiguous keys and values, in the same run
on the same numbers, and every output is compared with attention in float32.
"""
import argparse
import codeop
import dataclasses
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOKE = '--smoke' in sys.argv
BUDGET = 480                     # seconds for everything: those of the sections together, of which those side by side count as the longest
SECTIONS = {}                                                         # name -> (function, most seconds)
ORDER = ('machine',), ('copy',), ('cells', 'tests'), ('decode',), ('mixed',), ('launch',), ('engine',)          # the checks side by side


def section(seconds):
    return lambda f: SECTIONS.setdefault(f.__name__, (f, seconds)) and f


# notebooks and tests

def cuda_notebooks() -> list[Path]:
    return [p for p in sorted((ROOT/'nbs').glob('[0-9]*.ipynb')) if any(is_cuda(c) for c in code_cells(p))]


def code_cells(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    sources = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
    return [s for s in sources if '%pip' not in s]          # the cell that installs pagedlm where it is missing


def flags(cell: str) -> set[str]: return {''.join(m.split()) for m in re.findall(r'^\s*#\|\s*(.+)$', cell, re.M)}
def is_cuda(cell: str) -> bool: return 'cuda' in flags(cell)


def run_notebook(path: Path) -> dict:
    "Execute the code cells in order, without Jupyter. A cell that fails is noted, and the next one has its turn."
    import torch
    skip = {'notest', 'slow', 'eval:false'} | (set() if torch.cuda.is_available() else {'cuda'})
    os.chdir(path.parent)
    python, space, errors, ran = codeop.Compile(), {'__name__': '__main__'}, [], {False: 0, True: 0}
    with tempfile.TemporaryDirectory() as folder:
        for i, cell in enumerate(code_cells(path)):
            if skip & flags(cell): continue
            file = Path(folder)/f'{path.stem}_{i}.py'                 # a real file: kernels are compiled from their source
            file.write_text(cell, encoding='utf-8')
            start = time.perf_counter()
            try: exec(python(cell, str(file), 'exec'), space)
            except Exception: errors.append(f'cell {i}: {traceback.format_exc()[-1500:]}')
            ran[is_cuda(cell)] += 1
            print(f'cell {i}: {time.perf_counter() - start:.1f} s', file=sys.stderr, flush=True)
    return dict(cells=ran[False], cuda_cells=ran[True], errors=errors)


def in_process(path: Path) -> dict:
    start, env = time.perf_counter(), {'OMP_NUM_THREADS': '2', 'NUMBA_NUM_THREADS': '2'} | os.environ
    command = [sys.executable, __file__, '--notebook', path]
    try: done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=190)
    except subprocess.TimeoutExpired as e: return dict(errors=[f'it took more than 190 seconds: {(e.stderr or b"").decode()[-1500:]}'])
    said = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else dict(errors=[(done.stdout + done.stderr)[-1500:]])
    return said | dict(seconds=round(time.perf_counter() - start, 1))


@section(200)
def cells():
    "Every notebook that has cells for a GPU. (The smoke run takes one that is quick, without those cells.)"
    paths = [ROOT/'nbs'/'30_kv_cache.ipynb'] if SMOKE else cuda_notebooks()
    with ThreadPoolExecutor(8) as pool: out = dict(zip([p.name for p in paths], pool.map(in_process, paths)))
    wrong = [f'{name}: {error}' for name, ran in out.items() for error in ran['errors']]
    return dict(cuda_notebooks=[p.name for p in cuda_notebooks()], notebooks=out), wrong


@section(200)
def tests():
    "Tests that use a GPU where there is one, but for the notebooks, which had their turn. (The smoke run only collects them.)"
    paths = [p for p in sorted((ROOT/'tests').glob('test_*.py')) if p.name != 'test_notebooks.py']
    files = [str(p) for p in paths if 'torch.cuda' in p.read_text(encoding='utf-8')]
    command = [sys.executable, '-m', 'pytest', '-q', '-o', 'addopts=', *(['--collect-only'] if SMOKE else []), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = done.stdout + done.stderr
    return dict(files=[Path(f).name for f in files], said=said.splitlines()[-1:]), [said[-3000:]] if done.returncode else []


# measuring

def device() -> str:
    import torch
    return 'cuda' if torch.cuda.is_available() else 'cpu'


def milliseconds(run, reps=20) -> float:
    "Median of several runs, each with nothing of its data in the cache; on a GPU, of its own clock."
    import torch
    if device() == 'cpu':
        times = []
        for _ in range(2):
            start = time.perf_counter(); run(); times.append(1e3 * (time.perf_counter() - start))
        return min(times)
    other = torch.ones(64 << 20, dtype=torch.int32, device='cuda')    # 256 MB, several times the L2; read, for written ones would be
                                                                      # sent to memory while `run` is timed
    for _ in range(3): run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
    for a, b in events: other.max(); a.record(); run(); b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[reps // 2]


def copy_speed() -> float:
    "Bytes read and written per second by a plain copy on the device, in GB/s."
    import torch
    a = torch.empty((1 << 20) if SMOKE else (2 << 30), dtype=torch.uint8, device=device())
    b = torch.empty_like(a)
    return 2 * len(a) / milliseconds(lambda: b.copy_(a)) / 1e6


@section(10)
def machine():
    import numpy, torch, triton
    cuda = device() == 'cuda'
    p = torch.cuda.get_device_properties(0) if cuda else None
    modules = {}
    for name in ('fastcore', 'numba', 'matplotlib', 'pytest', 'transformers', 'nbclient'):
        try: modules[name] = getattr(__import__(name), '__version__', 'there')
        except ImportError: modules[name] = None
    missing = [f'{name} cannot be imported: run tests/gpu.sh --prepare where there is a network, and carry .venv-gpu along'
               for name in ('fastcore', 'numba') if not modules[name]]
    chip = dict(device=p.name, processors=p.multi_processor_count, memory_gb=round(p.total_memory / 1e9, 1)) if cuda else dict(
        device=platform.processor() or platform.machine(), processors=os.cpu_count())
    return dict(**chip, python=platform.python_version(), torch=torch.__version__, triton=triton.__version__, numpy=numpy.__version__,
                interpreter=bool(os.environ.get('TRITON_INTERPRET')), **modules), missing


@section(10)
def copy(): return dict(gb_per_s=round(copy_speed(), 1)), []


# attention: the same keys and values in blocks and in one piece

@dataclasses.dataclass
class Problem:
    "`batch` sequences of `context` tokens, the last `chunk` of them new: all there is to know for every way of computing it."
    batch: int
    context: int
    chunk: int = 1
    group: int = 4
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    def __post_init__(self):
        import numpy as np, torch
        from pagedlm.compute.attention import AttnMeta
        from pagedlm.compute.kv_cache import KVCache
        from pagedlm.compute.triton_attention import TritonAttention
        gen, dtype = torch.Generator(device()).manual_seed(0), torch.bfloat16
        draw = lambda *shape: torch.randn(shape, generator=gen, device=device(), dtype=dtype)
        blocks = -(-self.context // self.block_size)
        self.k, self.v = (draw(self.batch, self.kv_heads, self.context, self.head_dim) for _ in 'kv')
        self.q = draw(self.batch * self.chunk, self.kv_heads * self.group, self.head_dim)
        tables = np.random.default_rng(0).permutation(self.batch * blocks).reshape(self.batch, blocks)
        cache = KVCache(1, self.batch * blocks, self.block_size, self.kv_heads, self.head_dim, dtype, device())
        self.caches = cache.layer(0)
        at = torch.from_numpy(tables).to(device())
        for pool, x in zip(self.caches, (self.k, self.v)):
            pool.fill_(torch.nan)
            full = torch.nn.functional.pad(x, (0, 0, 0, blocks * self.block_size - self.context), value=torch.nan)
            pool[at] = full.unflatten(2, (blocks, self.block_size)).transpose(1, 2)
        stops = np.full(self.batch, self.context)
        self.attention = TritonAttention(self.kv_heads * self.group, self.kv_heads, self.head_dim, dtype, device())
        plan = torch.from_numpy(self.attention.plan(stops - self.chunk, stops)).to(device())
        self.meta = dataclasses.replace(AttnMeta.build(stops - self.chunk, stops, tables, self.block_size, device()), plan=plan)
        self.scale = self.head_dim ** -.5

    @property
    def bytes(self) -> int: return 2 * self.k.nbytes + 2 * self.q.nbytes

    @property
    def flops(self) -> int:
        seen = self.chunk * (2 * self.context - self.chunk + 1) // 2                              # keys, over all new tokens
        return 4 * self.batch * self.kv_heads * self.group * self.head_dim * seen

    def paged(self): return self.attention(self.q, *self.caches, self.meta, self.scale)

    def dense(self, q, k, v, at=None):
        "SDPA on contiguous keys and values, [batch, heads, tokens, head_dim]. at: which of the new tokens q holds, if not all."
        import torch
        past, mask = self.context - self.chunk, None
        if at is not None or past and self.chunk > 1:
            at = torch.arange(self.chunk, device=q.device) if at is None else at
            mask = torch.arange(self.context, device=q.device) <= past + at[:, None]
        causal = mask is None and self.chunk > 1
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=self.scale, enable_gqa=True)

    def rows(self, x):
        "[num_tokens, heads, head_dim] <-> [batch, heads, chunk, head_dim]"
        return x.unflatten(0, (self.batch, self.chunk)).transpose(1, 2) if x.dim() == 3 else x.transpose(1, 2).flatten(0, 1)

    def sdpa(self): return self.rows(self.dense(self.rows(self.q), self.k, self.v))

    def flex(self):
        "A function that computes it with flex_attention; compiled, on a GPU."
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        past, mask = self.context - self.chunk, None
        if self.chunk > 1:
            mask = create_block_mask(lambda b, h, q, k: k <= q + past, None, None, self.chunk, self.context, device=device())
        flex = torch.compile(flex_attention, dynamic=False) if device() == 'cuda' else flex_attention
        return lambda: self.rows(flex(self.rows(self.q), self.k, self.v, block_mask=mask, scale=self.scale, enable_gqa=True))

    def error(self, out) -> float:
        "The largest difference to attention in float32, of some tokens of some sequences."
        import torch
        some = sorted({0, self.batch // 2, self.batch - 1})
        at = torch.linspace(0, self.chunk - 1, min(self.chunk, 64), device=out.device).long()
        q, k, v = self.rows(self.q)[some][:, :, at].float(), self.k[some].float(), self.v[some].float()
        return float((self.rows(out)[some][:, :, at].float() - self.dense(q, k, v, at)).abs().nan_to_num(1e9).max())


def measure(problem: Problem, with_flex: bool) -> tuple[dict, list[str]]:
    "Milliseconds and errors of the three ways."
    import torch
    torch.backends.cuda.matmul.allow_tf32 = False
    ways, ms, errors, wrong = dict(paged=problem.paged, sdpa=problem.sdpa), {}, {}, []
    if with_flex: ways['flex'] = None
    for name, run in ways.items():
        try:
            run = run or problem.flex()
            errors[name] = round(problem.error(run()), 5)
            if errors[name] > 2e-2: wrong.append(f'{name} is off by {errors[name]}')
            ms[name] = round(milliseconds(run), 4)
        except Exception as e: wrong.append(f'{name}: {type(e).__name__}: {str(e)[-500:]}')
    fields = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
    return fields | dict(ms=ms, error=errors), [f'{fields}: {w}' for w in wrong]


def measure_all(cases, until, describe) -> tuple[list[dict], list[str]]:
    rows, wrong = [], []
    for i, (fields, with_flex) in enumerate(cases):
        if time.perf_counter() > until:
            wrong.append(f'out of time after {i} of {len(cases)} cases')
            break
        problem = Problem(**fields)
        row, bad = measure(problem, with_flex)
        for name, ms in row['ms'].items(): row |= {f'{name}_{unit}': round(x, 3) for unit, x in describe(problem, ms).items()}
        rows.append(row)
        wrong += bad
        del problem
    return rows, wrong


@section(65)
def decode():
    "One token for each sequence: gigabytes of keys and values per second, and the fraction of what a copy moves."
    copied, until = copy_speed(), time.perf_counter() + 60
    sizes = [(b, n) for b in (1, 16, 64, 256) for n in (1000, 8192, 131072) if b * n <= 2**21]
    others = [dict(group=g) for g in (1, 2, 7, 8, 16)] + [dict(block_size=s) for s in (1, 8, 32, 64, 128, 256)]
    others += [dict(head_dim=64)]
    cases = [(dict(batch=b, context=n), (b, n) in ((64, 1000), (16, 8192))) for b, n in sizes]
    cases += [(dict(batch=64, context=4096) | o, False) for o in others]
    if SMOKE: cases = [(dict(batch=2, context=37, kv_heads=2, group=2, head_dim=32, block_size=s), s == 16) for s in (16, 5)]
    rows, wrong = measure_all(cases, until, lambda p, ms: dict(gb_per_s=p.bytes / ms / 1e6, of_copy=p.bytes / ms / 1e6 / copied))
    return dict(copy_gb_per_s=round(copied, 1), aim='0.9 of a copy from 270 MB of keys and values on', cases=rows), wrong


@section(60)
def mixed():
    "Chunks of many tokens: TFLOP/s."
    until = time.perf_counter() + 45
    cases = [(dict(batch=b, context=n, chunk=c, group=g, head_dim=d), (c, g, d) == (4096, 4, 128)) for b, n, c, g, d in (
        (1, 16384, 16384, 4, 128), (4, 4096, 4096, 4, 128), (16, 1024, 1024, 4, 128), (4, 4096, 4096, 1, 128), (4, 4096, 4096, 4, 64),
        (1, 32768, 2048, 4, 128), (16, 8192, 256, 4, 128), (64, 2048, 16, 4, 128))]
    if SMOKE: cases = [(dict(batch=2, context=40, chunk=c, kv_heads=2, group=2, head_dim=32), c == 40) for c in (40, 24)]
    rows, wrong = measure_all(cases, until, lambda p, ms: dict(tflops=p.flops / ms / 1e9))
    aim = '0.7 of a contiguous Triton flash attention (469 TFLOP/s were reported for an H100, float16, head_dim 128)'
    together = beside_decodes() if time.perf_counter() < until else None
    return dict(aim=aim, cases=rows, beside_decodes=together), wrong


def beside_decodes() -> dict:
    "Decodes and a long chunk in one batch: milliseconds together and alone, and errors. Raises AssertionError for a wrong output."
    import numpy as np, torch
    from pagedlm.compute.attention import check, make_case
    from pagedlm.compute.triton_attention import TritonAttention
    shape, decodes, chunk = (dict(num_heads=4, num_kv_heads=2, head_dim=32), [(36, 37)] * 2, [(8, 40)]) if SMOKE else (
        dict(num_heads=32, num_kv_heads=8, head_dim=128), [(1999, 2000)] * 32, [(2048, 4096)])
    attention, out = TritonAttention(*shape.values(), torch.bfloat16, device()), {}
    for name, chunks in dict(together=decodes + chunk, decodes=decodes, chunk=chunk).items():
        case = make_case(chunks, **shape, dtype=torch.bfloat16, device=device())
        plan = torch.from_numpy(attention.plan(*np.array(chunks).T)).to(device())
        case = dataclasses.replace(case, meta=dataclasses.replace(case.meta, plan=plan))
        run = lambda: attention(case.q, case.k_cache, case.v_cache, case.meta, case.scale)
        out[name] = dict(error=round(check(attention, case), 5), ms=round(milliseconds(run), 4))
    return out


# the host

def microseconds(run, n=200) -> float:
    "Of the host alone: on a GPU nothing is waited for."
    import torch
    n, sync = (3, lambda: None) if SMOKE else (n, torch.cuda.synchronize)
    best = float('inf')
    for _ in range(5):
        run(); sync()
        start = time.perf_counter()
        for _ in range(n): run()
        best = min(best, (time.perf_counter() - start) / n)
        sync()
    return round(1e6 * best, 2)


@section(20)
def launch():
    "What the host pays to start things."
    import numpy as np, torch
    from pagedlm.compute.sampler import Packet
    p = Problem(2, 40, kv_heads=2, group=2, head_dim=32) if SMOKE else Problem(8, 100)
    x, out = torch.zeros(8, device=device()), dict(attention_us=microseconds(p.paged, 50))
    out['torch_op_us'] = microseconds(lambda: x.add_(1))
    for n in (8, 64, 256):
        stops, packet, columns = np.full(n, 1000), Packet(device(), fixed=True), {f'column{i}': np.arange(n) for i in range(8)}
        out[f'plan_{n}_us'] = microseconds(lambda: p.attention.plan(stops - 1, stops))
        out[f'packet_{n}_us'] = microseconds(lambda: packet.send(**columns))
    if device() == 'cuda':
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): x.add_(1)
        out['graph_us'] = microseconds(graph.replay)
    return out, []


# the engine

SHAPES = {'SmolLM2-135M': dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
                               head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True),
          'SmolLM2-360M': dict(vocab_size=49152, hidden_size=960, intermediate_size=2560, num_layers=32, num_heads=15, num_kv_heads=5,
                               head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True),
          'SmolLM2-1.7B': dict(vocab_size=49152, hidden_size=2048, intermediate_size=8192, num_layers=24, num_heads=32, num_kv_heads=32,
                               head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True),
          'Llama-3-8B': dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
                             head_dim=128, max_position_embeddings=8192)}
TINY = dict(vocab_size=101, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32,
            max_position_embeddings=256)


def random_model(shape: dict, dtype):
    "Weights made on the device, where that takes no time."
    import torch
    from pagedlm.compute.model import Decoder, ModelConfig, weight_shapes
    config, gen = ModelConfig(**shape), torch.Generator(device()).manual_seed(0)
    draw = lambda s: torch.randn(s, generator=gen, device=device(), dtype=dtype).mul_(.2 if len(s) == 1 else s[1] ** -.5)
    return Decoder(config, {n: draw(s) + n.endswith('norm.weight') for n, s in weight_shapes(config).items()})


def serve(model, runner_class, attention, num_seqs: int, prompt: int, new: int) -> dict:
    "Serve `num_seqs` random prompts twice, and report the second time: tokens, seconds, and where a decode step's time went."
    import numpy as np
    from pagedlm.compute.kv_cache import KVCache
    from pagedlm.compute.sampler import Sampler
    from pagedlm.core import Request, SamplingParams
    from pagedlm.memory.block_manager import BlockManager
    from pagedlm.scheduling.engine import Engine
    from pagedlm.scheduling.scheduler import Scheduler
    c, blocks = model.config, num_seqs * (-(-(prompt + new) // 16) + 1)
    kv = KVCache(c.num_layers, blocks, 16, c.num_kv_heads, c.head_dim, model.dtype, model.device)
    runner = runner_class(model, kv, Sampler(num_seqs, c.vocab_size, model.device), attention)
    engine, rng = Engine(Scheduler(BlockManager(blocks, 16), num_seqs, 8192, prompt + new), runner), np.random.default_rng(0)
    prompts, greedy = rng.integers(0, c.vocab_size, (num_seqs, prompt)), SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for turn in range(2):
        seqs = [engine.add(Request(f'{turn}-{i}', p, greedy)) for i, p in enumerate(prompts)]
        begin, decodes = time.perf_counter(), []
        while engine.has_unfinished:
            before, start = dict(runner.times), time.perf_counter()
            engine.step()
            took = time.perf_counter() - start
            decodes.append({k: 1e3 * (v - before[k]) for k, v in runner.times.items()} | dict(step=1e3 * took))
        seconds = time.perf_counter() - begin
    decodes = decodes[-new // 2:]                                     # well after the prompts
    mid = {k: round(sorted(d[k] for d in decodes)[len(decodes) // 2], 4) for k in decodes[0]}
    out = dict(tokens_per_s=round(num_seqs * new / seconds, 1), decode_step_ms=mid.pop('step'), parts_ms=mid)
    if hasattr(runner, 'graphs') and device() == 'cuda':
        size = min(s for s in runner.graphs if s >= num_seqs)
        out['gpu_ms'] = round(milliseconds(runner.graphs[size][1].replay), 4)       # the last step again: writes what is there
        out['host_share'] = round(1 - out['gpu_ms'] / out['decode_step_ms'], 3)
    out['tokens'] = [s.output_token_ids for group in seqs for s in (group if isinstance(group, list) else [group])]
    return out


@section(115)
def engine():
    "End to end on random weights, with and without CUDA graphs."
    import torch
    from pagedlm.compute.cuda_graphs import GraphRunner
    from pagedlm.compute.runner import ModelRunner
    from pagedlm.compute.triton_attention import TritonAttention
    copied, results, wrong, until = copy_speed(), {}, [], time.perf_counter() + 95
    for name, shape in ({'tiny': TINY} if SMOKE else SHAPES).items():
        dtype = torch.float32 if SMOKE else torch.bfloat16
        model = random_model(shape, dtype)
        c = model.config
        attention = TritonAttention(c.num_heads, c.num_kv_heads, c.head_dim, dtype, model.device)
        size = sum(x.numel() for x in {id(x): x for x in tensors(model)}.values()) * dtype.itemsize
        results[name] = dict(weights_gb=round(size / 1e9, 3), weights_floor_ms=round(size / copied / 1e6, 4))
        for n, prompt, new in ((3, 5, 4),) if SMOKE else ((1, 256, 64), (64, 256, 64), (256, 256, 64)):
            if time.perf_counter() > until:
                wrong.append(f'out of time before {name}, {n} sequences')
                continue
            ways = dict(eager=ModelRunner, graphs=GraphRunner)
            runs = {way: serve(model, make, attention, n, prompt, new) for way, make in ways.items()}
            told = [run.pop('tokens') for run in runs.values()]
            same = sum(a == b for x, y in zip(*told) for a, b in zip(x, y)) / (n * new)
            if dtype == torch.float32 and same < 1: wrong.append(f'{name}, {n} sequences: other tokens with graphs')
            results[name][f'{n} sequences'] = runs | dict(same_tokens=round(same, 4), prompt=prompt, new=new)
        del model
    return results, wrong


def tensors(model):
    "The weights that a step reads."
    yield model.head.weight
    for layer in model.layers:
        for part in dataclasses.fields(layer) if dataclasses.is_dataclass(layer) else ():
            weight = getattr(getattr(layer, part.name), 'weight', None)
            if weight is not None: yield weight


# all of it

def child(name: str, pipe) -> None:
    try:
        os.chdir(ROOT)
        if SMOKE:
            import torch
            from pagedlm.compute.triton_attention import fix_interpreter
            torch.set_num_threads(1)
            fix_interpreter()
        result, wrong = SECTIONS[name][0]()
        pipe.send(dict(status='failed' if wrong else 'ok', errors=wrong, result=result))
    except BaseException: pipe.send(dict(status='failed', errors=[traceback.format_exc()[-3000:]]))


def run_section(name: str, seconds: float) -> dict:
    "In a process of its own: what breaks a device's context, or never ends, breaks nothing else."
    if seconds <= 0: return dict(status='skipped', errors=['no time was left'])
    fork = multiprocessing.get_context('fork')
    ours, theirs = fork.Pipe()
    process, start = fork.Process(target=child, args=(name, theirs)), time.perf_counter()
    process.start()
    theirs.close()
    failed = lambda why: dict(status='failed', errors=[why])
    try: report = ours.recv() if ours.poll(seconds) else failed(f'it took more than {seconds:.0f} seconds')
    except EOFError: report = failed('its process died')
    if process.is_alive():
        process.join(5)
        process.kill()
    process.join()
    return dict(status=report.pop('status'), seconds=round(time.perf_counter() - start, 1), **report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--smoke', action='store_true')
    parser.add_argument('--out', type=Path, default=ROOT/('build/gpu_smoke.json' if SMOKE else 'nbs/results/gpu.json'))
    parser.add_argument('--only', default=','.join(SECTIONS))
    parser.add_argument('--notebook', type=Path)
    args = parser.parse_args()
    if args.notebook:
        print(json.dumps(run_notebook(args.notebook.resolve())))
        return 0
    import torch, triton                                              # once for all; only the sections themselves touch the GPU
    begin = time.perf_counter()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    part = args.out.with_suffix('.part')                              # the notebooks read the last whole report meanwhile
    report = dict(date=str(date.today()), command=f'tests/gpu.sh{" --smoke" if SMOKE else ""}', sections={})
    for together in ORDER:
        together = [name for name in together if name in args.only.split(',')]
        left = BUDGET - (time.perf_counter() - begin)
        with ThreadPoolExecutor() as pool: got = list(pool.map(lambda name: run_section(name, min(SECTIONS[name][1], left)), together))
        for name, section in zip(together, got):
            report['sections'][name] = section
            report['seconds'] = round(time.perf_counter() - begin, 1)
            part.write_text(json.dumps(report, indent=1) + '\n')
            print(f"{name}: {section['status']}, {section.get('seconds', 0)} s", *section['errors'], sep='\n  ', flush=True)
    part.replace(args.out)
    return any(s['status'] != 'ok' for s in report['sections'].values())


if __name__ == '__main__': sys.exit(main())
