"""Package metadata of fedjax_het."""

import pathlib

import setuptools

TEST = [
    'hypothesis',
    'matplotlib',
    'nbclient',
    'nbformat',
    'ipykernel',
    'pillow',
    'pytest',
    'pytest-xdist',
    'scipy',
    'tensorboardX',
]

setuptools.setup(
    name='fedjax_het',
    version='0.1.0',
    description=(
        'Federated learning with clients of different models, in JAX and Flax'
    ),
    long_description=pathlib.Path(__file__)
    .with_name('README.md')
    .read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=setuptools.find_packages(
        include=['fedjax_het*', 'launch*', 'configs*', 'benchmarks*']
    ),
    python_requires='>=3.11',
    install_requires=[
        'absl-py',
        'chex',
        'flax>=0.12',
        'importlib_resources',
        'jax>=0.10',
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
        'plots': ['matplotlib'],
        'raw': ['pillow', 'scipy'],
        'tensorboard': ['tensorboardX'],
        'test': TEST,
        'tfds': ['tensorflow'],
        'dev': ['ruff', *TEST],
    },
    classifiers=[
        'License :: OSI Approved :: Apache Software License',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
