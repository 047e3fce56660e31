"""Package metadata of fedjax_het."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
# Folders of a checkout that are installed inside the package.
INSIDE = {'fedjax_het.configs': 'configs', 'fedjax_het.launch': 'launch'}

TEST = [
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


def long_description() -> str:
  """The README without pictures and relative links, which lead nowhere."""
  text = (HERE / 'README.md').read_text(encoding='utf-8')
  text = re.sub(r'!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n', '', text)
  return re.sub(r'\[([^\]]*)\]\((?!https?:)[^)]*\)', r'\1', text)


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
    long_description=long_description(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=packages(),
    package_dir=INSIDE,
    package_data={'fedjax_het': ['py.typed']},
    entry_points={
        'console_scripts': ['fedjax-het = fedjax_het.launch.cli:main']
    },
    python_requires='>=3.11',
    install_requires=[
        'absl-py',
        'chex',
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
