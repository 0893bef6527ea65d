"""Where a step's time goes, of a profile that is written out."""

import pytest
from jax.profiler import ProfileData

from jkvq.bench.split import Profile, Split, busy_seconds, split_of

# Of two steps, in microseconds
KERNELS = {
    "gemm_fusion_dot_254": 220,
    "nvjet_tst_64x8_v_bz_TNT": 100,
    "thin_product_block_mosaic_gpu_kernel": 80,
    "decode_block_mosaic_gpu_kernel": 200,
    "decode__1": 50,
    "merge_partials": 50,
    "write": 40,
    "loop_add_fusion_70": 30,
    "MemcpyD2D": 10,
}


def _profile(kernels: dict[str, int]) -> Profile:
    names = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for i, name in enumerate(kernels, 1)
    )
    events = "".join(
        f"events {{ metadata_id: {i} duration_ps: {1_000_000 * us} }}"
        for i, us in enumerate(kernels.values(), 1)
    )
    on_gpu = f'lines {{ name: "Stream #13(Kernel)" {events} }} lines {{ name: "Steps" {events} }}'
    return ProfileData.from_text_proto(
        f'planes {{ name: "/device:GPU:0" {on_gpu} {names} }}'
        f'planes {{ name: "/host:CPU" lines {{ name: "Stream" {events} }} {names} }}'
    )


def test_kernels_are_told_by_their_names_and_the_rest_is_waiting():
    found = split_of(_profile(KERNELS), 2, 0.5)
    expected = Split(matmuls=0.2, attention=0.15, write=0.02, rest=0.02, gaps=0.11)
    for name in ("matmuls", "attention", "write", "rest", "gaps"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_what_ran_longer_than_the_step_leaves_no_gaps():
    assert split_of(_profile(KERNELS), 2, 0.3).gaps == 0


def test_streams_that_run_at_once_are_busy_once():
    """Two streams: 0 to 30 and 50 to 60 microseconds, 20 to 40 and 52 to 55."""

    def stream(number: int, *events: tuple[int, int]) -> str:
        written = "".join(
            f"events {{ metadata_id: 1 offset_ps: {start}000000 duration_ps: {took}000000 }}"
            for start, took in events
        )
        return f'lines {{ name: "Stream #{number}" timestamp_ns: 7 {written} }}'

    names = 'event_metadata { key: 1 value { id: 1 name: "write" } }'
    streams = stream(1, (0, 30), (50, 10)) + stream(2, (20, 20), (52, 3))
    found = ProfileData.from_text_proto(f'planes {{ name: "/device:GPU:0" {streams} {names} }}')
    assert busy_seconds(found) == pytest.approx(50e-6)
