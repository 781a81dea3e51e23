"What the site adds to Sphinx: maths drawn when it is built, and anchors that are named as nbdev names them."
import re
import shutil
import subprocess
from functools import lru_cache

from docutils import nodes
from myst_parser.slugs import github_slugify
from sphinx.errors import ExtensionError

NAME = re.compile(r'[A-Za-z_]\w*(\.\w+)*')


def slug(title: str) -> str:
    "`BlockTable.append` is found at #blocktable.append, as nbdev's links have it; other headings as on GitHub."
    return title.lower() if NAME.fullmatch(title) else github_slugify(title)


@lru_cache(None)
def mathml(node: str, temml: str, tex: str, display: bool) -> str:
    "A formula as MathML, which browsers draw without any script."
    code = 'const [, temml, tex, display] = process.argv;' \
           'process.stdout.write(require(temml).renderToString(tex, {displayMode: display === "true", throwOnError: true}))'
    done = subprocess.run([node, '-e', code, temml, tex, str(display).lower()], capture_output=True, text=True)
    if done.returncode: raise ExtensionError(f'${tex}$ is no formula: {done.stderr.strip().splitlines()[-1]}')
    return done.stdout


def visit_math(translator, node, display: bool = False) -> None:
    if not (program := shutil.which('node')): raise ExtensionError('formulas are drawn with Node.js, and `node` is not here: install version 18 or newer')
    drawn = mathml(program, translator.config.temml, node.astext(), display)
    translator.body.append(f'<div class="math">{drawn}</div>' if display else drawn)
    raise nodes.SkipNode


def name_anchors(app, doctree) -> None:
    for section in doctree.findall(nodes.section):
        if isinstance(section[0][0], nodes.literal) and (name := slug(section[0].astext())) not in section['ids']: section['ids'].append(name)


def level_captions(app, pagename, templatename, context, doctree) -> None:
    "The captions of the sidebar are headings, and a heading needs a level."
    context['furo_navigation_tree'] = context['furo_navigation_tree'].replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app) -> dict:
    app.add_config_value('temml', '', 'env')
    app.add_html_math_renderer('mathml', (visit_math, None), (lambda t, n: visit_math(t, n, True), None))
    app.connect('doctree-read', name_anchors)
    app.connect('html-page-context', level_captions, priority=900)      # after furo has drawn it
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
