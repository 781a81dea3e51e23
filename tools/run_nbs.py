"""Run notebooks in a real kernel and keep their outputs: `python tools/run_nbs.py [nbs/10_block_allocator.ipynb ...]`.

Cells that `nbdev_test` would skip (`#| cuda` without a GPU, `#| eval: false`) keep the outputs of the last machine that
ran them. What is written is clean by `nbdev_clean`'s rules, so a second run changes nothing.
"""
import argparse
import json
import re
from pathlib import Path

import nbformat
from fastcore.basics import AttrDict
from nbclient import NotebookClient
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.process import extract_directives

# widgets and matplotlib's players name themselves by uuid4: seeded, a second run gives the same names
SEED = """import types, uuid, random, comm.base_comm
_r = random.Random({!r})
comm.base_comm.uuid = types.SimpleNamespace(uuid4=lambda: uuid.UUID(int=_r.getrandbits(128), version=4))"""


def has_gpu() -> bool:
    import torch
    return torch.cuda.is_available()


def is_skipped(cell: dict, skip: set[str]) -> bool:
    directives = extract_directives(AttrDict(source=cell.source, cell_type='code'), remove=False)
    return directives.get('eval:', [''])[0].lower() == 'false' or bool(skip & directives.keys())


def merged(outputs: list) -> list:
    """Neighbouring pieces of one stream as one: how a kernel cuts them depends on the clock. So does whether the CPU kernels were
    found compiled, which is said on stderr and left out.
    """
    out = []
    for o in outputs:
        if o.output_type == 'stream' and o.name == 'stderr' and o.text.startswith('pagedlm: compiling CPU kernels'): continue
        if out and o.output_type == out[-1].output_type == 'stream' and o.name == out[-1].name: out[-1].text += o.text
        else: out.append(o)
    return out


def keep_shown(nb) -> None:
    "Of the widgets' state, keep what the outputs show."
    kinds = ['application/vnd.jupyter.widget-state+json', 'application/vnd.jupyter.widget-view+json']
    saved, kept = nb.metadata.pop('widgets', {}).get(kinds[0], {}), {}
    todo = [o.data[kinds[1]]['model_id'] for c in nb.cells for o in c.get('outputs', []) if kinds[1] in o.get('data', {})]
    while todo:
        if (i := todo.pop()) not in kept and i in saved.get('state', {}):
            kept[i] = saved['state'][i]
            todo += re.findall('IPY_MODEL_([0-9a-f]+)', json.dumps(kept[i]['state']))
    if kept: nb.metadata.widgets = {kinds[0]: saved | {'state': kept}}


def run(path: Path, skip: set[str], cfg) -> None:
    "Execute the notebook at `path` and write it back, outputs kept and cleaned."
    nb, kept = nbformat.read(path, as_version=4), {}
    for cell in nb.cells:
        if cell.cell_type == 'code' and is_skipped(cell, skip):
            kept[cell.id] = cell.outputs
            cell.metadata['tags'] = ['skip-execution']
    nb.cells.insert(0, nbformat.v4.new_code_cell(SEED.format(path.name)))
    NotebookClient(nb, timeout=900, resources={'metadata': {'path': str(path.parent)}}).execute()
    nb.cells.pop(0)
    for cell in nb.cells:
        if cell.get('id') in kept:
            cell.outputs = kept[cell.id]
            cell.metadata.pop('tags')
        elif cell.cell_type == 'code': cell.outputs = merged(cell.outputs)
    keep_shown(nb)
    clean_nb(nb, False, cfg.allowed_metadata_keys.split(), cfg.allowed_cell_metadata_keys.split(), cfg.clean_ids)
    path.write_text(nbformat.writes(nb) + '\n', encoding='utf-8')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('paths', nargs='*', type=Path, help='notebooks; all of them when none is named')
    args = parser.parse_args()
    cfg = get_config()
    skip = set(cfg.tst_flags.split()) - ({'cuda'} if has_gpu() else set())
    for path in args.paths or sorted(nbglob(as_path=True)):
        run(path.resolve(), skip, cfg)
        print('ran', path.name, flush=True)
