"""The job that the page on Slurm asks for; there is no Slurm here."""

import ast
import os
import pathlib
import stat

import numpy as np
import pytest
from dask_jobqueue import SLURMCluster

import ensembleode as eo

from .problems import PROB
from .test_docs import blocks_of


PAGE = pathlib.Path(__file__).parents[1] / "docs" / "clusters" / "slurm.md"


def arguments():
    """What the page gives to `SLURMCluster`."""
    ...
