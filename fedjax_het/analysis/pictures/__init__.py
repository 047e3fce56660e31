"""Pictures of partitions, training and tables (needs matplotlib).

`style` defines how they look. A colour and a marker belong to a method, or to
a group; the functions take them as {label: look}.
"""

from fedjax_het.analysis.pictures.curves import draw_curves
from fedjax_het.analysis.pictures.dots import draw_dots, draw_strips
from fedjax_het.analysis.pictures.images import draw_images
from fedjax_het.analysis.pictures.matrices import draw_heat_maps, draw_matrices
from fedjax_het.analysis.pictures.partition import draw_partition
from fedjax_het.analysis.pictures.points import draw_points
from fedjax_het.analysis.pictures.stacks import draw_stacks
from fedjax_het.analysis.pictures.style import (
    COLOURS,
    MEAN_LOOK,
    Look,
    group_looks,
    look,
    looks_by_place,
)
from fedjax_het.analysis.pictures.trade_off import draw_trade_off

__all__ = [
    'COLOURS',
    'MEAN_LOOK',
    'Look',
    'draw_curves',
    'draw_dots',
    'draw_heat_maps',
    'draw_images',
    'draw_matrices',
    'draw_partition',
    'draw_points',
    'draw_stacks',
    'draw_strips',
    'draw_trade_off',
    'group_looks',
    'look',
    'looks_by_place',
]
