"""README.md from nbs/index.ipynb, without Quarto: `python tools/readme.py [--check]`.

Markdown cells stand as they are, with links to notebooks and files made to work from the project's root; callouts become
GitHub's alerts; code cells become fenced code (unless `#| echo: false` or `#| hide`), followed by their saved outputs.
"""
import argparse
import re
import sys
from base64 import b64decode
from pathlib import Path

import nbformat
from fastcore.basics import AttrDict
from nbdev.process import extract_directives

callout = re.compile(r'^:{3,}\s*\{\.callout-(\w+)[^}]*\}\n(.*?)\n:{3,}\s*$', re.M | re.S)
link = re.compile(r'\]\((?!https?:|#|/)(?:\./)?([^)]+)\)')
ROOT = Path(__file__).resolve().parent.parent
NOTE = '<!-- Made from nbs/index.ipynb by tools/readme.py: edit there. -->'


def alert(match: re.Match) -> str:
    return '\n'.join([f'> [!{match[1].upper()}]', *(f'> {line}'.rstrip() for line in match[2].splitlines())])


def from_root(text: str) -> str:
    "Relative links of a notebook in nbs/, as they must read in the project's root."
    return link.sub(lambda m: f']({m[1][3:]})' if m[1].startswith('../') else f'](nbs/{m[1]})', text)


def shown(output: dict, name: str, alt: str, images: dict[str, bytes]) -> str:
    data = output.get('data', {})
    if 'text/markdown' in data: return from_root(data['text/markdown'])
    if 'image/png' in data:
        images[name] = b64decode(data['image/png'])
        return f'![{alt}](README_files/{name})'
    text = data.get('text/plain') or output.get('text', '')
    return f'```\n{text.rstrip()}\n```' if text.strip() else ''


def render(path: Path) -> tuple[str, dict[str, bytes]]:
    "README text of the notebook at `path`, and the images that it shows, by file name."
    parts, images = [NOTE], {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == 'markdown': parts.append(from_root(callout.sub(alert, cell.source)))
        if cell.cell_type != 'code': continue
        code = AttrDict(source=cell.source, cell_type='code')
        directives = extract_directives(code, remove=True)
        if 'hide' in directives or directives.get('include:') == ['false']: continue
        if directives.get('echo:') != ['false']:
            source = '\n'.join(line for line in code.source.splitlines() if not line.startswith('#|'))
            parts.append(f'```python\n{source.strip()}\n```')
        alt = ' '.join(directives.get('fig-alt:', []))
        parts += [shown(o, f'{cell.id}-{i}.png', alt, images) for i, o in enumerate(cell.outputs)]
    return '\n\n'.join(p.strip() for p in parts if p.strip()) + '\n', images


def main(check: bool) -> str | None:
    "Write README.md, or only compare; an error message when it is stale."
    text, images = render(ROOT/'nbs'/'index.ipynb')
    files = {ROOT/'README.md': text.encode(), **{ROOT/'README_files'/name: data for name, data in images.items()}}
    if check:
        stale = [p for p, data in files.items() if not p.exists() or p.read_bytes() != data]
        return f'{stale[0].name} is not what nbs/index.ipynb makes: run `python tools/readme.py`' if stale else None
    for path, data in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--check', action='store_true', help='only fail when README.md is stale')
    sys.exit(main(parser.parse_args().check))
