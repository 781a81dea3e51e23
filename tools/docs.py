"""The docs site, built offline from the notebooks: `python tools/docs.py [--out _docs]`.

nbdev's processors run first, as for `nbdev_docs`: they find what each cell exports, document it with `show_doc` and link `symbols` to
their definitions. What they give is written anew for MyST-NB (Quarto's words put into MyST's), and Sphinx makes pages of it, warnings being errors.
The few scripts that a page needs come from npm at the first build, and from a cache afterwards.
"""
from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import warnings
from base64 import b64decode
from bisect import bisect
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import anywidget
import nbformat
from execnb.nbio import mk_cell
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.process import NBProcessor, Processor
from nbdev.processors import FilterDefaults, add_show_docs
from PIL import Image

import pagedlm

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get('XDG_CACHE_HOME', Path.home()/'.cache'))/'pagedlm-docs'
NPM = {     # file: (package, its member, SHA-256)
    'require.js': ('requirejs@2.3.8', 'require.js', 'c1fc6b1d53af7522f78d664922abb32acac64ed0ecccb8f907f1e6fc7262563a'),
    'embed-amd.js': ('@jupyter-widgets/html-manager@1.0.15', 'dist/embed-amd.js', 'ca87dff57c70ffb2658794fde0eab0e27e5f5472a1f5df7ab2b08e1039fc4b72'),
    'temml.cjs': ('temml@0.13.5', 'dist/temml.cjs', '51b2f0314be4fa2aebed0811c0ae8bc334dff28e8e3d18951f4520bfd9985d4f'),
    'axe.min.js': ('axe-core@4.14.1', 'axe.min.js', '29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c'),
}
PARTS = [(0, 'Start'), (1, 'Words and traces'), (10, 'Memory'), (18, 'Scheduling'), (29, 'Compute'), (40, 'Serving'), (50, 'Figures'),
         (54, 'Serving'), (56, 'Figures'), (60, 'Results'), (70, 'To look things up')]       # (number of its first notebook, part)
TAGS = {('echo', 'false'): 'remove-input', ('output', 'false'): 'remove-output', ('include', 'false'): 'remove-cell',
        ('code-fold', 'true'): 'hide-input', ('warning', 'false'): 'remove-stderr'}         # Quarto's options, MyST-NB's tags


def asset(name: str) -> Path:
    "A file of an npm package, fetched once, always the same."
    package, member, digest = NPM[name]
    path = CACHE/digest[:12]/name
    if path.exists(): return path
    if not (npm := shutil.which('npm')):
        raise SystemExit(f'{name} comes from {package} and was not fetched before; that needs npm, which is not here. Install Node.js 18 or '
                         f'newer (npm comes with it) and build again: after the first time no network is needed.')
    with TemporaryDirectory() as tmp:
        done = subprocess.run([npm, 'pack', '--silent', '--pack-destination', tmp, package], capture_output=True, text=True)
        if done.returncode: raise SystemExit(f'npm could not fetch {package}:\n{done.stderr.strip()}')
        with tarfile.open(next(Path(tmp).glob('*.tgz'))) as f: data = f.extractfile(f'package/{member}').read()
    if (found := hashlib.sha256(data).hexdigest()) != digest: raise SystemExit(f'{member} of {package} has SHA-256 {found}, not {digest}')
    path.parent.mkdir(parents=True, exist_ok=True)
    (part := path.with_suffix(f'.{os.getpid()}')).write_bytes(data)
    part.rename(path)
    return path


# a notebook, processed by nbdev, as MyST

class add_method_docs(Processor):
    "`show_doc` cells for the public methods in a class's body, as nbdev makes them for the class (and, as it does, the last first)."
    def begin(self):
        cells = []
        for cell in self.nb.cells:
            if getattr(cell, 'has_sd', False):
                body = next((d.body for d in exported if isinstance(d, ast.ClassDef) and cell.source == f'show_doc({d.name})'), [])
                names = {d.name: None for d in body if isinstance(d, ast.FunctionDef) and not d.name.startswith('_')}
                for name in reversed(names):
                    cells.append(mk_cell(f'{cell.source[:-1]}.{name})'))
                    cells[-1].has_sd = True
            elif cell.cell_type == 'code': exported = cell.parsed_() or []
            cells.append(cell)
        self.nb.cells = cells


def processors() -> list:
    "nbdev's, with methods documented too; and exported cells are not removed: here they follow their documentation, folded."
    ours = {'add_show_docs': [add_show_docs, add_method_docs], 'rm_export': []}
    return [q for p in FilterDefaults().procs() for q in ours.get(p.__name__, [p])]


class Book:
    "What all pages share: where things are."
    def __init__(self):
        self.cfg, self.paths = get_config(), sorted(nbglob(as_path=True))
        self.base = f'{self.cfg.doc_host}{self.cfg.doc_baseurl}'.rstrip('/')
        self.blob = f'{self.cfg.git_url}/blob/{self.cfg.branch}'
        self.colab = f'https://colab.research.google.com/github/{self.cfg.user}/{self.cfg.repo}/blob/{self.cfg.branch}'
        self.symbol = re.compile(r'\[([^\]]*)\]\(' + re.escape(self.base) + r'/([\w.-]+)\.html#([\w.]+)\)')

    @staticmethod
    def page(notebook: str) -> str:
        "A page's name: the notebook's without its number, as nbdev names it."
        return re.sub(r'^\d+[a-zA-Z0-9]*_', '', Path(notebook).stem.lower())

    def myst(self, text: str) -> str:
        "Links to notebooks, files and symbols made to work in the site; Quarto's callouts as MyST's."
        def symbol(m): return m[1] if re.search(r'(^|\.)_', m[3]) else f'[{m[1]}]({m[2]}.ipynb#{m[3]})'     # private: not documented
        text = self.symbol.sub(symbol, text)
        text = re.sub(r'\]\((\w+)\.ipynb', lambda m: f']({self.page(m[1])}.ipynb', text)
        text = re.sub(r'\]\(\.\./', f']({self.blob}/', text)
        return re.sub(r'^(:{3,})\s*\{\.callout-(\w+)[^}]*\}$', r'\1{\2}', text, flags=re.M)

    def documented(self, text: str, level: int) -> str:
        "What `show_doc` says, under a heading of that level: source link, signature, docstring."
        source = re.search(r'\[source\]\((\S+?)\)\{[^}]*\}', text)
        name, body = re.search(r'^#+ (\S+)\n(.*)', text, re.M | re.S).groups()
        body = re.sub(r'^\*(.*)\*$', r'\1', body.strip(), count=1, flags=re.M)                  # only its first line is in italics
        body = body.removesuffix('Call self as a function.')                                    # `inspect`'s words where there are none
        link = f'[source]({source[1]}){{.source}}\n\n' if source and 'LNone' not in source[1] else ''
        name = name.replace('\\', '')
        if name.rpartition('.')[2][0].isupper(): body = body.replace('def ', 'class ', 1)
        return f'{"#" * level} `{name}`\n\n::::{{container}} api\n{link}{self.myst(body)}\n::::'

    def cell(self, cell, section: str) -> list:
        "A processed code cell for MyST-NB, then the Markdown among its outputs as cells of their own; nothing where nothing of it is to be seen."
        lines, options = cell.source.splitlines(), {}
        while lines and lines[0].startswith('#|'):
            name, _, value = lines.pop(0)[2:].partition(':')
            options[name.strip()] = value.strip().strip('"\'')
        source, directives = '\n'.join(lines).strip(), cell.directives_
        if 'hide_input' in directives: options['echo'] = 'false'
        if {'export', 'exporti', 'exports'} & directives.keys():
            if all(isinstance(d, (ast.Import, ast.ImportFrom)) for d in cell.parsed_() or ()): return []
            options = {'code-fold': 'true', 'code-summary': 'Source', **options}
        if directives.keys() & {'default_exp', 'hide'} or not source: return []
        tags = [tag for (name, value), tag in TAGS.items() if options.get(name, '').lower() == value]
        mystnb = {'image': {'alt': options.get('fig-alt') or f'Figure: {section}', 'loading': 'lazy'}}
        if 'hide-input' in tags: mystnb |= dict.fromkeys(('code_prompt_show', 'code_prompt_hide'), options.get('code-summary', 'Code'))
        if any(opaque(o) for o in cell.outputs): mystnb['image']['classes'] = 'opaque'
        prose = [self.myst(''.join(o['data']['text/markdown'])) for o in cell.outputs if 'text/markdown' in o.get('data', {})]
        outputs = [o for o in cell.outputs if 'text/markdown' not in o.get('data', {})]
        code = nbformat.v4.new_code_cell(source, metadata={'tags': tags, 'mystnb': mystnb}, outputs=outputs)
        seen = outputs or 'remove-input' not in tags
        return [code] * bool(seen) + [nbformat.v4.new_markdown_cell(text) for text in prose]

    def convert(self, path: Path, to: Path) -> str:
        "Writes the page of one notebook; returns its title."
        saved = nbformat.read(path, as_version=4)
        outputs = {cell.id: cell.outputs for cell in saved.cells if cell.cell_type == 'code'}
        done = NBProcessor(path, procs=processors())
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'Found cells containing imports')     # their outputs are not used
            done.process()
        front = done.nb.frontmatter_
        opening = re.fullmatch(r'# .+\n+> .+\n*([^\0]*)', saved.cells[0].source)       # nbdev keeps title and subtitle only
        if not opening: raise SystemExit(f'{path.name} does not begin with a title (# ...) and a line of subtitle (> ...)')
        section = front['title']
        where = f'[Notebook]({self.blob}/nbs/{path.name}) · [Open in Colab]({self.colab}/nbs/{path.name})'
        head = f'# {section}\n\n{{.lead}}\n{front.get("description", "")}\n\n{{.where}}\n{where}\n\n{self.myst(opening[1])}'
        cells, level, at = [nbformat.v4.new_markdown_cell(head)], 2, 0
        for cell in done.nb.cells:
            if cell.cell_type == 'raw' or cell.source.startswith(('<!-- WARNING: THIS FILE WAS AUTO', '[Open in Colab](')): continue
            if cell.cell_type == 'markdown':
                if headings := re.findall(r'^##+ (.+)', cell.source, re.M): level, section = 3, headings[-1]
                cells.append(nbformat.v4.new_markdown_cell(self.myst(cell.source)))
            elif cell.source.startswith('#|') and re.search(r'^show_doc\(', cell.source, re.M):
                text = ''.join(cell.outputs[0]['data']['text/markdown'])
                documented = nbformat.v4.new_markdown_cell(self.documented(text, level))
                cells.insert(at if getattr(cell, 'has_sd', False) else len(cells), documented)
            else:
                at, cell.outputs = len(cells), outputs[cell.id]          # those of imports and exports were made anew, out of context
                cells += self.cell(cell, section)
        nb = nbformat.v4.new_notebook(cells=cells, metadata={'kernelspec': dict(done.nb.metadata.kernelspec)})
        if 'widgets' in saved.metadata: nb.metadata['widgets'] = saved.metadata.widgets
        for i, cell in enumerate(nb.cells): cell.id = f'c{i}'
        nbformat.write(nb, to/f'{self.page(path.name)}.ipynb')
        return front['title']

    def api(self) -> str:
        "The page of all public names, each with the first sentence of its docstring, by module in reading order."
        spec = importlib.util.spec_from_file_location('modidx', self.cfg.lib_path/'_modidx.py')
        spec.loader.exec_module(index := importlib.util.module_from_spec(spec))
        pages = [self.page(p.name) for p in self.paths]
        home = {module: Path(next(iter(names.values()))[0].partition('#')[0]).stem for module, names in index.d['syms'].items() if names}
        lines = ['# All names', '', '{.lead}', 'Every public name, by module. What is in bold can be imported from `pagedlm` itself.']
        for module in sorted(home, key=lambda m: pages.index(home[m])):
            known = [n.removeprefix(f'{module}.') for n in index.d['syms'][module]]
            lines += ['', f'## `{module}`', '', f'[The notebook]({home[module]}.ipynb)', '']
            for name, said in public(ROOT/Path(*module.split('.')).with_suffix('.py')).items():
                def link(n): return f'[`{n.removeprefix(name + ".")}`]({home[module]}.ipynb{f"#{n.lower()}" if n in known else ""})'
                lines += [f'**{link(name)}**' if name in pagedlm.__all__ else link(name), f': {said}', '']
                if methods := [n for n in known if n.startswith(f'{name}.') and '._' not in n]: lines += ['  ' + ', '.join(map(link, methods)), '']
        return '\n'.join(lines)


def opaque(output) -> bool:
    "Whether it is a picture with a background of its own."
    png = output.get('data', {}).get('image/png')
    return png is not None and Image.open(BytesIO(b64decode(png))).convert('RGBA').getpixel((0, 0))[3] == 255


def public(module: Path) -> dict[str, str]:
    "The public names that a module defines, and what is said of each in one sentence."
    source = module.read_text(encoding='utf-8')
    lines, said, exported = source.splitlines(), {}, []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            said[node.name] = re.split(r'(?<=\.)\s|\n\n', ast.get_docstring(node) or '')[0].replace('\n', ' ')
        for target in getattr(node, 'targets', [getattr(node, 'target', None)]):
            if isinstance(target, ast.Name) and target.id == '__all__': exported = ast.literal_eval(node.value)
            elif isinstance(target, ast.Name): said[target.id] = lines[node.lineno - 1].partition('  # ')[2].strip()
    return {name: said[name] or '…' for name in said if name in exported}


# the site

def build(out: Path) -> None:
    "Makes the whole site at `out`; raises SystemExit where anything is wrong with it."
    if out.exists() and any(out.iterdir()) and not (out/'.buildinfo').exists(): raise SystemExit(f'{out} holds something else: it was not built by Sphinx')
    book = Book()
    with TemporaryDirectory(prefix='pagedlm-docs') as tmp:
        pages, static = Path(tmp)/'pages', Path(tmp)/'static'
        (static/'vendor').mkdir(parents=True), pages.mkdir()
        parts: dict[str, list[str]] = {}
        for path in book.paths:
            title = book.convert(path, pages)
            if number := re.match(r'\d+', path.name):
                part = PARTS[bisect(PARTS, int(number[0]), key=lambda p: p[0]) - 1][1]
                parts.setdefault(part, []).append(f'{number[0]} {title} <{book.page(path.name)}>')
        (pages/'names.md').write_text(book.api(), encoding='utf-8')
        parts.setdefault(PARTS[-1][1], []).append('All names <names>')
        index = nbformat.read(pages/'index.ipynb', as_version=4)
        index.cells += [nbformat.v4.new_markdown_cell('\n'.join(['```{toctree}', ':hidden:', f':caption: {part}', '', *entries, '```']))
                        for part, entries in parts.items()]
        nbformat.write(index, pages/'index.ipynb')
        if any('widgets' in nbformat.read(p, as_version=4).metadata for p in pages.glob('*.ipynb')):
            for name in 'require.js', 'embed-amd.js': shutil.copy(asset(name), static/'vendor')
            shutil.copy(Path(anywidget.__file__).parent/'nbextension'/'index.js', static/'vendor'/'anywidget.js')
        shutil.rmtree(out, ignore_errors=True)
        done = subprocess.run([sys.executable, '-m', 'sphinx', '-q', '-W', '--keep-going', '-j', str(os.cpu_count()), '-c', ROOT/'docs', '-d', f'{tmp}/doctrees',
                               '-D', f'html_static_path=static,{static}', '-D', f'temml={asset("temml.cjs")}', pages, out])
    if done.returncode: raise SystemExit('the site has the faults named above')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, help='folder of the site (doc_path in settings.ini, _docs)')
    build((parser.parse_args().out or get_config().doc_path).resolve())
