"The notebooks as a book: exercises with folded solutions and open checks, links that lead somewhere, and a path through all of it."
import json
import re
from pathlib import Path

import pytest
from conftest import ROOT

NOTEBOOKS = {p.stem: json.loads(p.read_text(encoding='utf-8'))['cells'] for p in sorted((ROOT/'nbs').glob('[0-9]*.ipynb'))}
ALL = {**NOTEBOOKS, 'index': json.loads((ROOT/'nbs'/'index.ipynb').read_text(encoding='utf-8'))['cells']}
CHAPTERS = [name for name in NOTEBOOKS if name[:2] not in ('00', '70', '71')]       # the tour, the glossary and the cheat sheet teach otherwise
LAST = '61_papers'                                                                  # of the path: what it leads to lies behind
FOLDED = '#| code-fold: true\n#| code-summary: "Solution"\n'
each_chapter = pytest.mark.parametrize('name', CHAPTERS)


def source(cell: dict) -> str: return ''.join(cell['source'])
def is_solution(cell: dict) -> bool: return cell['cell_type'] == 'code' and 'code-fold' in source(cell)


def prose(name: str) -> str:
    return '\n\n'.join(source(c) for c in ALL[name] if c['cell_type'] == 'markdown')


def exercises(cells: list[dict]) -> list[list[dict]]:
    "The cells of each exercise, from its task ('1. ...') to the next."
    starts = [i for i, c in enumerate(cells) if c['cell_type'] == 'markdown' and re.search(r'^(## |\*\*)Exercises', source(c), re.M)]
    assert starts, 'it has no exercises'
    found, rest = [], cells[starts[-1]:]
    for c in rest:
        if c['cell_type'] == 'markdown' and re.search(rf'^{len(found) + 1}\. ', source(c), re.M): found.append([])
        if found: found[-1].append(c)
    return found


@each_chapter
def test_exercises(name):
    "Two or more, at the end; each has one solution, folded on the site and in Jupyter, and then an open check that asserts."
    found = exercises(NOTEBOOKS[name])
    assert 2 <= len(found) <= 4
    for number, (task, *cells) in enumerate(found, 1):
        where = f'exercise {number}'
        kinds = ['solution' if is_solution(c) else c['cell_type'] for c in cells]
        assert kinds.count('solution') == 1, f'{where}: one folded solution, not {kinds}'
        at = kinds.index('solution')
        assert source(cells[at]).startswith(FOLDED) and source(cells[at])[len(FOLDED):].strip(), f'{where}: the solution begins {source(cells[at])[:60]!r}'
        assert not re.search(r'^(assert|print)\b', source(cells[at]), re.M), f'{where}: what is checked or shown stands in the open'
        checks = cells[at + 1:]
        assert checks and not any('#|' in source(c) for c in checks), f'{where}: no open cell follows the solution'
        assert re.search(r'^\s*(for .*: )?assert\b', '\n'.join(map(source, checks)), re.M), f'{where}: nothing is asserted'
        assert any(c.get('outputs') for c in checks), f'{where}: a check that shows nothing teaches nothing'
        answers = set(re.findall(r'^(?:class |def )?(\w+(?:, \w+)*)', source(cells[at]), re.M))
        names = {n for group in answers for n in group.split(', ')}
        asked = [n for n in names if re.search(rf'`[^`]*\b{n}\b', source(task))]
        used = '\n'.join(map(source, checks))
        assert asked, f'{where}: the task names nothing that the solution defines ({sorted(names)})'
        assert any(re.search(rf'\b{n}\b', used) for n in asked), f'{where}: the check uses none of {asked}'


@each_chapter
def test_solutions_are_hidden_in_jupyter(name):
    for c in NOTEBOOKS[name]:
        if c['cell_type'] == 'code': assert bool(c['metadata'].get('jupyter', {}).get('source_hidden')) == is_solution(c), source(c)[:80]


def anchors(name: str) -> set[str]:
    "Ids of a notebook's headings, as nbdev and Quarto make them of the text, and as GitHub does."
    heads = re.findall(r'^#+ +(.+)$', prose(name), re.M)
    plain = [re.sub(r'\[([^]]*)\]\([^)]*\)|[`*]', r'\1', h).strip() for h in heads]
    quarto = {re.sub(r'\s', '-', re.sub(r'[^\w\s.-]', '', h.lower())) for h in plain}
    return quarto | {re.sub(r'\s', '-', re.sub(r'[^\w\s-]', '', h.lower())) for h in plain} | {h.replace(' ', '-') for h in plain}


def links(text: str) -> list[tuple[str, str]]:
    "(file, anchor) of every link that stays in this repository."
    return [(file, anchor) for file, _, anchor in (x.partition('#') for x in re.findall(r'\]\(([^)\s]+)\)', text)) if not re.match(r'\w+:', file)]


@pytest.mark.parametrize('name', ALL)
def test_links_lead_somewhere(name):
    for file, anchor in links(prose(name)):
        path = (ROOT/'nbs'/file).resolve() if file else ROOT/'nbs'/f'{name}.ipynb'
        assert path.exists() or name == 'index' and (ROOT/file).exists(), f'{file} does not exist'      # index is also the README
        if anchor and path.suffix == '.ipynb' and path.stem in ALL:
            assert anchor in anchors(path.stem), f'{path.stem} has no heading #{anchor}: {sorted(anchors(path.stem))}'


def leads_to(name: str) -> list[str]:
    "Notebooks that its 'what breaks next' links to."
    text, at = prose(name), prose(name).rfind('## What breaks next')
    assert at >= 0, 'it does not say what breaks next'
    end = re.search(r'^(## |\*\*)Exercises', text[at:], re.M)
    return [Path(file).stem for file, _ in links(text[at:at + end.start() if end else None])]


@each_chapter
def test_says_what_breaks_next(name):
    "And leads on to a later notebook: in their order, chapters need no looking back."
    onward = [x for x in leads_to(name) if x > name]
    assert onward or name == LAST, f'{name} leads only to {leads_to(name)}'


def test_path_reaches_every_chapter():
    "Whoever follows the links from one chapter to the next, from the first one on, can read them all."
    seen, todo = set(), [CHAPTERS[0]]
    while todo:
        name = todo.pop()
        if name in CHAPTERS and name not in seen: seen.add(name); todo += leads_to(name)
    assert not set(CHAPTERS) - seen


def test_opens_in_colab():
    "Behind its first cell each notebook has a link to itself on Colab and a cell that installs pagedlm where it is missing."
    for name, cells in NOTEBOOKS.items():
        link, install = (''.join(c['source']) for c in cells[1:3])
        assert link == f'[Open in Colab](https://colab.research.google.com/github/pagedlm/pagedlm/blob/main/nbs/{name}.ipynb)', name
        assert install.startswith('#| hide\n') and '%pip install' in install, name
