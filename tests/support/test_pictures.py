import itertools

import pytest

import jkvq
from jkvq.support.pictures import COLOURS, check_picture, line_look, new_figure, save_picture


def test_a_picture_that_cannot_be_written_is_refused_beforehand(tmp_path):
    check_picture(None)
    check_picture(tmp_path / "a.PNG")
    with pytest.raises(jkvq.UserError, match=r"a\.pdf: a picture is written as PNG"):
        check_picture(tmp_path / "a.pdf")
    with pytest.raises(jkvq.UserError, match="there is no folder"):
        check_picture(tmp_path / "none" / "a.png")


def test_pictures_are_png_files(tmp_path):
    save_picture(new_figure(2, 1, "a title"), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(jkvq.UserError, match=r"b\.png cannot be written: Is a directory"):
        save_picture(new_figure(2, 1, "a title"), tmp_path / "b.png")


def test_every_line_looks_different():
    looks = [tuple(line_look(index).values()) for index in range(4 * len(COLOURS))]
    assert len(set(looks)) == len(looks)


def test_the_colours_differ_for_people_who_see_no_red():
    """Protanopia by Vienot, Brettel and Mollon (1999), on linear light."""
    seen = {colour: _without_red(colour) for colour in COLOURS}
    for (_, one), (_, other) in itertools.combinations(seen.items(), 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 0.05


def _without_red(colour: str) -> tuple[float, float]:
    r, g, b = ((int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5))
    return 0.11238 * r + 0.88762 * g, 0.00401 * r - 0.00401 * g + b
