"""Compile the Triton kernel for GPUs that are not here and read what the assembler did: no register may spill to memory.

Needs no GPU, but a process in which the interpreter was never switched on; so each architecture gets one of its own.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip('triton')

CASES = [(dtype, dim, 512) for dtype in ('fp16', 'bf16') for dim in (64, 128)] + [('bf16', 128, 1)]     # dtype, head_dim, max_chunk


def compile_kernel(arch, dtype: str, head_dim: int, max_chunk: int, group: int = 4, block_size: int = 16):
    "The kernel as `paged_attention` would launch it: arch is 80 or 90 (NVIDIA) or 'gfx942' (AMD)."
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from pagedlm.compute.triton_attention import launch_config, paged_attention_kernel as kernel
    config = launch_config(head_dim, group, max_chunk, {'fp16': torch.float16, 'bf16': torch.bfloat16}[dtype])
    options = {name: config.pop(name) for name in ('num_warps', 'num_stages')}
    consts = dict(config, GROUP=group, BLOCK_SIZE=block_size, HEAD_DIM=head_dim, WINDOW=0)
    data = ('q_ptr', 'k_ptr', 'v_ptr', 'out_ptr')
    kind = lambda name: ('constexpr' if name in consts else f'*{dtype}' if name in data else '*i32' if name.endswith('_ptr')
                         else 'fp32' if name == 'scale' else 'i32')
    aligned = lambda name: name not in consts and name not in ('scale', 's_table')       # what a launch finds divisible by 16
    source = ASTSource(kernel, signature={n: kind(n) for n in kernel.arg_names}, constexprs=consts,
                       attrs={(i,): [['tt.divisibility', 16]] for i, n in enumerate(kernel.arg_names) if aligned(n)})
    target = GPUTarget('hip', arch, 64) if isinstance(arch, str) else GPUTarget('cuda', arch, 32)
    return triton.compile(source, target=target, options=options)


def spilled_bytes(compiled) -> int:
    "Thread-private memory that the kernel uses; it has no local arrays, so all of it is spilled registers."
    import re
    import triton
    if 'amdgcn' in compiled.asm:
        counts = [re.search(rf'\.{name}:\s+(\d+)', compiled.asm['amdgcn']) for name in ('vgpr_spill_count', 'private_segment_fixed_size')]
        return sum(int(m[1]) for m in counts)
    tool = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin' / 'cuobjdump'
    with tempfile.NamedTemporaryFile(suffix='.cubin') as f:
        f.write(compiled.asm['cubin'])
        f.flush()
        said = subprocess.run([tool, '--dump-resource-usage', f.name], capture_output=True, text=True, check=True).stdout
    m = re.search(r'STACK:(\d+).*LOCAL:(\d+)', said)
    return int(m[1]) + int(m[2])


def start(arch, cases) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    return subprocess.Popen([sys.executable, __file__, json.dumps([arch, cases])], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_no_spills():
    running = {arch: start(arch, CASES) for arch in (80, 90, 'gfx942')}
    for arch, process in running.items():
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f'{arch}: {err[-2000:]}'
        spills = dict(zip(map(tuple, CASES), json.loads(out.splitlines()[-1])))
        assert len(spills) == len(CASES) and not any(spills.values()), f'{arch} spills (bytes): {spills}'


if __name__ == '__main__':
    arch, cases = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as cache:                     # never an old kernel
        os.environ['TRITON_CACHE_DIR'] = cache
        print(json.dumps([spilled_bytes(compile_kernel(arch, *case)) for case in cases]))
