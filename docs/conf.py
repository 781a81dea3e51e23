"Sphinx's settings for the site; tools/docs.py runs it on what nbdev made of the notebooks."
import sys
from pathlib import Path

from nbdev.config import get_config

sys.path.insert(0, str(Path(__file__).parent))
cfg = get_config()
project, author, copyright, release = cfg.title, cfg.author, cfg.copyright, cfg.version
extensions = ['myst_nb', 'sphinx_copybutton', 'extension']

nb_execution_mode = 'off'                   # outputs are the notebooks' own
nb_merge_streams = True
nb_render_image_options = {'loading': 'lazy'}
nb_ipywidgets_js = {'vendor/require.js': {}, 'widgets.js': {}, 'vendor/embed-amd.js': {}}
myst_enable_extensions = ['dollarmath', 'deflist', 'attrs_block', 'attrs_inline', 'colon_fence', 'html_image']
myst_heading_anchors = 4
myst_heading_slug_func = 'extension.slug'

html_theme, html_title, html_favicon = 'furo', cfg.title, 'static/favicon.svg'
html_css_files, html_js_files = ['book.css'], ['book.js']
html_theme_options = {name: {
    'color-sidebar-link-text': 'var(--color-foreground-primary)', 'color-sidebar-link-text--top-level': 'var(--color-foreground-primary)',
    'sidebar-item-spacing-vertical': '.25rem', 'sidebar-item-font-size': '.85rem', 'code-font-size': '.8rem',
} for name in ('light_css_variables', 'dark_css_variables')}
html_math_renderer = 'mathml'
html_use_index = html_copy_source = html_show_sourcelink = html_show_sphinx = False
pygments_style, pygments_dark_style = 'a11y-high-contrast-light', 'a11y-high-contrast-dark'
copybutton_selector = 'div.cell_input pre, div.highlight-bash pre'
