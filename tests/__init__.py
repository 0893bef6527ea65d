"""What every process of a test run is told before JAX starts; what the caller has set stays."""

import os
from importlib.metadata import version
from pathlib import Path

from tests.kept_programs import KEPT

# Threads that wait for each other take the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists() and version("jaxlib") < "0.12":
    # Most of the time goes into compilation for CPUs, and this is a third of it or less: LLVM does
    # without optimization, a program is not split into parts for several cores, where the other
    # worker is, and the older and quicker way from fusions to LLVM is taken, where there still is
    # one. Programs stay as they are down to there. XLA ends a process for an option that it does
    # not have.
    old = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib") < "0.11" else ""
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1" + old,
    )
# Where in the source each operation was written: a tenth of the time that tests take.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Compiled programs, for the other processes and the next run: a quarter of what tests take.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(KEPT)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"

from tests.shapes import check_shapes  # JAX reads what is set above

check_shapes()
