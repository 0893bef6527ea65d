from fnmatch import fnmatchcase

from jkvq.cache.specs.presets import PRESETS, families


def test_families_stand_for_every_preset_once():
    found = families()
    assert len(found) < len(PRESETS) / 3
    for name in PRESETS:
        assert sum(fnmatchcase(name, family) for family in found) == 1
