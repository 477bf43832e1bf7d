"""Short first steps: configurations of FLA's kernels that were timed before, and kernels that are
compiled side by side before the first step.

- `table.py`: the configurations as data, `sm_90.json` and the like beside it.
- `autotuners.py`: FLA's autotuners take them from there instead of timing candidates.
- `tiles.py`: block sizes of one kernel that fit LT2's heads.
- `compile_ahead.py`: what a step would launch is collected, then compiled by worker processes.
- `stamp.py`: which runs have their kernels in the cache; one process at a time fills it.

Both meddle with private parts of Triton, so they do nothing but for the versions they were read in.
"""
