import numpy as np
import pytest

from jkvq.cache.specs.page_rule import Windows


@pytest.mark.parametrize(
    "windows", [Windows(0, 0, 8), Windows(0, 5, 8), Windows(4, 1, 8), Windows(16, 24, 16)]
)
def test_tokens_are_packed_by_pages_when_they_leave_the_recent_window(windows):
    waiting, stored = [], []
    for t in range(100):
        if t >= windows.sink:
            waiting.append(t)
        whole = windows.page if windows.windowed else 1
        while len(waiting) >= windows.recent + whole:
            stored, waiting = stored + waiting[:whole], waiting[whole:]
        assert windows.packed(t + 1) == len(stored)
        reads = windows.reads_packed(np.array([t]), np.arange(t + 1))
        assert np.flatnonzero(reads).tolist() == stored
        if stored:
            page = [token // windows.page for token in stored]
            assert windows.page_number(np.array(stored)).tolist() == page
            assert windows.middle(stored[-1]) == page[-1] * windows.page + windows.page // 2


def test_windows_are_whole_pages():
    windows = Windows(4, 128, 64)
    assert (windows.sink, windows.recent) == (64, 128)
    assert (windows.sink_pages, windows.exact_pages) == (1, 4)
    assert Windows(0, 0, 64).exact_pages == 0
