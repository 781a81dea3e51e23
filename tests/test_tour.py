"The tour leads everywhere, the glossary has every word, and the cheat sheet says what the objects say."
import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import ROOT

import pagedlm
from pagedlm.core import NewSequence
from pagedlm.figures.player import script, style, views
from pagedlm.scheduling.scheduler import Rows
from pagedlm.trace import columns, usage_kinds

NBS = ROOT/'nbs'
TOUR, GLOSSARY, SHEET = (NBS/f'{name}.ipynb' for name in ('00_tour', '70_glossary', '71_cheat_sheet'))


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding='utf-8'))['cells']


def prose(path: Path) -> str:
    return '\n\n'.join(''.join(c['source']) for c in cells(path) if c['cell_type'] == 'markdown')


def outputs(path: Path) -> list[dict[str, str]]:
    "What each output says, by MIME type; streams are text/plain."
    said = [o for c in cells(path) for o in c.get('outputs', ())]
    return [{k: ''.join(v) for k, v in o.get('data', {'text/plain': o.get('text', '')}).items() if isinstance(v, (str, list))} for o in said]


def shown(path: Path) -> str:
    "Prose and outputs, as a reader sees them."
    return prose(path) + '\n\n' + '\n'.join(o.get('text/markdown') or o.get('text/plain', '') for o in outputs(path))


def defined(path: Path) -> dict[str, str]:
    "The words that stand in bold at the start of a table's row, with the row."
    rows = [r for r in shown(path).splitlines() if re.match(r'\| [^|]*\*\*', r)]
    return {word.strip('`'): row for row in rows for word in re.findall(r'\*\*(.+?)\*\*', row.split(' | ')[0])}


def slug(heading: str) -> str:
    return re.sub(r'[^\w\- ]', '', heading.strip().lower()).replace(' ', '-')


# links

@pytest.mark.parametrize('path', [TOUR, GLOSSARY, SHEET], ids=lambda p: p.stem)
def test_links_resolve(path):
    for target in re.findall(r'\]\((?!https?:)([^)]+)\)', shown(path)):
        name, _, anchor = target.partition('#')
        page = NBS/name if name else path
        assert page.exists(), f'{target} leads nowhere'
        if anchor: assert anchor in map(slug, re.findall(r'^#+ (.+)', prose(page), re.M)), f'{target}: no such heading'


def test_tour_leads_to_every_notebook():
    links = set(re.findall(r'\]\((?!https?:)([^)#]+\.ipynb)', prose(TOUR)))
    assert {p.name for p in NBS.glob('[0-9]*.ipynb')} - {TOUR.name} == links


# the tour

def test_tour_tells_the_story_in_order_and_from_runs():
    headings = re.findall(r'^## (\d)\. ', prose(TOUR), re.M)
    assert headings == list('1234567')
    players = [o['text/html'] for o in outputs(TOUR) if 'data-pagedlm' in o.get('text/html', '')]
    assert 1 <= len(players) <= 4
    for page in players:
        assert style() in page and any(script(view) in page for view in views), 'an older player: python tools/run_nbs.py nbs/00_tour.ipynb'
    source = '\n'.join(''.join(c['source']) for c in cells(TOUR))
    assert not re.search(r'\btorch\b|^#\| export|default_exp', source, re.M)


def test_tour_table_is_a_way_down():
    "Each step of the story takes fewer iterations than the one before, and paging leaves little to waste."
    table = next(o['text/markdown'] for o in outputs(TOUR) if '| iterations |' in o.get('text/markdown', ''))
    rows = [[x.strip() for x in r.split('|')[1:-1]] for r in table.splitlines()[2:]]
    done = {name[0]: (int(i), float(batch), int(wasted.rstrip('%'))) for name, i, batch, wasted in rows if i.isdigit()}
    assert [r[0] for r in rows if not r[1].isdigit()] == ['3. no reservation']
    for a, b in '12', '24', '45', '56': assert done[a][0] > done[b][0] and done[a][1] < done[b][1]
    assert max(done[s][2] for s in '567') < 10 < 40 < min(done[s][2] for s in '124')


# the glossary

def test_glossary_has_every_word():
    words = defined(GLOSSARY)
    events = re.search(r'kind: (.*?)\n *seq_id', inspect.getdoc(pagedlm.Event), re.S)[1]
    kinds = re.sub(r'\(.*?\)', '', events, flags=re.S).replace(' or ', ', ').replace('.', '').split(',')
    assert len(kinds) == 11
    for word in [*usage_kinds, *pagedlm.policies, *(k.strip() for k in kinds), 'block', 'slot', 'block table', 'ref_count', 'chunk', 'group', 'seat', 'due']:
        assert word in words, word


def test_glossary_says_where_each_word_is_made():
    rows = defined(GLOSSARY)
    assert len(rows) > 80
    for word, row in rows.items():
        if word in usage_kinds or word in pagedlm.policies: continue
        said, made = row.strip('| ').split(' | ')[-2:]
        assert said.endswith('.') and re.match(r'\[\d\d\]\(\d\d_\w+\.ipynb\)', made), row


def test_glossary_knows_every_policy_as_it_is():
    rows = defined(GLOSSARY)
    for name, cls in pagedlm.policies.items(): assert inspect.getdoc(cls).splitlines()[0] in rows[name]


def test_every_public_name_is_explained():
    said = shown(GLOSSARY) + shown(SHEET)
    assert not [name for name in pagedlm.__all__ if not re.search(rf'`{name}`|^{name}\b', said, re.M)]


def test_name_map_is_whole():
    "Four fields in every row, one of them filled; and the names that a reader of the papers and of other engines looks for."
    said = prose(GLOSSARY)
    for head in '| pagedlm | Orca | vLLM | SGLang |', '| pagedlm | TensorRT-LLM | TGI | HF |':
        table = said.split(head)[1].split('\n\n')[0].strip().splitlines()[1:]
        rows = [[x.strip() for x in row.strip('|').split('|')] for row in table]
        assert len(rows) > 10 and all(len(row) == 4 and row[0] and any(row[1:]) for row in rows)
    for name in 'n_rsrv max_bs BlockSpaceManager KVCacheManager SequenceGroup SchedulerOutput retract page_size'.split(): assert name in said, name


# the cheat sheet

def test_cheat_sheet_is_not_stale():
    sheet = next(o['text/plain'] for o in outputs(SHEET) if o.get('text/plain', '').startswith('Request'))
    for cls in pagedlm.Request, pagedlm.Sequence, pagedlm.Plan, pagedlm.StepResult:
        for f in fields(cls): assert f.name == 'iteration' or re.search(rf'\b{f.name}\b', sheet), f'{cls.__name__}.{f.name}'
    for name in (*columns, *Rows.columns, *pagedlm.Usage._fields, *pagedlm.Grant._fields, *pagedlm.Event._fields, *NewSequence._fields):
        assert re.search(rf'\b{name}\b', sheet) or name in usage_kinds, name
    for cls, verbs in (pagedlm.BlockManager, 'admit append extend computed awaits fork free release_before swap_out swap_in usage'), (pagedlm.Policy, ''):
        asked = verbs.split() or [n for n, f in inspect.getmembers(cls, inspect.isfunction) if n[0] != '_']
        for n in asked:
            says = re.split('[.:;]', ' '.join(inspect.getdoc(getattr(cls, n)).replace('`', '').split()))[0]
            line = next(x for x in sheet.splitlines() if x.startswith(f'{n}('))
            assert ' '.join(says.split()[:5]) in line, n


def test_cheat_sheet_is_a_page():
    sheet = next(o['text/plain'] for o in outputs(SHEET) if o.get('text/plain', '').startswith('Request'))
    assert len(sheet.splitlines()) <= 60 and max(map(len, sheet.splitlines())) <= 110
