"Packaging; every setting is in settings.ini."
import shlex
from configparser import ConfigParser
from pathlib import Path

import setuptools

config = ConfigParser(delimiters=['='])
config.read('settings.ini', encoding='utf-8')
cfg = config['DEFAULT']
statuses = ['1 - Planning', '2 - Pre-Alpha', '3 - Alpha', '4 - Beta', '5 - Production/Stable']
pythons = ['3.11', '3.12', '3.13', '3.14']

setuptools.setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    keywords=cfg['keywords'],
    author=cfg['author'],
    author_email=cfg['author_email'],
    license='Apache-2.0',
    license_files=['LICENSE'],
    url=cfg['git_url'],
    classifiers=[
        'Development Status :: ' + statuses[int(cfg['status']) - 1],
        'Intended Audience :: ' + cfg['audience'],
        'Natural Language :: ' + cfg['language'],
        'Operating System :: POSIX :: Linux',
        'Operating System :: MacOS',
        *('Programming Language :: Python :: ' + p for p in pythons[pythons.index(cfg['min_python']):]),
    ],
    packages=setuptools.find_packages(include=[cfg['lib_name'], cfg['lib_name'] + '.*']),
    package_data={cfg['lib_name'] + '.figures': ['*.js', '*.css']},
    install_requires=shlex.split(cfg['requirements']),
    extras_require={'dev': shlex.split(cfg['dev_requirements'])},
    python_requires='>=' + cfg['min_python'],
    long_description=Path('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    zip_safe=False,
    entry_points={'console_scripts': cfg['console_scripts'].split(),
                  'nbdev': [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]},
)
