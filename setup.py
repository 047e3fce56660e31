"""Package metadata of fedjax_het."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
# Folders of a checkout that are installed inside the package.
INSIDE = {'fedjax_het.configs': 'configs', 'fedjax_het.launch': 'launch'}

TEST = [
    'datasets',
    'filelock',
    'hypothesis',
    'nbclient',
    'nbformat',
    'ipykernel',
    'pillow',
    'pytest',
    'pytest-xdist',
    'scipy',
    'tensorboardX',
]


def repository() -> str:
  """The address of the repository, as CITATION.cff states it; '' if not."""
  text = (HERE / 'CITATION.cff').read_text(encoding='utf-8')
  line = r'^repository-code: *[\'"]?(https?://[^\s\'"]+)'
  found = re.search(line, text, re.M)
  return found[1].rstrip('/') if found else ''


def project_urls(address: str) -> dict[str, str]:
  """The links beside the description; none without an address."""
  if not address:
    return {}
  return {
      'Source': address,
      'Documentation': f'{address}/blob/HEAD/docs/index.md',
      'Changelog': f'{address}/blob/HEAD/CHANGELOG.md',
      'Issues': f'{address}/issues',
  }


def long_description(address: str) -> str:
  """The README with absolute links to an address; without one, with none."""
  text = (HERE / 'README.md').read_text(encoding='utf-8')
  relative = r'\((?!https?:)([^)]*)\)'
  if address:
    for kind, start in (('raw', '!'), ('blob', '')):
      target = rf'\1({address}/{kind}/HEAD/\2)'
      text = re.sub(rf'({start}\[[^\]]*\]){relative}', target, text)
    return text
  # Pictures and relative links would lead nowhere.
  text = re.sub(rf'!\[[^\]]*\]{relative}\n\n', '', text)
  return re.sub(rf'\[([^\]]*)\]{relative}', r'\1', text)


def packages() -> list[str]:
  """All packages by the names under which they are installed."""
  found = setuptools.find_packages(include=['fedjax_het', 'fedjax_het.*'])
  for name, folder in INSIDE.items():
    inner = setuptools.find_packages(folder)
    found += [name, *(f'{name}.{package}' for package in inner)]
  return sorted(set(found))


setuptools.setup(
    name='fedjax_het',
    version=re.search(
        r"__version__ = '(.*)'", (HERE / 'fedjax_het/__init__.py').read_text()
    )[1],
    description=(
        'Federated learning with clients of different models, in JAX and Flax'
    ),
    author='The fedjax_het developers',
    long_description=long_description(repository()),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    project_urls=project_urls(repository()),
    packages=packages(),
    package_dir=INSIDE,
    package_data={
        'fedjax_het': ['py.typed', 'experiment/reference_speeds.json']
    },
    entry_points={
        'console_scripts': ['fedjax-het = fedjax_het.launch.cli:main']
    },
    python_requires='>=3.11',
    install_requires=[
        'absl-py',
        'chex',
        'etils[epy]>=1.9',
        'filelock; sys_platform == "win32"',
        'flax>=0.12',
        'importlib_resources',
        'jax>=0.10',
        'matplotlib',
        'ml_collections',
        'numpy',
        'optax',
        'orbax-checkpoint',
        'scikit-learn',
        'tensorflow-datasets',
        'tqdm',
    ],
    extras_require={
        'bench': ['torch==2.13.0'],
        'docs': ['mkdocs-material', 'mkdocstrings[python]'],
        'hf': ['datasets', 'pillow'],
        'mlflow': ['mlflow'],
        'plots': [],  # matplotlib is a dependency of the library itself.
        'privacy': ['dp-accounting'],
        'raw': ['pillow', 'scipy'],
        'tensorboard': ['tensorboardX'],
        'test': TEST,
        'tfds': ['tensorflow'],
        'wandb': ['wandb'],
        'dev': ['mypy', 'ruff', *TEST],
    },
    classifiers=[
        'Intended Audience :: Science/Research',
        'Operating System :: MacOS',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Typing :: Typed',
    ],
)
