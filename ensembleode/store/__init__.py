"""Ensembles on disk: batches go into a Zarr store as they are done, and are not computed again.

A store is one directory. Each variable is an array over the trajectories, with a chunk for each
batch. A batch is done when its record exists. The record is written last, with checksums of the
batch's chunks. The attributes hold a fingerprint of the problem, the solver, the options and the
versions, so that no other ensemble is written into the store. All metadata follow from the job, and
are written again if they are lost. The metadata of the group are written last, so that a store
exists as a whole or not at all.
"""

from .reading import FORMAT as FORMAT, open_ensemble as open_ensemble
from .stored import StoreError as StoreError
from .writing import batch_size_for as batch_size_for, StoreWriter as StoreWriter
